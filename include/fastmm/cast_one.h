/* The rule of cast.h for one element, in integer arithmetic only: no rounding mode, no flush-to-zero mode and no
 * compiler flag can change it. The scalar kernels and every vector kernel's tail are made of these. */
#ifndef FASTMM_CAST_ONE_H
#define FASTMM_CAST_ONE_H

#include <stdint.h>

static inline uint16_t fmm_bf16_from_f32(uint32_t bits)
{
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quieted = bits | 0x00400000u;
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? quieted : rounded) >> 16);
}

static inline uint16_t fmm_f16_from_f32(uint32_t bits)
{
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude - 0x38800000u < 0x477ff000u - 0x38800000u) {
        /* A normal float16, the usual case: 2^-14 up to below 65520. A carry out of the mantissa moves the exponent. */
        return (uint16_t)(sign | ((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13));
    }
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude <= 0x33000000u) return (uint16_t)sign; /* up to 2^-25, a tie that goes to the even zero */
    /* A float16 subnormal: the mantissa in units of 2^-24. shift is 14 to 24. */
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
    const uint32_t half_less_one = (1u << (shift - 1)) - 1u;
    return (uint16_t)(sign | ((mantissa + half_less_one + ((mantissa >> shift) & 1u)) >> shift));
}

static inline uint32_t fmm_f32_from_f64(uint64_t bits)
{
    const uint32_t sign = (uint32_t)(bits >> 32) & 0x80000000u;
    const uint64_t magnitude = bits & UINT64_C(0x7fffffffffffffff);

    if (magnitude - UINT64_C(0x3810000000000000) < UINT64_C(0x47effffff0000000) - UINT64_C(0x3810000000000000)) {
        /* A normal float32, the usual case: 2^-126 up to below the midpoint after the largest finite value. */
        const uint64_t rebased = magnitude - UINT64_C(0x3800000000000000);
        return sign | (uint32_t)((rebased + UINT64_C(0x0fffffff) + ((magnitude >> 29) & 1u)) >> 29);
    }
    if (magnitude > UINT64_C(0x7ff0000000000000))
        return sign | 0x7fc00000u | ((uint32_t)(magnitude >> 29) & 0x007fffffu);
    if (magnitude >= UINT64_C(0x47effffff0000000)) return sign | 0x7f800000u;
    if (magnitude <= UINT64_C(0x3690000000000000)) return sign; /* up to 2^-150, a tie that goes to the even zero */
    /* A float32 subnormal: the mantissa in units of 2^-149. shift is 30 to 53. */
    const uint32_t shift = 926u - (uint32_t)(magnitude >> 52);
    const uint64_t mantissa = (magnitude & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x0010000000000000);
    const uint64_t half_less_one = (UINT64_C(1) << (shift - 1)) - 1u;
    return sign | (uint32_t)((mantissa + half_less_one + ((mantissa >> shift) & 1u)) >> shift);
}

static inline uint32_t fmm_f32_from_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    return (wide & 0x7fffffffu) > 0x7f800000u ? wide | 0x00400000u : wide;
}

static inline uint32_t fmm_f32_from_f16(uint16_t bits)
{
    const uint32_t sign = ((uint32_t)bits & 0x8000u) << 16;
    const uint32_t exponent = ((uint32_t)bits >> 10) & 0x1fu;
    uint32_t mantissa = (uint32_t)bits & 0x03ffu;

    if (exponent == 0x1fu) return sign | 0x7f800000u | (mantissa ? 0x00400000u | (mantissa << 13) : 0u);
    if (exponent) return sign | ((exponent + 112u) << 23) | (mantissa << 13);
    if (!mantissa) return sign;
    /* A subnormal becomes normal: move its leading bit to the hidden place. */
    uint32_t biased = 113u;
    while (!(mantissa & 0x0400u)) {
        mantissa <<= 1;
        biased--;
    }
    return sign | (biased << 23) | ((mantissa & 0x03ffu) << 13);
}

#endif /* FASTMM_CAST_ONE_H */
