/* The floating-point casts: the numeric rule, the kernels' contract, and the ordered registry of instruction sets.
 *
 * THE RULE, for every cast to a narrower type, the same bits on every instruction set:
 *   - round to nearest, ties to even; what rounds past the largest finite value is an infinity of the same sign
 *     (float16: magnitudes at and above 65520; 65519 rounds to 65504);
 *   - subnormals are neither flushed on input nor on output, whatever the thread's flush-to-zero mode says;
 *   - signed zeros and infinities stay what they are;
 *   - a NaN gives sign, all exponent bits, the quiet bit, and the leading payload bits that fit:
 *         bfloat16 = (f32 >> 16) | 0x0040
 *         float16  = (f32 >> 16 & 0x8000) | 0x7e00 | (f32 >> 13 & 0x03ff)
 *         float32  = (f64 >> 32 & 0x80000000) | 0x7fc00000 | (f64 >> 29 & 0x007fffff)
 *     Widening is exact, and quiets a NaN in the same way with its payload moved to the leading bits.
 * float64, float16 and bfloat16 reach another 16-bit type through float32: two roundings for float64, by design, since
 * that is what the frameworks' own two-step conversion gives.
 * cast_one.h states the rule again as code, for one element.
 *
 * No kernel changes the thread's floating-point environment or leaves an exception flag behind. None needs the GIL.
 *
 * The functions declared here and in cpu.h are linked into fastmm._native.cast alone, and are not visible outside it: another
 * extension calls them by a cimport from fastmm._native.cast (cast.pxd). cast_one.h works anywhere.
 */
#ifndef FASTMM_CAST_H
#define FASTMM_CAST_H

#include <stddef.h>
#include <stdint.h>

#include "fastmm/cpu.h"
#include "fastmm/dtype.h"
#include "fastmm/status.h"

/* Converts nelem elements. src and dst need no alignment. They are disjoint, or, unless the element grows, equal: a
 * kernel reads every byte of a block before it writes the block's results, and goes forward. */
typedef void (*fmm_cast_fn_t)(const void *src, void *dst, size_t nelem);

/* One instruction set. Each cast_<isa>.c exports one of these and nothing else. */
typedef struct fmm_cast_table {
    const char *name;                 /* "scalar", "avx2", "avx512", "neon" */
    uint64_t features;                /* FMM_CPU_* bits that must all be there */
    fmm_cast_fn_t f32_to_bf16;        /* in place or not */
    fmm_cast_fn_t f32_to_f16;         /* in place or not */
    fmm_cast_fn_t f32_to_bf16_stream; /* past the cache, never in place; NULL: the plain one is as good */
    fmm_cast_fn_t f32_to_f16_stream;  /* past the cache, never in place; NULL: the plain one is as good */
    fmm_cast_fn_t f64_to_f32;         /* in place or not */
    fmm_cast_fn_t f16_to_f32;         /* never in place: the element grows */
    fmm_cast_fn_t bf16_to_f32;        /* never in place: the element grows */
} fmm_cast_table_t;

/* Out of place, from this many source bytes on, stores go past the cache: the destination would evict what the caller
 * still needs and is read from memory line by line before it is overwritten. Measured: 1.05 to 1.1 times as quick from
 * 19 MB on, slower below; and slower in place at any size, where the line is in the cache already. */
#define FMM_CAST_STREAM_MIN_NBYTES ((size_t)16 << 20)

/* All tables of this build, best first. The scalar one is always there, last. */
const fmm_cast_table_t *const *fmm_cast_tables(size_t *count);

/* The table of that name if this build has it, else NULL. It may still need features that `features` lacks. */
const fmm_cast_table_t *fmm_cast_table_find(const char *name);

/* Whether these features (fmm_cpu_features) let the table run. */
int fmm_cast_table_usable(const fmm_cast_table_t *table, uint64_t features);

/* The best table for these features, never NULL. */
const fmm_cast_table_t *fmm_cast_table_best(uint64_t features);

/* Whether cast_run converts this pair, and whether it may do so in place. */
int fmm_cast_supported(int src_dtype, int dst_dtype);
int fmm_cast_supported_inplace(int src_dtype, int dst_dtype);

/* Converts nelem elements from one dtype (fmm_dtype_t) to another. dst equals src or shares no byte with it.
 * FMM_ERR_UNSUPPORTED: no such conversion. FMM_ERR_OVERLAP: partial overlap, or in place while the element grows.
 * FMM_ERR_OVERFLOW: nelem elements do not fit the address space. Nothing is written on an error. */
fmm_status_t fmm_cast_run(const fmm_cast_table_t *table, int src_dtype, int dst_dtype, const void *src, void *dst,
                          size_t nelem);

/* The same for a source in the other byte order. The destination is in native order. */
fmm_status_t fmm_cast_run_swapped(const fmm_cast_table_t *table, int src_dtype, int dst_dtype, const void *src,
                                  void *dst, size_t nelem);

#endif /* FASTMM_CAST_H */
