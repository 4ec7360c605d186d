/* What this processor and this operating system let us execute. */
#ifndef FASTMM_CPU_H
#define FASTMM_CPU_H

#include <stdint.h>

/* One bit each; a kernel table lists the bits it needs. */
#define FMM_CPU_AVX2        (UINT64_C(1) << 0)
#define FMM_CPU_F16C        (UINT64_C(1) << 1)
#define FMM_CPU_AVX512F     (UINT64_C(1) << 2)
#define FMM_CPU_AVX512BW    (UINT64_C(1) << 3)
#define FMM_CPU_AVX512VL    (UINT64_C(1) << 4)
#define FMM_CPU_AVX512DQ    (UINT64_C(1) << 5)
#define FMM_CPU_NEON        (UINT64_C(1) << 6)
#define FMM_CPU_AVX512VBMI  (UINT64_C(1) << 7)
#define FMM_CPU_AVX512VBMI2 (UINT64_C(1) << 8)
#define FMM_CPU_BMI1        (UINT64_C(1) << 9)
#define FMM_CPU_BMI2        (UINT64_C(1) << 10)
#define FMM_CPU_POPCNT      (UINT64_C(1) << 11)

/* The usable features: CPUID says what the processor has, XCR0 what the operating system saves on a context switch, and
 * both must agree. CPUID traps in a virtual machine (tens of microseconds), so call once and keep the answer. */
uint64_t fmm_cpu_features(void);

#endif /* FASTMM_CPU_H */
