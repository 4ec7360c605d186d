#include "fastmm/cpu.h"

#if defined(__x86_64__) && !defined(FMM_NO_SIMD)

#include <cpuid.h>

/* xgetbv by hand: the intrinsic wants -mxsave, which a baseline build does not have. */
static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

uint64_t fmm_cpu_features(void)
{
    const uint64_t ymm_state = 0x06;        /* XMM and the upper halves of YMM */
    const uint64_t zmm_state = 0xe0 | 0x06; /* opmask, the upper halves of ZMM0-15, ZMM16-31, and the above */
    uint64_t features = 0;
    uint32_t eax, ebx, ecx, edx;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
    if (!(ecx & bit_OSXSAVE) || !(ecx & bit_AVX)) return 0;
    const uint64_t xcr0 = read_xcr0();
    if ((xcr0 & ymm_state) != ymm_state) return 0;
    if (ecx & bit_F16C) features |= FMM_CPU_F16C;
    if (ecx & bit_POPCNT) features |= FMM_CPU_POPCNT;

    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
    if (ebx & bit_AVX2) features |= FMM_CPU_AVX2;
    if (ebx & bit_BMI) features |= FMM_CPU_BMI1;
    if (ebx & bit_BMI2) features |= FMM_CPU_BMI2;
    if ((xcr0 & zmm_state) == zmm_state) {
        if (ebx & bit_AVX512F) features |= FMM_CPU_AVX512F;
        if (ebx & bit_AVX512BW) features |= FMM_CPU_AVX512BW;
        if (ebx & bit_AVX512VL) features |= FMM_CPU_AVX512VL;
        if (ebx & bit_AVX512DQ) features |= FMM_CPU_AVX512DQ;
        if (ecx & bit_AVX512VBMI) features |= FMM_CPU_AVX512VBMI;
        if (ecx & bit_AVX512VBMI2) features |= FMM_CPU_AVX512VBMI2;
    }
    return features;
}

#elif defined(__aarch64__) && !defined(FMM_NO_SIMD)

/* Advanced SIMD with float16 conversion is part of the AArch64 baseline. */
uint64_t fmm_cpu_features(void) { return FMM_CPU_NEON; }

#else

uint64_t fmm_cpu_features(void) { return 0; }

#endif
