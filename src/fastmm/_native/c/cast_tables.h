/* Which instruction sets this build holds; read by the registry and by the files that define the tables. */
#ifndef FASTMM_CAST_TABLES_H
#define FASTMM_CAST_TABLES_H

#include "fastmm/cast.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(FMM_NO_SIMD)
#define FMM_CAST_HAVE_X86 1
extern const fmm_cast_table_t fmm_cast_table_avx2;
extern const fmm_cast_table_t fmm_cast_table_avx512;
#endif

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) && !defined(FMM_NO_SIMD)
#define FMM_CAST_HAVE_NEON 1
extern const fmm_cast_table_t fmm_cast_table_neon;
#endif

extern const fmm_cast_table_t fmm_cast_table_scalar;

#endif /* FASTMM_CAST_TABLES_H */
