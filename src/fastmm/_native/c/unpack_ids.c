/* Token ids out of msgpack: a portable kernel and one for AVX-512 with VBMI (vpermb).
 *
 * A prompt is text, ids of three and five bytes in no order, and runs of one id per image (the placeholder). Runs are told by
 * comparing the input with itself five bytes earlier. In between, each id's place depends on the length of the one before it:
 * that chain is the cost, and what the vector kernel breaks.
 */
#include "unpack_ids.h"

#include <stdbool.h>
#include <string.h>

#include "fastmm/cpu.h"

/* Repeats `value`, whose five bytes end at r->cur, as often as the same five bytes follow, at most nelem times. */
static inline size_t unpack_run(fmm_reader_t *r, int64_t *out, size_t nelem, int64_t value)
{
    const uint8_t *p = r->cur;
    const uint64_t bytes = fmm_load_be64(p - 5) >> 24; /* readable: the caller has eight bytes there */
    size_t n = 0;

    while (n < nelem && r->end - p >= 8 && fmm_load_be64(p) >> 24 == bytes) {
        out[n++] = value;
        p += 5;
    }
    r->cur = p;
    return n;
}

size_t fmm_unpack_ids_scalar(fmm_reader_t *r, int64_t *out, size_t nelem, fmm_status_t *status)
{
    size_t n = 0;

    *status = FMM_OK;
    while (n < nelem) {
        const uint8_t *p = r->cur;
        if (r->end - p >= 8) {
            const uint64_t head = fmm_load_be64(p);
            const uint32_t lead = (uint32_t)(head >> 56);
            if ((lead | 1) == 0xcd || lead == 0xce) {
                /* 0xcd or 0xce without a branch between them: in text they alternate at random. 0xcc is let in and sent away
                 * below, for asked straight for the two, gcc makes a branch for each: half as slow again, measured. */
                const unsigned wide = lead == 0xce;
                if (lead != 0xcc) {
                    const uint64_t bits = head << 8;
                    out[n++] = (int64_t)(bits >> (48 - 16 * wide));
                    r->cur = p + 3 + 2 * wide;
                    if (wide && r->end - r->cur >= 8 && fmm_load_be64(r->cur) >> 24 == head >> 24)
                        n += unpack_run(r, out + n, nelem - n, out[n - 1]);
                    continue;
                }
            }
        }
        bool is_u64;
        *status = fmm_read_int(r, &out[n], &is_u64);
        if (*status) return n;
        if (is_u64) {
            r->cur = p;
            *status = FMM_ERR_OVERFLOW;
            return n;
        }
        n++;
    }
    return n;
}

#if defined(__x86_64__) && !defined(FMM_NO_SIMD)

#include <immintrin.h>

#define UNPACK_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,bmi,popcnt")))
static const uint64_t unpack_features = FMM_CPU_AVX512F | FMM_CPU_AVX512BW | FMM_CPU_AVX512VL | FMM_CPU_AVX512DQ |
                                        FMM_CPU_AVX512VBMI | FMM_CPU_BMI1 | FMM_CPU_POPCNT;

UNPACK_TARGET static inline __m512i iota_bytes(void)
{
    return _mm512_set_epi64(0x3f3e3d3c3b3a3938, 0x3736353433323130, 0x2f2e2d2c2b2a2928, 0x2726252423222120,
                            0x1f1e1d1c1b1a1918, 0x1716151413121110, 0x0f0e0d0c0b0a0908, 0x0706050403020100);
}

/* Up to sixteen ids out of the 64 bytes at p. For every byte the place where the next id would begin if one began here is
 * computed at once; that table applied to itself gives two, four and eight steps ahead, and so sixteen places in a handful of
 * permutations. Ids that may reach beyond the block (those that begin in its last five bytes) are left to the next call.
 * Returns how many were stored; `*advance` is their size. Zero when the first is none of the usual forms. */
