/* The one result type of fastmm's C code.
 *
 * C functions never raise, print or abort: they return a status, and one Cython function turns it into an exception
 * that knows the path or the frame. FMM_OK is zero, so `if (status)` reads as "if it failed".
 */
#ifndef FASTMM_STATUS_H
#define FASTMM_STATUS_H

/* What fastmm writes and reads as it lies in memory (msgpack by byte swaps, tensors as numpy's "<") is little-endian. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "fastmm needs a little-endian machine"
#endif

typedef enum fmm_status {
    FMM_OK = 0,
    FMM_ERR_TRUNCATED,   /* the input ends before the value does */
    FMM_ERR_LIMIT,       /* a configured limit (depth, frames, payload bytes) is passed */
    FMM_ERR_OVERFLOW,    /* a size or an offset does not fit its integer type */
    FMM_ERR_TYPE,        /* the value is of a kind that is not accepted here */
    FMM_ERR_VALUE,       /* right kind, wrong value */
    FMM_ERR_UNSUPPORTED, /* well formed, but this build or this machine cannot do it */
    FMM_ERR_OVERLAP      /* source and destination share bytes without being equal */
} fmm_status_t;

#endif /* FASTMM_STATUS_H */
