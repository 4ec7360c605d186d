/* AVX2 kernels, with F16C for float16.
 *
 * Tails go element by element by the rule itself. F16C keeps NaN payloads as the rule wants.
 */
#include "cast_tables.h"
#include "fastmm/cast_one.h"

#ifdef FMM_CAST_HAVE_X86

#include <immintrin.h>
#include <string.h>

#include "mxcsr.h"

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET

#define VECTOR_NBYTES 32
typedef __m256i vector_t;

/* Rounded bits moved down: each lane holds its bfloat16 in the lower half, zeros above. */
INLINE __m256i round_to_bf16(__m256i bits)
{
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quieted = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quieted, nan), 16);
}

/* 16 elements with a NaN among them; the pack works within 128-bit lanes, hence the permutation. */
INLINE __m256i bf16_from_2_with_nan(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_to_bf16(first), round_to_bf16(second)), 0xd8);
}

/* 16 elements. Without a NaN among them, half as many instructions do: take the halves apart first, lanes of the two
 * vectors in turn, round 16 words at once, and put them in order last. avg(lower, 0x7ffe + odd) is
 * (lower + 0x7fff + odd) >> 1, so its top bit is the carry into the upper half. */
INLINE __m256i bf16_from_2(const unsigned char *from)
{
    const __m256i first = _mm256_loadu_si256((const void *)from);
    const __m256i second = _mm256_loadu_si256((const void *)(from + 32));
    const __m256 nan = _mm256_cmp_ps(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second), _CMP_UNORD_Q);
    if (__builtin_expect(_mm256_movemask_ps(nan), 0)) return bf16_from_2_with_nan(first, second);
    const __m256i upper = _mm256_blend_epi16(_mm256_srli_epi32(first, 16), second, 0xaa);
    const __m256i lower = _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    const __m256i average = _mm256_avg_epu16(lower, _mm256_or_si256(odd, _mm256_set1_epi16(0x7ffe)));
    const __m256i rounded = _mm256_sub_epi16(upper, _mm256_srai_epi16(average, 15));
    const __m256i in_order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                              0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(rounded, in_order), 0xd8);
}

INLINE __m256i f16_from_2(const unsigned char *from)
{
    const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps((const void *)from), _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps((const void *)(from + 32)), _MM_FROUND_TO_NEAREST_INT);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* What cast_narrow.h wants. */
INLINE __m256i narrow_2(const unsigned char *from, int to_f16)
{
    return to_f16 ? f16_from_2(from) : bf16_from_2(from);
}

INLINE void narrow_tail(const unsigned char *from, unsigned char *to, size_t nelem, int to_f16)
{
    for (size_t i = 0; i < nelem; i++) {
        uint32_t bits;
        memcpy(&bits, from + 4 * i, sizeof bits);
        const uint16_t half = to_f16 ? fmm_f16_from_f32(bits) : fmm_bf16_from_f32(bits);
        memcpy(to + 2 * i, &half, sizeof half);
    }
}

INLINE void vector_store(unsigned char *to, vector_t value) { _mm256_storeu_si256((void *)to, value); }
INLINE void vector_stream(unsigned char *to, vector_t value) { _mm256_stream_si256((void *)to, value); }

#include "cast_narrow.h"

TARGET static void cast_f64_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    const unsigned saved = fmm_mxcsr_enter();
    for (; nelem >= 4; nelem -= 4, from += 32, to += 16)
        _mm_storeu_ps((void *)to, _mm256_cvtpd_ps(_mm256_loadu_pd((const void *)from)));
    fmm_mxcsr_leave(saved);
    for (size_t i = 0; i < nelem; i++) {
        uint64_t bits;
        memcpy(&bits, from + 8 * i, sizeof bits);
        const uint32_t single = fmm_f32_from_f64(bits);
        memcpy(to + 4 * i, &single, sizeof single);
    }
}

TARGET static void cast_f16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    const unsigned saved = fmm_mxcsr_enter();
    for (; nelem >= 8; nelem -= 8, from += 16, to += 32)
        _mm256_storeu_ps((void *)to, _mm256_cvtph_ps(_mm_loadu_si128((const void *)from)));
    fmm_mxcsr_leave(saved);
    for (size_t i = 0; i < nelem; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        const uint32_t single = fmm_f32_from_f16(half);
        memcpy(to + 4 * i, &single, sizeof single);
    }
}

TARGET static void cast_bf16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    for (; nelem >= 8; nelem -= 8, from += 16, to += 32) {
        const __m256i half = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
        const __m256i wide = _mm256_slli_epi32(half, 16);
        const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7fffffff));
        const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
        const __m256i quiet = _mm256_and_si256(nan, _mm256_set1_epi32(0x00400000));
        _mm256_storeu_si256((void *)to, _mm256_or_si256(wide, quiet));
    }
    for (size_t i = 0; i < nelem; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        const uint32_t single = fmm_f32_from_bf16(half);
        memcpy(to + 4 * i, &single, sizeof single);
    }
}

const fmm_cast_table_t fmm_cast_table_avx2 = {
    .name = "avx2",
    .features = FMM_CPU_AVX2 | FMM_CPU_F16C,
    .f32_to_bf16 = cast_f32_to_bf16,
    .f32_to_f16 = cast_f32_to_f16,
    .f32_to_bf16_stream = cast_f32_to_bf16_stream,
    .f32_to_f16_stream = cast_f32_to_f16_stream,
    .f64_to_f32 = cast_f64_to_f32,
    .f16_to_f32 = cast_f16_to_f32,
    .bf16_to_f32 = cast_bf16_to_f32,
};

#else

typedef int fmm_cast_avx2_not_in_this_build; /* ISO C wants a declaration in every file */

#endif
