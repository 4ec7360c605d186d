/* Checked arithmetic on sizes: true when the result fits, false (and *out untouched by contract) when it does not.
 *
 * Every size that comes from outside (a shape, a frame's header, a sizes tensor) goes through these before it is used
 * to allocate or to address. gcc and clang turn the builtins into one multiply and one jump.
 */
#ifndef FASTMM_SIZE_H
#define FASTMM_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool fmm_mul_i64(int64_t a, int64_t b, int64_t *out)
{
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) return false;
    *out = product;
    return true;
}

static inline bool fmm_add_i64(int64_t a, int64_t b, int64_t *out)
{
    int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return false;
    *out = sum;
    return true;
}

static inline bool fmm_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) return false;
    *out = product;
    return true;
}

static inline bool fmm_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return false;
    *out = sum;
    return true;
}

/* The number of elements of a shape. False when an extent is negative or the product does not fit. A zero extent makes
 * the product zero only if the other extents are valid too: a shape such as (0, -1) stays an error. */
static inline bool fmm_shape_nelem(const int64_t *shape, int ndim, int64_t *out)
{
    int64_t nelem = 1;
    bool empty = false;
    for (int axis = 0; axis < ndim; axis++) {
        if (shape[axis] < 0) return false;
        if (shape[axis] == 0) {
            empty = true;
        } else if (!fmm_mul_i64(nelem, shape[axis], &nelem)) {
            return false;
        }
    }
    *out = empty ? 0 : nelem;
    return true;
}

#endif /* FASTMM_SIZE_H */
