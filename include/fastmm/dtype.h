/* One table of element types: the wire's names, DLPack's codes and numpy's kinds side by side.
 *
 * Row: X(enumerator suffix, name on the wire (torch's, without `torch.`), item size in bytes, class of number,
 *        DLPack code, DLPack bits, numpy kind character or 0 where numpy itself has no such type).
 * DLPack codes: DLDataTypeCode of DLPack 1.1 (int 0, uint 1, float 2, bfloat 4, complex 5, bool 6, float8_* 7 to 14).
 * Order is API: codes are small ints that cross module borders, so append only.
 */
#ifndef FASTMM_DTYPE_H
#define FASTMM_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum fmm_dtype_class {
    FMM_CLASS_BOOL = 0,
    FMM_CLASS_INT,
    FMM_CLASS_UINT,
    FMM_CLASS_FLOAT,
    FMM_CLASS_COMPLEX
} fmm_dtype_class_t;

#define FMM_DTYPE_TABLE(X)                                                  \
    X(BOOL,           "bool",           1,  BOOL,    6,  8,   'b')          \
    X(UINT8,          "uint8",          1,  UINT,    1,  8,   'u')          \
    X(INT8,           "int8",           1,  INT,     0,  8,   'i')          \
    X(UINT16,         "uint16",         2,  UINT,    1,  16,  'u')          \
    X(INT16,          "int16",          2,  INT,     0,  16,  'i')          \
    X(UINT32,         "uint32",         4,  UINT,    1,  32,  'u')          \
    X(INT32,          "int32",          4,  INT,     0,  32,  'i')          \
    X(UINT64,         "uint64",         8,  UINT,    1,  64,  'u')          \
    X(INT64,          "int64",          8,  INT,     0,  64,  'i')          \
    X(FLOAT16,        "float16",        2,  FLOAT,   2,  16,  'f')          \
    X(BFLOAT16,       "bfloat16",       2,  FLOAT,   4,  16,  0)            \
    X(FLOAT32,        "float32",        4,  FLOAT,   2,  32,  'f')          \
    X(FLOAT64,        "float64",        8,  FLOAT,   2,  64,  'f')          \
    X(COMPLEX32,      "complex32",      4,  COMPLEX, 5,  32,  0)            \
    X(COMPLEX64,      "complex64",      8,  COMPLEX, 5,  64,  'c')          \
    X(COMPLEX128,     "complex128",     16, COMPLEX, 5,  128, 'c')          \
    X(FLOAT8_E4M3FN,  "float8_e4m3fn",  1,  FLOAT,   10, 8,   0)            \
    X(FLOAT8_E4M3FNUZ,"float8_e4m3fnuz",1,  FLOAT,   11, 8,   0)            \
    X(FLOAT8_E5M2,    "float8_e5m2",    1,  FLOAT,   12, 8,   0)            \
    X(FLOAT8_E5M2FNUZ,"float8_e5m2fnuz",1,  FLOAT,   13, 8,   0)            \
    X(FLOAT8_E8M0FNU, "float8_e8m0fnu", 1,  FLOAT,   14, 8,   0)

typedef enum fmm_dtype {
    FMM_DTYPE_NONE = -1, /* not a type of this table */
#define FMM_DTYPE_ENUMERATOR(id, name, nbytes, cls, code, bits, kind) FMM_##id,
    FMM_DTYPE_TABLE(FMM_DTYPE_ENUMERATOR)
#undef FMM_DTYPE_ENUMERATOR
    FMM_DTYPE_COUNT
} fmm_dtype_t;

typedef struct fmm_dtype_info {
    const char *name;       /* on the wire, NUL-terminated */
    uint8_t name_nbytes;    /* without the NUL */
    uint8_t item_nbytes;
    uint8_t number_class;   /* fmm_dtype_class_t */
    uint8_t dlpack_code;
    uint8_t dlpack_bits;    /* lanes are always 1 */
    char numpy_kind;        /* 0: numpy itself has no such type */
} fmm_dtype_info_t;

/* static const in a header: each extension gets its own 400 bytes and no link-time dependency on another. */
static const fmm_dtype_info_t fmm_dtype_infos[FMM_DTYPE_COUNT] = {
#define FMM_DTYPE_ROW(id, name, nbytes, cls, code, bits, kind) \
    {name, (uint8_t)(sizeof(name) - 1), nbytes, FMM_CLASS_##cls, code, bits, kind},
    FMM_DTYPE_TABLE(FMM_DTYPE_ROW)
#undef FMM_DTYPE_ROW
};

/* The row of a code, NULL when the code is not of this table. */
static inline const fmm_dtype_info_t *fmm_dtype_info(int dtype)
{
    return (dtype >= 0 && dtype < (int)FMM_DTYPE_COUNT) ? &fmm_dtype_infos[dtype] : NULL;
}

static inline int fmm_dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes)
{
    if (lanes != 1) return FMM_DTYPE_NONE;
    for (int i = 0; i < (int)FMM_DTYPE_COUNT; i++) {
        if (fmm_dtype_infos[i].dlpack_code == code && fmm_dtype_infos[i].dlpack_bits == bits) return i;
    }
    return FMM_DTYPE_NONE;
}

static inline int fmm_dtype_from_name(const char *name, size_t name_nbytes)
{
    for (int i = 0; i < (int)FMM_DTYPE_COUNT; i++) {
        if (fmm_dtype_infos[i].name_nbytes == name_nbytes && memcmp(fmm_dtype_infos[i].name, name, name_nbytes) == 0)
            return i;
    }
    return FMM_DTYPE_NONE;
}

/* By numpy's `dtype.kind` and `dtype.itemsize`; the byte order is the caller's business. */
static inline int fmm_dtype_from_numpy(char kind, size_t item_nbytes)
{
    for (int i = 0; i < (int)FMM_DTYPE_COUNT; i++) {
        if (fmm_dtype_infos[i].numpy_kind == kind && fmm_dtype_infos[i].item_nbytes == item_nbytes) return i;
    }
    return FMM_DTYPE_NONE;
}

#endif /* FASTMM_DTYPE_H */
