/* Token ids into msgpack: a portable kernel and one for AVX-512 with VBMI2 (vpcompressb). */
#include "fastmm/pack_ids.h"

#include <stdbool.h>
#include <string.h>

#include "fastmm/cpu.h"

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

#define PACK_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi2,popcnt")))
static const uint64_t pack_features = FMM_CPU_AVX512F | FMM_CPU_AVX512BW | FMM_CPU_AVX512VL | FMM_CPU_AVX512VBMI |
                                      FMM_CPU_AVX512VBMI2 | FMM_CPU_BMI2 | FMM_CPU_POPCNT;

/* Ids of one step: each takes five bytes of a register, tag first, before the unused ones are squeezed out. */
#define PACK_STEP 12

/* Where the five bytes of an id come from: byte 0 of its lane of tags (64 and up), then its own bytes, high to low. */
#define PACK_ID(lane) 64 + 4 * (lane), 4 * (lane) + 3, 4 * (lane) + 2, 4 * (lane) + 1, 4 * (lane)
static const uint8_t pack_order[64] __attribute__((aligned(64))) = {
    PACK_ID(0), PACK_ID(1), PACK_ID(2), PACK_ID(3), PACK_ID(4),  PACK_ID(5),
    PACK_ID(6), PACK_ID(7), PACK_ID(8), PACK_ID(9), PACK_ID(10), PACK_ID(11),
};
/* Bit 0, 1, 2, 3, 4 of every group of five. */
#define PACK_EVERY_FIFTH UINT64_C(0x0084210842108421)

PACK_TARGET static inline uint8_t *pack_step(uint8_t *p, __m512i id, unsigned nelem, __m512i order)
{
    const __mmask16 over_7_bits = _mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0x7f));
    const __mmask16 over_8_bits = _mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0xff));
    const __mmask16 over_16_bits = _mm512_cmpgt_epu32_mask(id, _mm512_set1_epi32(0xffff));
    __m512i tags = _mm512_set1_epi32(0xcc);
    tags = _mm512_mask_mov_epi32(tags, over_8_bits, _mm512_set1_epi32(0xcd));
    tags = _mm512_mask_mov_epi32(tags, over_16_bits, _mm512_set1_epi32(0xce));
    const __m512i spread = _mm512_permutex2var_epi8(id, order, tags);
    /* The last byte of an id is always kept, the one before from 256 on, the two before that from 65536 on. */
    const uint64_t high = _pdep_u64(over_16_bits, PACK_EVERY_FIFTH);
    const uint64_t keep = _pdep_u64(over_7_bits, PACK_EVERY_FIFTH) | high << 1 | high << 2 |
                          _pdep_u64(over_8_bits, PACK_EVERY_FIFTH) << 3 | PACK_EVERY_FIFTH << 4;
    const uint64_t used = _bzhi_u64(keep, 5 * nelem);
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi8(used, spread));
    return p + _mm_popcnt_u64(used);
}

PACK_TARGET static uint8_t *pack_ids_avx512(uint8_t *p, const uint32_t *ids, size_t nelem)
{
    const __m512i order = _mm512_load_si512(pack_order);
    for (; nelem >= 16; ids += PACK_STEP, nelem -= PACK_STEP) /* a load takes sixteen, of which four come again */
        p = pack_step(p, _mm512_loadu_si512(ids), PACK_STEP, order);
    while (nelem > 0) {
        const unsigned step = nelem < PACK_STEP ? (unsigned)nelem : PACK_STEP;
        p = pack_step(p, _mm512_maskz_loadu_epi32((__mmask16)((1u << step) - 1), ids), step, order);
        ids += step;
        nelem -= step;
    }
    return p;
}

fmm_pack_ids_fn_t fmm_pack_ids_best(const char *isa, uint64_t features)
{
    const bool fits = strcmp(isa, "avx512") == 0 && (features & pack_features) == pack_features;
    return fits ? pack_ids_avx512 : fmm_pack_ids_scalar;
}

#else

fmm_pack_ids_fn_t fmm_pack_ids_best(const char *isa, uint64_t features)
{
    (void)isa, (void)features;
    return fmm_pack_ids_scalar;
}

#endif
