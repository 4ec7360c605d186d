/* The roof of a cast: reading the source once and doing next to nothing with it. Built by bench_cast.py into a temporary
 * folder; no part of the package. */
#include <stddef.h>
#include <string.h>

typedef float vector_t __attribute__((vector_size(64), aligned(1)));

#define SUM_BODY                                                                                     \
    float result = 0;                                                                                \
    for (size_t r = 0; r < repeat; r++) {                                                            \
        const char *from = src;                                                                      \
        vector_t a = {0}, b = {0}, c = {0}, d = {0};                                                 \
        for (size_t left = nbytes; left >= 256; left -= 256, from += 256) {                          \
            a += *(const vector_t *)from;                                                            \
            b += *(const vector_t *)(from + 64);                                                     \
            c += *(const vector_t *)(from + 128);                                                    \
            d += *(const vector_t *)(from + 192);                                                    \
        }                                                                                            \
        a = (a + b) + (c + d);                                                                       \
        for (int i = 0; i < 16; i++) result += a[i];                                                 \
    }                                                                                                \
    return result;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float sum_avx512(const void *src, size_t nbytes, size_t repeat) { SUM_BODY }
__attribute__((target("avx2"))) static float sum_avx2(const void *src, size_t nbytes, size_t repeat) { SUM_BODY }
#endif
static float sum_baseline(const void *src, size_t nbytes, size_t repeat) { SUM_BODY }

float fmm_bench_sum(const void *src, size_t nbytes, size_t repeat)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return sum_avx512(src, nbytes, repeat);
    if (__builtin_cpu_supports("avx2")) return sum_avx2(src, nbytes, repeat);
#endif
    return sum_baseline(src, nbytes, repeat);
}

void fmm_bench_copy(void *dst, const void *src, size_t nbytes, size_t repeat)
{
    for (size_t r = 0; r < repeat; r++) memcpy(dst, src, nbytes);
}
