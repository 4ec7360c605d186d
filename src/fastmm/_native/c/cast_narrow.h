/* float32 to bfloat16 or float16 on x86-64: the loops, which AVX2 and AVX-512 share. The file that includes this defines
 *
 *   TARGET, INLINE     for its functions
 *   vector_t           a register of VECTOR_NBYTES
 *   narrow_2           two registers of float32, from memory, as one register of 16-bit elements
 *   narrow_tail        the same for any number of elements, through memory
 *   vector_store       one register to memory; vector_stream: past the caches, to a multiple of VECTOR_NBYTES
 *
 * to_f16 is a constant where these are inlined, so that each kernel holds one conversion only. A step reads all it needs
 * before it writes, so that it works in place.
 */
#ifndef FASTMM_CAST_NARROW_H
#define FASTMM_CAST_NARROW_H

#include <immintrin.h>

#include "mxcsr.h"

#define STEP_NELEM VECTOR_NBYTES /* two registers of 16-bit elements */

/* The hardware prefetcher stops at each page; asking ahead bridges it. Measured on Zen 5: from a cache, 2 KiB ahead is
 * 1.1 times as quick as 8 KiB; from memory it is the other way round. */
#define AHEAD_FROM_CACHE_NBYTES 2048
#define AHEAD_FROM_MEMORY_NBYTES 8192
#define FROM_CACHE_MAX_NELEM ((size_t)2 << 20)

INLINE size_t prefetch_distance(size_t nelem)
{
    return nelem <= FROM_CACHE_MAX_NELEM ? AHEAD_FROM_CACHE_NBYTES : AHEAD_FROM_MEMORY_NBYTES;
}

INLINE void prefetch_step(const unsigned char *ahead)
{
    for (int line = 0; line < 4 * STEP_NELEM / 64; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
}

INLINE void narrow(const unsigned char *from, unsigned char *to, size_t nelem, int to_f16)
{
    const size_t ahead = prefetch_distance(nelem);
    const unsigned saved = fmm_mxcsr_enter();
    for (; nelem >= STEP_NELEM; nelem -= STEP_NELEM, from += 4 * STEP_NELEM, to += 2 * STEP_NELEM) {
        prefetch_step(from + ahead);
        const vector_t first = narrow_2(from, to_f16);
        const vector_t second = narrow_2(from + 2 * VECTOR_NBYTES, to_f16);
        vector_store(to, first);
        vector_store(to + VECTOR_NBYTES, second);
    }
    narrow_tail(from, to, nelem, to_f16);
    fmm_mxcsr_leave(saved);
}

INLINE void narrow_stream(const unsigned char *from, unsigned char *to, size_t nelem, int to_f16)
{
    if ((uintptr_t)to & 1) { /* no whole elements lead to a cache line's start */
        narrow(from, to, nelem, to_f16);
        return;
    }
    const size_t ahead = prefetch_distance(nelem);
    const size_t to_line = (size_t)(-(uintptr_t)to & 63) / 2;
    const size_t head = to_line < nelem ? to_line : nelem;
    const unsigned saved = fmm_mxcsr_enter();
    narrow_tail(from, to, head, to_f16);
    from += 4 * head, to += 2 * head, nelem -= head;
    for (; nelem >= STEP_NELEM; nelem -= STEP_NELEM, from += 4 * STEP_NELEM, to += 2 * STEP_NELEM) {
        prefetch_step(from + ahead);
        vector_stream(to, narrow_2(from, to_f16));
        vector_stream(to + VECTOR_NBYTES, narrow_2(from + 2 * VECTOR_NBYTES, to_f16));
    }
    _mm_sfence(); /* streaming stores are weakly ordered: publish them before the caller hands the buffer on */
    narrow_tail(from, to, nelem, to_f16);
    fmm_mxcsr_leave(saved);
}

TARGET static void cast_f32_to_bf16(const void *src, void *dst, size_t nelem) { narrow(src, dst, nelem, 0); }
TARGET static void cast_f32_to_f16(const void *src, void *dst, size_t nelem) { narrow(src, dst, nelem, 1); }

TARGET static void cast_f32_to_bf16_stream(const void *src, void *dst, size_t nelem)
{
    narrow_stream(src, dst, nelem, 0);
}

TARGET static void cast_f32_to_f16_stream(const void *src, void *dst, size_t nelem)
{
    narrow_stream(src, dst, nelem, 1);
}

#endif /* FASTMM_CAST_NARROW_H */
