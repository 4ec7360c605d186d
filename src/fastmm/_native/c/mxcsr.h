/* A neutral floating-point environment around a kernel's loop, x86-64.
 *
 * The thread may have set another rounding, flushing of subnormals (torch.set_flush_denormal does) or trapping
 * exceptions. Between the two nothing of that reaches the conversions, and afterwards modes and flags are as they were.
 * The memory clobbers keep each conversion, which sits between its load and its store, inside the pair.
 */
#ifndef FASTMM_MXCSR_H
#define FASTMM_MXCSR_H

#define FMM_MXCSR_NEUTRAL 0x1f80u /* all exceptions masked, round to nearest, flush nothing */

static inline __attribute__((always_inline)) unsigned fmm_mxcsr_enter(void)
{
    const unsigned neutral = FMM_MXCSR_NEUTRAL;
    unsigned saved;
    __asm__ volatile("stmxcsr %0" : "=m"(saved) : : "memory");
    __asm__ volatile("ldmxcsr %0" : : "m"(neutral) : "memory");
    return saved;
}

static inline __attribute__((always_inline)) void fmm_mxcsr_leave(unsigned saved)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(saved) : "memory");
}

#endif /* FASTMM_MXCSR_H */
