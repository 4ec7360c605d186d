/* Unpacking token ids: many small integers out of msgpack. */
#ifndef FASTMM_UNPACK_IDS_H
#define FASTMM_UNPACK_IDS_H

#include "fastmm/msgpack_read.h"

/* Reads up to nelem integers into out, which has room for nelem and no more; returns how many. Fewer than nelem only with a
 * status: FMM_ERR_TRUNCATED, FMM_ERR_TYPE (no integer) or FMM_ERR_OVERFLOW (above INT64_MAX), and the reader at that value.
 * Bytes behind the last integer are looked at, up to the reader's end, and not taken. */
typedef size_t (*fmm_unpack_ids_fn_t)(fmm_reader_t *r, int64_t *out, size_t nelem, fmm_status_t *status);

size_t fmm_unpack_ids_scalar(fmm_reader_t *r, int64_t *out, size_t nelem, fmm_status_t *status);

/* The best kernel that belongs to an instruction set of cast.h ("scalar", "avx512", ...) and needs no more than these
 * FMM_CPU_* bits, never NULL. */
fmm_unpack_ids_fn_t fmm_unpack_ids_best(const char *isa, uint64_t features);

#endif /* FASTMM_UNPACK_IDS_H */
