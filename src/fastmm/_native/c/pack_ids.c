/* Token ids into msgpack: a portable kernel and one for AVX-512 with VBMI2 (vpcompressb). */
#include "fastmm/pack_ids.h"

#include <string.h>

/* By class of id: below 128, 256, 65536, and the rest. An id and its tag are one big-endian number of nbytes. */
static const uint64_t pack_tag[4] = {0, UINT64_C(0xcc) << 8, UINT64_C(0xcd) << 16, UINT64_C(0xce) << 32};
static const uint8_t pack_shift[4] = {56, 48, 40, 24};
static const uint8_t pack_nbytes[4] = {1, 2, 3, 5};

uint8_t *fmm_pack_ids_scalar(uint8_t *p, const uint32_t *ids, size_t nelem)
{
    for (size_t i = 0; i < nelem; i++) {
        const uint64_t id = ids[i];
        const int size = (id >= 0x80) + (id >= 0x100) + (id >= 0x10000);
        const uint64_t bytes = __builtin_bswap64((pack_tag[size] | id) << pack_shift[size]);
        memcpy(p, &bytes, 8); /* past the end of this id: the next one overwrites it, the slack takes the last */
        p += pack_nbytes[size];
    }
    return p;
}

#if defined(__x86_64__) && !defined(FMM_NO_SIMD)

#include <immintrin.h>

#define PACK_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")))

/* Sixteen ids below 65536 in lanes of four bytes: tag and number are laid out in each lane, the unused bytes squeezed
 * out. */
PACK_TARGET static inline uint8_t *pack_16_narrow(uint8_t *p, __m512i id)
{
    const __mmask16 over_7_bits = _mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0x7f));
    const __mmask16 over_8_bits = _mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0xff));
    const __m512i one = _mm512_or_si512(_mm512_slli_epi32(id, 8), _mm512_set1_epi32(0xcc));
    const __m512i high = _mm512_and_si512(id, _mm512_set1_epi32(0xff00));
    const __m512i two = _mm512_or_si512(_mm512_or_si512(_mm512_slli_epi32(id, 16), high), _mm512_set1_epi32(0xcd));
    __m512i lanes = _mm512_mask_mov_epi32(id, over_7_bits, one);
    __m512i used = _mm512_mask_mov_epi32(_mm512_set1_epi32(0xff), over_7_bits, _mm512_set1_epi32(0xffff));
    lanes = _mm512_mask_mov_epi32(lanes, over_8_bits, two);
    used = _mm512_mask_mov_epi32(used, over_8_bits, _mm512_set1_epi32(0xffffff));
    const __mmask64 keep = _mm512_movepi8_mask(used);
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(keep, lanes));
    return p + _mm_popcnt_u64(keep);
}

/* Eight ids of any size in lanes of eight bytes. */
PACK_TARGET static inline uint8_t *pack_8_wide(uint8_t *p, __m256i narrow)
{
    const __m512i id = _mm512_cvtepu32_epi64(narrow);
    /* Bytes of each lane, reversed within four: the big-endian number, from the lane's second byte on. */
    const __m512i reverse = _mm512_set_epi64(0x3838383838393a3b, 0x3030303030313233, 0x2828282828292a2b,
                                             0x2020202020212223, 0x1818181818191a1b, 0x1010101010111213,
                                             0x0808080808090a0b, 0x0000000000010203);
    const __m512i big = _mm512_permutexvar_epi8(reverse, id); /* bytes 4 to 7 of a lane are rubbish */
    const __m512i four = _mm512_or_si512(
        _mm512_and_si512(_mm512_slli_epi64(big, 8), _mm512_set1_epi64(0xffffffff00)), _mm512_set1_epi64(0xce));
    const __m512i two = _mm512_or_si512(
        _mm512_and_si512(_mm512_srli_epi64(big, 8), _mm512_set1_epi64(0xffff00)), _mm512_set1_epi64(0xcd));
    const __m512i one = _mm512_or_si512(_mm512_slli_epi64(id, 8), _mm512_set1_epi64(0xcc));
    const __mmask8 over_7_bits = _mm512_cmpgt_epu64_mask(id, _mm512_set1_epi64(0x7f));
    const __mmask8 over_8_bits = _mm512_cmpgt_epu64_mask(id, _mm512_set1_epi64(0xff));
    const __mmask8 over_16_bits = _mm512_cmpgt_epu64_mask(id, _mm512_set1_epi64(0xffff));
    __m512i lanes = _mm512_mask_mov_epi64(id, over_7_bits, one);
    __m512i used = _mm512_mask_mov_epi64(_mm512_set1_epi64(0xff), over_7_bits, _mm512_set1_epi64(0xffff));
    lanes = _mm512_mask_mov_epi64(lanes, over_8_bits, two);
    used = _mm512_mask_mov_epi64(used, over_8_bits, _mm512_set1_epi64(0xffffff));
    lanes = _mm512_mask_mov_epi64(lanes, over_16_bits, four);
    used = _mm512_mask_mov_epi64(used, over_16_bits, _mm512_set1_epi64(0xffffffffff));
    const __mmask64 keep = _mm512_movepi8_mask(used);
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(keep, lanes));
    return p + _mm_popcnt_u64(keep);
}

PACK_TARGET static uint8_t *pack_ids_avx512(uint8_t *p, const uint32_t *ids, size_t nelem)
{
    while (nelem >= 16) {
        const __m512i id = _mm512_loadu_si512(ids);
        if (_mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0xffff))) {
            p = pack_8_wide(p, _mm512_castsi512_si256(id));
            p = pack_8_wide(p, _mm512_extracti64x4_epi64(id, 1));
        } else {
            p = pack_16_narrow(p, id);
        }
        ids += 16;
        nelem -= 16;
    }
    return fmm_pack_ids_scalar(p, ids, nelem);
}

fmm_pack_ids_fn_t fmm_pack_ids_best(const char *isa)
{
    if (strcmp(isa, "avx512") == 0 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        return pack_ids_avx512;
    return fmm_pack_ids_scalar;
}

#else

fmm_pack_ids_fn_t fmm_pack_ids_best(const char *isa)
{
    (void)isa;
    return fmm_pack_ids_scalar;
}

#endif
