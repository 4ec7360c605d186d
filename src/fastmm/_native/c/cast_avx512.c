/* AVX-512 kernels (F, BW, VL, DQ).
 *
 * bfloat16 is integer arithmetic: the AVX512-BF16 instruction flushes subnormals and is no quicker once memory is the
 * limit. float16 is vcvtps2ph, which keeps NaN payloads as the rule wants. Tails are masked, so that no length takes a
 * scalar path.
 */
#include "cast_tables.h"

#ifdef FMM_CAST_HAVE_X86

#include <immintrin.h>

#include "mxcsr.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET

#define VECTOR_NBYTES 64
typedef __m512i vector_t;

/* Rounded float32 bits: the upper half of each lane is the bfloat16. */
INLINE __m512i round_to_bf16(__m512i bits)
{
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x00010000));
    const __mmask16 nan = _mm512_fpclass_ps_mask(_mm512_castsi512_ps(bits), 0x81); /* quiet or signalling */
    __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    rounded = _mm512_mask_add_epi32(rounded, odd, bits, _mm512_set1_epi32(0x8000));
    return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
}

/* Word indices of the lower (0) or upper (1) halves of 2 x 16 lanes, in order. */
#define HALVES(upper)                                                                                          \
    _mm512_set_epi16(62 + (upper), 60 + (upper), 58 + (upper), 56 + (upper), 54 + (upper), 52 + (upper),       \
                     50 + (upper), 48 + (upper), 46 + (upper), 44 + (upper), 42 + (upper), 40 + (upper),       \
                     38 + (upper), 36 + (upper), 34 + (upper), 32 + (upper), 30 + (upper), 28 + (upper),       \
                     26 + (upper), 24 + (upper), 22 + (upper), 20 + (upper), 18 + (upper), 16 + (upper),       \
                     14 + (upper), 12 + (upper), 10 + (upper), 8 + (upper), 6 + (upper), 4 + (upper),          \
                     2 + (upper), 0 + (upper))

/* 32 elements. Without a NaN among them, half as many instructions do: take the halves apart first, then round 32
 * words at once. avg(lower, 0x7ffe + odd) is (lower + 0x7fff + odd) >> 1, so its top bit is the carry into the upper
 * half. */
INLINE __m512i bf16_from_2(const unsigned char *from)
{
    const __m512i first = _mm512_loadu_si512(from);
    const __m512i second = _mm512_loadu_si512(from + 64);
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(first), _mm512_castsi512_ps(second), _CMP_UNORD_Q);
    if (__builtin_expect(nan, 0))
        return _mm512_permutex2var_epi16(round_to_bf16(first), HALVES(1), round_to_bf16(second));
    const __m512i upper = _mm512_permutex2var_epi16(first, HALVES(1), second);
    const __m512i lower = _mm512_permutex2var_epi16(first, HALVES(0), second);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi16(1));
    const __m512i average = _mm512_avg_epu16(lower, _mm512_or_si512(odd, _mm512_set1_epi16(0x7ffe)));
    return _mm512_sub_epi16(upper, _mm512_srai_epi16(average, 15));
}

INLINE __m512i f16_from_2(const unsigned char *from)
{
    const __m256i low = _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(_mm512_loadu_ps(from + 64), _MM_FROUND_TO_NEAREST_INT);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

INLINE __m256i bf16_from_masked(const unsigned char *from, __mmask16 mask)
{
    const __m512i rounded = round_to_bf16(_mm512_maskz_loadu_epi32(mask, from));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE __m256i f16_from_masked(const unsigned char *from, __mmask16 mask)
{
    return _mm512_cvtps_ph(_mm512_maskz_loadu_ps(mask, from), _MM_FROUND_TO_NEAREST_INT);
}

/* What cast_narrow.h wants. */
INLINE __m512i narrow_2(const unsigned char *from, int to_f16)
{
    return to_f16 ? f16_from_2(from) : bf16_from_2(from);
}

INLINE void narrow_tail(const unsigned char *from, unsigned char *to, size_t nelem, int to_f16)
{
    for (; nelem; from += 64, to += 32) {
        const size_t count = nelem < 16 ? nelem : 16;
        const __mmask16 mask = (__mmask16)((1u << count) - 1u);
        _mm256_mask_storeu_epi16(to, mask, to_f16 ? f16_from_masked(from, mask) : bf16_from_masked(from, mask));
        nelem -= count;
    }
}

INLINE void vector_store(unsigned char *to, vector_t value) { _mm512_storeu_si512(to, value); }
INLINE void vector_stream(unsigned char *to, vector_t value) { _mm512_stream_si512((void *)to, value); }

#include "cast_narrow.h"

TARGET static void cast_f64_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    const unsigned saved = fmm_mxcsr_enter();
    for (; nelem >= 8; nelem -= 8, from += 64, to += 32)
        _mm256_storeu_ps((void *)to, _mm512_cvtpd_ps(_mm512_loadu_pd(from)));
    if (nelem) {
        const __mmask8 mask = (__mmask8)((1u << nelem) - 1u);
        _mm256_mask_storeu_ps(to, mask, _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(mask, from)));
    }
    fmm_mxcsr_leave(saved);
}

TARGET static void cast_f16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    const unsigned saved = fmm_mxcsr_enter();
    for (; nelem >= 16; nelem -= 16, from += 32, to += 64)
        _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)));
    if (nelem) {
        const __mmask16 mask = (__mmask16)((1u << nelem) - 1u);
        _mm512_mask_storeu_ps(to, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from)));
    }
    fmm_mxcsr_leave(saved);
}

INLINE __m512i f32_from_bf16(__m256i half)
{
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    const __mmask16 nan = _mm512_fpclass_ps_mask(_mm512_castsi512_ps(wide), 0x81);
    return _mm512_mask_or_epi32(wide, nan, wide, _mm512_set1_epi32(0x00400000));
}

TARGET static void cast_bf16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    for (; nelem >= 16; nelem -= 16, from += 32, to += 64)
        _mm512_storeu_si512(to, f32_from_bf16(_mm256_loadu_si256((const void *)from)));
    if (nelem) {
        const __mmask16 mask = (__mmask16)((1u << nelem) - 1u);
        _mm512_mask_storeu_epi32(to, mask, f32_from_bf16(_mm256_maskz_loadu_epi16(mask, from)));
    }
}

const fmm_cast_table_t fmm_cast_table_avx512 = {
    .name = "avx512",
    .features = FMM_CPU_AVX512F | FMM_CPU_AVX512BW | FMM_CPU_AVX512VL | FMM_CPU_AVX512DQ | FMM_CPU_AVX2 | FMM_CPU_F16C,
    .f32_to_bf16 = cast_f32_to_bf16,
    .f32_to_f16 = cast_f32_to_f16,
    .f32_to_bf16_stream = cast_f32_to_bf16_stream,
    .f32_to_f16_stream = cast_f32_to_f16_stream,
    .f64_to_f32 = cast_f64_to_f32,
    .f16_to_f32 = cast_f16_to_f32,
    .bf16_to_f32 = cast_bf16_to_f32,
};

#else

typedef int fmm_cast_avx512_not_in_this_build; /* ISO C wants a declaration in every file */

#endif