UNPACK_TARGET static inline size_t unpack_16(const uint8_t *p, int64_t *out, size_t *advance)
{
    const __m512i iota = iota_bytes();
    const __m512i block = _mm512_loadu_si512(p);
    const __mmask64 one = _mm512_movepi8_mask(block) ^ ~UINT64_C(0);
    const __mmask64 two = _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8((char)0xcc));
    const __mmask64 three = _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8((char)0xcd));
    const __mmask64 five = _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8((char)0xce));
    const __mmask64 inside = (UINT64_C(1) << 59) - 1; /* 58 + 5 is the last place that six bits hold */
    const __mmask64 known = (one | two | three | five) & inside;
    __m512i length = _mm512_maskz_set1_epi8(one, 1);
    length = _mm512_mask_mov_epi8(length, two, _mm512_set1_epi8(2));
    length = _mm512_mask_mov_epi8(length, three, _mm512_set1_epi8(3));
    length = _mm512_mask_mov_epi8(length, five, _mm512_set1_epi8(5));
    /* A place that is not known leads to itself: the chain stops there. */
    const __m512i next1 = _mm512_mask_add_epi8(iota, known, iota, length);
    const __m512i next2 = _mm512_permutexvar_epi8(next1, next1);
    const __m512i next4 = _mm512_permutexvar_epi8(next2, next2);
    const __m512i next8 = _mm512_permutexvar_epi8(next4, next4);
    const __m512i next16 = _mm512_permutexvar_epi8(next8, next8);
    /* starts[k] = k steps from 0, for k < 16: by the bits of k. */
    __m512i starts = _mm512_setzero_si512();
    starts = _mm512_mask_permutexvar_epi8(starts, 0xaaaa, starts, next1);
    starts = _mm512_mask_permutexvar_epi8(starts, 0xcccc, starts, next2);
    starts = _mm512_mask_permutexvar_epi8(starts, 0xf0f0, starts, next4);
    starts = _mm512_mask_permutexvar_epi8(starts, 0xff00, starts, next8);
    const __m512i lengths = _mm512_permutexvar_epi8(starts, _mm512_maskz_mov_epi8(known, length));
    const size_t count = (size_t)__builtin_popcount((uint32_t)_mm512_test_epi8_mask(lengths, lengths) & 0xffff);
    *advance = (size_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(next16)) & 0xff;
    if (count == 0) return 0;

    /* Four bytes a lane, least significant first: the last byte of the id, the one before it... */
    const __m512i spread = _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a,
                                            0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                                            0x03030303, 0x02020202, 0x01010101, 0x00000000);
    const __m512i back = _mm512_set1_epi32(0x03020100);
    const __m512i ends = _mm512_add_epi8(starts, _mm512_sub_epi8(lengths, _mm512_set1_epi8(1)));
    /* How many bytes count: one for lengths one and two, then length - 1. */
    const __m512i sizes = _mm512_max_epu8(_mm512_subs_epu8(lengths, _mm512_set1_epi8(1)), _mm512_set1_epi8(1));
    const __m512i from = _mm512_sub_epi8(_mm512_permutexvar_epi8(spread, ends), back);
    const __mmask64 counts = _mm512_cmpgt_epu8_mask(_mm512_permutexvar_epi8(spread, sizes), back);
    const __m512i ids = _mm512_maskz_permutexvar_epi8(counts, from, block);
    _mm512_storeu_si512(out, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(ids)));
    _mm512_storeu_si512(out + 8, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(ids, 1)));
    return count;
}

/* The five bytes before p are an id; how many times do they repeat from p on? Twelve at most are told. */
UNPACK_TARGET static inline size_t repeats_12(const uint8_t *p)
{
    const __mmask64 same = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(p), _mm512_loadu_si512(p - 5));
    return (size_t)__builtin_ctzll(~same | UINT64_C(1) << 60) / 5;
}

UNPACK_TARGET static size_t unpack_ids_avx512(fmm_reader_t *r, int64_t *out, size_t nelem, fmm_status_t *status)
{
    size_t n = 0;

    *status = FMM_OK;
    while (n < nelem) {
        /* A block is 64 readable bytes, and room for the sixteen lanes that are stored whole. */
        while (r->end - r->cur >= 64 && nelem - n >= 16) {
            size_t advance;
            const size_t count = unpack_16(r->cur, out + n, &advance);
            if (count == 0) break;
            n += count;
            r->cur += advance;
            if (count != 12 || out[n - 1] != out[n - 2] || out[n - 1] < 0x10000) continue;
            const __m512i value = _mm512_set1_epi64(out[n - 1]);
            while (r->end - r->cur >= 64 && nelem - n >= 16) {
                const size_t again = repeats_12(r->cur);
                _mm512_storeu_si512(out + n, value);
                _mm512_storeu_si512(out + n + 8, value);
                n += again;
                r->cur += 5 * again;
                if (again < 12) break;
            }
        }
        /* One value the general way: an unusual form, an error, or the last few. */
        const size_t left = nelem - n;
        const size_t taken = fmm_unpack_ids_scalar(r, out + n, left < 16 ? left : 1, status);
        n += taken;
        if (*status) return n;
    }
    return n;
}

fmm_unpack_ids_fn_t fmm_unpack_ids_best(const char *isa, uint64_t features)
{
    const bool fits = strcmp(isa, "avx512") == 0 && (features & unpack_features) == unpack_features;
    return fits ? unpack_ids_avx512 : fmm_unpack_ids_scalar;
}

#else

fmm_unpack_ids_fn_t fmm_unpack_ids_best(const char *isa, uint64_t features)
{
    (void)isa, (void)features;
    return fmm_unpack_ids_scalar;
}

#endif
