/* The part of the DLPack ABI (version 1) that fastmm uses.
 *
 * Source: the DLPack specification 1.3, https://dmlc.github.io/dlpack/latest/. Only layouts and
 * numbers are taken over; the names are ours, so that this header can stand beside dlpack.h.
 */
#ifndef FASTMM_DLPACK_H
#define FASTMM_DLPACK_H

#include <stdint.h>

#define FMM_DLPACK_MAJOR 1
#define FMM_DLPACK_MINOR 3

/* Device types whose memory the CPU may read through the data pointer. */
#define FMM_DL_CPU 1
#define FMM_DL_CUDA_HOST 3
#define FMM_DL_ROCM_HOST 11
#define FMM_DL_CUDA_MANAGED 13

#define FMM_DL_FLAG_READ_ONLY (UINT64_C(1) << 0)

typedef struct {
    uint32_t major;
    uint32_t minor;
} fmm_dl_version_t;

typedef struct {
    int32_t device_type;
    int32_t device_id;
} fmm_dl_device_t;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} fmm_dl_dtype_t;

typedef struct {
    void *data; /* the first element lies at data + byte_offset */
    fmm_dl_device_t device;
    int32_t ndim;
    fmm_dl_dtype_t dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means C-contiguous (before 1.2) */
    uint64_t byte_offset;
} fmm_dl_tensor_t;

typedef struct fmm_dl_managed_t {
    fmm_dl_version_t version;
    void *manager_ctx;
    void (*deleter)(struct fmm_dl_managed_t *self); /* may be NULL; may need the GIL */
    uint64_t flags;
    fmm_dl_tensor_t tensor;
} fmm_dl_managed_t;

/* The table behind the capsule `type(t).__dlpack_c_exchange_api__`, named "dlpack_exchange_api".
 * Every function needs the GIL, returns 0, or -1 with a Python exception set. */
typedef struct fmm_dl_exchange_header_t {
    fmm_dl_version_t version;
    struct fmm_dl_exchange_header_t *prev_api;
} fmm_dl_exchange_header_t;

typedef struct {
    fmm_dl_exchange_header_t header;
    int (*managed_tensor_allocator)(fmm_dl_tensor_t *prototype, fmm_dl_managed_t **out, void *error_ctx,
                                    void (*set_error)(void *, const char *, const char *));
    /* A new owner of the tensor's memory. */
    int (*managed_tensor_from_py_object_no_sync)(void *py_object, fmm_dl_managed_t **out);
    /* Takes over the managed tensor, on success. */
    int (*managed_tensor_to_py_object_no_sync)(fmm_dl_managed_t *tensor, void **out_py_object);
    /* A view that is good until control goes back to Python; may be NULL. */
    int (*dltensor_from_py_object_no_sync)(void *py_object, fmm_dl_tensor_t *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} fmm_dl_exchange_api_t;

#endif
