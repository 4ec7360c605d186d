/* AArch64 Advanced SIMD kernels; float16 conversion is part of the baseline.
 *
 * A step reads 64 bytes and then writes 32, so that it works in place; tails go element by element by the rule itself.
 * The addhn instruction adds and keeps the upper halves, which is bfloat16 rounding in one step. Conversions run under
 * a neutral FPCR: rounding and flushing modes, the default-NaN mode and the alternative half format cannot reach them.
 */
#include "cast_tables.h"
#include "fastmm/cast_one.h"

#ifdef FMM_CAST_HAVE_NEON

#include <arm_neon.h>
#include <string.h>

/* The memory clobbers keep each conversion, between its load and its store, inside the pair. */
#define FPENV_ENTER()                                                          \
    uint64_t saved_control, saved_status;                                      \
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_control) : : "memory");       \
    __asm__ volatile("mrs %0, fpsr" : "=r"(saved_status) : : "memory");        \
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)) : "memory")
#define FPENV_LEAVE()                                                          \
    __asm__ volatile("msr fpcr, %0" : : "r"(saved_control) : "memory");        \
    __asm__ volatile("msr fpsr, %0" : : "r"(saved_status) : "memory")

static inline uint16x4_t round_to_bf16(uint32x4_t bits)
{
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t addend = vaddq_u32(odd, vdupq_n_u32(0x7fff));
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
    const uint32x4_t quieted = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    /* A NaN takes its quieted bits and adds nothing. */
    return vaddhn_u32(vbslq_u32(nan, quieted, bits), vbicq_u32(addend, nan));
}

static inline uint16x8_t bf16_from_2(const unsigned char *from)
{
    const uint32x4_t low = vreinterpretq_u32_u8(vld1q_u8(from));
    const uint32x4_t high = vreinterpretq_u32_u8(vld1q_u8(from + 16));
    return vcombine_u16(round_to_bf16(low), round_to_bf16(high));
}

static inline uint16x8_t f16_from_2(const unsigned char *from)
{
    const float32x4_t low = vreinterpretq_f32_u8(vld1q_u8(from));
    const float32x4_t high = vreinterpretq_f32_u8(vld1q_u8(from + 16));
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
}

/* The tail of every kernel, and whole kernels where the vector loop has run out. */
#define FMM_TAIL(one, src_t, dst_t)                                    \
    for (size_t i = 0; i < nelem; i++) {                               \
        src_t wide;                                                    \
        memcpy(&wide, from + i * sizeof(src_t), sizeof wide);          \
        const dst_t result = one(wide);                                \
        memcpy(to + i * sizeof(dst_t), &result, sizeof result);        \
    }

#define FMM_NARROW_KERNEL(kernel, from_2, one)                         \
    static void kernel(const void *src, void *dst, size_t nelem)       \
    {                                                                  \
        const unsigned char *from = src;                               \
        unsigned char *to = dst;                                       \
        FPENV_ENTER();                                                 \
        for (; nelem >= 16; nelem -= 16, from += 64, to += 32) {       \
            const uint16x8_t first = from_2(from);                     \
            const uint16x8_t second = from_2(from + 32);               \
            vst1q_u8(to, vreinterpretq_u8_u16(first));                 \
            vst1q_u8(to + 16, vreinterpretq_u8_u16(second));           \
        }                                                              \
        FPENV_LEAVE();                                                 \
        FMM_TAIL(one, uint32_t, uint16_t)                              \
    }

FMM_NARROW_KERNEL(cast_f32_to_bf16, bf16_from_2, fmm_bf16_from_f32)
FMM_NARROW_KERNEL(cast_f32_to_f16, f16_from_2, fmm_f16_from_f32)

static void cast_f64_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    FPENV_ENTER();
    for (; nelem >= 4; nelem -= 4, from += 32, to += 16) {
        const float64x2_t low = vreinterpretq_f64_u8(vld1q_u8(from));
        const float64x2_t high = vreinterpretq_f64_u8(vld1q_u8(from + 16));
        vst1q_u8(to, vreinterpretq_u8_f32(vcvt_high_f32_f64(vcvt_f32_f64(low), high)));
    }
    FPENV_LEAVE();
    FMM_TAIL(fmm_f32_from_f64, uint64_t, uint32_t)
}

static void cast_f16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    FPENV_ENTER();
    for (; nelem >= 8; nelem -= 8, from += 16, to += 32) {
        const float16x8_t half = vreinterpretq_f16_u8(vld1q_u8(from));
        vst1q_u8(to, vreinterpretq_u8_f32(vcvt_f32_f16(vget_low_f16(half))));
        vst1q_u8(to + 16, vreinterpretq_u8_f32(vcvt_high_f32_f16(half)));
    }
    FPENV_LEAVE();
    FMM_TAIL(fmm_f32_from_f16, uint16_t, uint32_t)
}

static inline uint32x4_t quiet_f32(uint32x4_t bits)
{
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
    return vorrq_u32(bits, vandq_u32(nan, vdupq_n_u32(0x00400000)));
}

static void cast_bf16_to_f32(const void *src, void *dst, size_t nelem)
{
    const unsigned char *from = src;
    unsigned char *to = dst;
    for (; nelem >= 8; nelem -= 8, from += 16, to += 32) {
        const uint16x8_t half = vreinterpretq_u16_u8(vld1q_u8(from));
        vst1q_u8(to, vreinterpretq_u8_u32(quiet_f32(vshll_n_u16(vget_low_u16(half), 16))));
        vst1q_u8(to + 16, vreinterpretq_u8_u32(quiet_f32(vshll_high_n_u16(half, 16))));
    }
    FMM_TAIL(fmm_f32_from_bf16, uint16_t, uint32_t)
}

const fmm_cast_table_t fmm_cast_table_neon = {
    .name = "neon",
    .features = FMM_CPU_NEON,
    .f32_to_bf16 = cast_f32_to_bf16,
    .f32_to_f16 = cast_f32_to_f16,
    .f64_to_f32 = cast_f64_to_f32,
    .f16_to_f32 = cast_f16_to_f32,
    .bf16_to_f32 = cast_bf16_to_f32,
};

#else

typedef int fmm_cast_neon_not_in_this_build; /* ISO C wants a declaration in every file */

#endif
