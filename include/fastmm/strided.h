/* Copying a strided tensor into C order. */
#ifndef FASTMM_STRIDED_H
#define FASTMM_STRIDED_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Whether elements lie in C order without gaps. Strides are in units of unit_nbytes; extents of one have any stride. */
static inline bool fmm_strided_is_dense(int ndim, const int64_t *shape, const int64_t *strides, int64_t unit_nbytes,
                                        int64_t item_nbytes)
{
    int64_t expected = item_nbytes;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        if (shape[axis] != 1) {
            if (strides[axis] * unit_nbytes != expected) return false;
            expected *= shape[axis];
        }
    }
    return true;
}

/* Copies nelem = product(shape) elements to dst in C order. Strides may be zero or negative. Needs ndim >= 1 and no
 * extent of zero. The innermost run that is dense already is one memcpy. */
static inline void fmm_strided_copy(uint8_t *dst, const uint8_t *src, int ndim, const int64_t *shape,
                                    const int64_t *strides, int64_t unit_nbytes, int64_t item_nbytes)
{
    int64_t index[64] = {0};
    int64_t run_nbytes = item_nbytes;
    int outer = ndim; /* axes [0, outer) are walked, the rest is one run */

    while (outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] * unit_nbytes == run_nbytes)) {
        run_nbytes *= shape[outer - 1];
        outer--;
    }
    if (outer == 0) {
        memcpy(dst, src, (size_t)run_nbytes);
        return;
    }
    const int last = outer - 1;
    const int64_t count = shape[last];
    const int64_t step = strides[last] * unit_nbytes;
    for (;;) {
        const uint8_t *row = src;
        switch (run_nbytes) { /* constant sizes, so that the copy is one load and one store */
#define FMM_STRIDED_ROW(n)                                                \
    case n:                                                               \
        for (int64_t i = 0; i < count; i++, dst += n, row += step) memcpy(dst, row, n); \
        break;
            FMM_STRIDED_ROW(1)
            FMM_STRIDED_ROW(2)
            FMM_STRIDED_ROW(4)
            FMM_STRIDED_ROW(8)
#undef FMM_STRIDED_ROW
        default:
            for (int64_t i = 0; i < count; i++, dst += run_nbytes, row += step) memcpy(dst, row, (size_t)run_nbytes);
        }
        int axis = last - 1;
        for (; axis >= 0; axis--) {
            src += strides[axis] * unit_nbytes;
            if (++index[axis] < shape[axis]) break;
            src -= shape[axis] * strides[axis] * unit_nbytes;
            index[axis] = 0;
        }
        if (axis < 0) return;
    }
}

#endif
