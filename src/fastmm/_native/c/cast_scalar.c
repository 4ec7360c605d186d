/* The baseline kernels: plain C, one element at a time, on every machine. What they give is what the others must give.
 * Loads and stores go by memcpy since no pointer need be aligned; compilers make single moves of them, and vectorise
 * the branch-free loops with the baseline's own vectors. */
#include <string.h>

#include "fastmm/cast.h"
#include "fastmm/cast_one.h"

#define FMM_SCALAR_KERNEL(kernel, one, src_t, dst_t)                                  \
    static void kernel(const void *src, void *dst, size_t nelem)                      \
    {                                                                                 \
        const unsigned char *from = src;                                              \
        unsigned char *to = dst;                                                      \
        for (size_t i = 0; i < nelem; i++) {                                          \
            src_t wide;                                                               \
            memcpy(&wide, from + i * sizeof(src_t), sizeof wide);                     \
            const dst_t result = one(wide);                                           \
            memcpy(to + i * sizeof(dst_t), &result, sizeof result);                   \
        }                                                                             \
    }

FMM_SCALAR_KERNEL(cast_f32_to_bf16, fmm_bf16_from_f32, uint32_t, uint16_t)
FMM_SCALAR_KERNEL(cast_f32_to_f16, fmm_f16_from_f32, uint32_t, uint16_t)
FMM_SCALAR_KERNEL(cast_f64_to_f32, fmm_f32_from_f64, uint64_t, uint32_t)
FMM_SCALAR_KERNEL(cast_f16_to_f32, fmm_f32_from_f16, uint16_t, uint32_t)
FMM_SCALAR_KERNEL(cast_bf16_to_f32, fmm_f32_from_bf16, uint16_t, uint32_t)

const fmm_cast_table_t fmm_cast_table_scalar = {
    .name = "scalar",
    .features = 0,
    .f32_to_bf16 = cast_f32_to_bf16,
    .f32_to_f16 = cast_f32_to_f16,
    .f64_to_f32 = cast_f64_to_f32,
    .f16_to_f32 = cast_f16_to_f32,
    .bf16_to_f32 = cast_bf16_to_f32,
};
