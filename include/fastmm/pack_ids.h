/* Packing token ids: many small unsigned integers into msgpack, branch-free. */
#ifndef FASTMM_PACK_IDS_H
#define FASTMM_PACK_IDS_H

#include <stddef.h>
#include <stdint.h>

/* The longest form of a 32-bit id. */
#define FMM_PACK_ID_MAX_NBYTES 5
/* A kernel may store this much past the last byte it returns. */
#define FMM_PACK_IDS_SLACK_NBYTES 64

/* Writes nelem ids at p in their shortest form; returns where the next byte goes. Needs room for
 * nelem * FMM_PACK_ID_MAX_NBYTES + FMM_PACK_IDS_SLACK_NBYTES. */
typedef uint8_t *(*fmm_pack_ids_fn_t)(uint8_t *p, const uint32_t *ids, size_t nelem);

uint8_t *fmm_pack_ids_scalar(uint8_t *p, const uint32_t *ids, size_t nelem);

/* The best kernel that belongs to an instruction set of cast.h ("scalar", "avx512", ...) and needs no more than these
 * FMM_CPU_* bits, never NULL. */
fmm_pack_ids_fn_t fmm_pack_ids_best(const char *isa, uint64_t features);

#endif
