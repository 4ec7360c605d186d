/* Reading msgpack from bytes that nobody vouches for.
 *
 * Every function moves `reader->cur` past what it read and returns FMM_OK, or leaves the reader where it was and returns
 *   FMM_ERR_TRUNCATED  the input ends before the value, or a declared length is more than the bytes that are left,
 *   FMM_ERR_TYPE       the value there is of another kind.
 * Nothing is read outside [cur, end), and nothing is read twice, so memory that changes underneath gives wrong values at
 * worst. Source of the format: the msgpack specification, https://github.com/msgpack/msgpack/blob/master/spec.md
 */
#ifndef FASTMM_MSGPACK_READ_H
#define FASTMM_MSGPACK_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "fastmm/status.h"

/* The kind of a value, told by its first byte alone. */
typedef enum fmm_kind {
    FMM_KIND_INVALID = 0, /* 0xc1, which the specification never uses */
    FMM_KIND_NIL,
    FMM_KIND_BOOL,
    FMM_KIND_INT,
    FMM_KIND_FLOAT,
    FMM_KIND_STR,
    FMM_KIND_BIN,
    FMM_KIND_ARRAY,
    FMM_KIND_MAP,
    FMM_KIND_EXT,
    FMM_KIND_COUNT
} fmm_kind_t;

/* Nesting that fmm_read_skip can follow, whatever limit its caller names. */
#define FMM_READ_MAX_DEPTH 512

typedef struct fmm_reader {
    const uint8_t *cur;
    const uint8_t *end;
} fmm_reader_t;

static inline size_t fmm_read_left(const fmm_reader_t *r) { return (size_t)(r->end - r->cur); }

static inline fmm_kind_t fmm_kind_of(uint8_t lead)
{
    /* 0xc0 to 0xdf; what lies below and above is told by ranges. */
    static const uint8_t kinds[32] = {
        FMM_KIND_NIL,   FMM_KIND_INVALID, FMM_KIND_BOOL,  FMM_KIND_BOOL,  FMM_KIND_BIN,   FMM_KIND_BIN, FMM_KIND_BIN,
        FMM_KIND_EXT,   FMM_KIND_EXT,     FMM_KIND_EXT,   FMM_KIND_FLOAT, FMM_KIND_FLOAT, FMM_KIND_INT, FMM_KIND_INT,
        FMM_KIND_INT,   FMM_KIND_INT,     FMM_KIND_INT,   FMM_KIND_INT,   FMM_KIND_INT,   FMM_KIND_INT, FMM_KIND_EXT,
        FMM_KIND_EXT,   FMM_KIND_EXT,     FMM_KIND_EXT,   FMM_KIND_EXT,   FMM_KIND_STR,   FMM_KIND_STR, FMM_KIND_STR,
        FMM_KIND_ARRAY, FMM_KIND_ARRAY,   FMM_KIND_MAP,   FMM_KIND_MAP,
    };
    if (lead < 0x80 || lead >= 0xe0) return FMM_KIND_INT;
    if (lead < 0x90) return FMM_KIND_MAP;
    if (lead < 0xa0) return FMM_KIND_ARRAY;
    if (lead < 0xc0) return FMM_KIND_STR;
    return (fmm_kind_t)kinds[lead - 0xc0];
}

static inline uint16_t fmm_load_be16(const uint8_t *p)
{
    uint16_t value;
    memcpy(&value, p, 2);
    return __builtin_bswap16(value);
}

static inline uint32_t fmm_load_be32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, 4);
    return __builtin_bswap32(value);
}

static inline uint64_t fmm_load_be64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, 8);
    return __builtin_bswap64(value);
}

/* An integer. `*is_u64` says that the value is above INT64_MAX and `*value` holds its bits. */
static inline fmm_status_t fmm_read_int(fmm_reader_t *r, int64_t *value, bool *is_u64)
{
    const uint8_t *p = r->cur;
    const size_t left = fmm_read_left(r);

    *is_u64 = false;
    if (left == 0) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *p;
    if (lead < 0x80 || lead >= 0xe0) {
        *value = (int8_t)lead;
        r->cur = p + 1;
        return FMM_OK;
    }
    if (lead < 0xcc || lead > 0xd3) return FMM_ERR_TYPE;
    const size_t nbytes = (size_t)1 << (lead & 3);
    if (left < 1 + nbytes) return FMM_ERR_TRUNCATED;
    switch (lead) {
    case 0xcc: *value = p[1]; break;
    case 0xcd: *value = fmm_load_be16(p + 1); break;
    case 0xce: *value = fmm_load_be32(p + 1); break;
    case 0xcf:
        *value = (int64_t)fmm_load_be64(p + 1);
        *is_u64 = *value < 0;
        break;
    case 0xd0: *value = (int8_t)p[1]; break;
    case 0xd1: *value = (int16_t)fmm_load_be16(p + 1); break;
    case 0xd2: *value = (int32_t)fmm_load_be32(p + 1); break;
    default: *value = (int64_t)fmm_load_be64(p + 1); break;
    }
    r->cur = p + 1 + nbytes;
    return FMM_OK;
}

static inline fmm_status_t fmm_read_float(fmm_reader_t *r, double *value)
{
    const uint8_t *p = r->cur;
    const size_t left = fmm_read_left(r);

    if (left == 0) return FMM_ERR_TRUNCATED;
    if (*p == 0xcb) {
        if (left < 9) return FMM_ERR_TRUNCATED;
        const uint64_t bits = fmm_load_be64(p + 1);
        memcpy(value, &bits, 8);
        r->cur = p + 9;
        return FMM_OK;
    }
    if (*p != 0xca) return FMM_ERR_TYPE;
    if (left < 5) return FMM_ERR_TRUNCATED;
    const uint32_t bits = fmm_load_be32(p + 1);
    float narrow;
    memcpy(&narrow, &bits, 4);
    *value = narrow;
    r->cur = p + 5;
    return FMM_OK;
}

/* A big-endian length of 1 << shift bytes behind the lead byte; `*header` is what lead and length take together. */
static inline fmm_status_t fmm_read_length(const fmm_reader_t *r, int shift, uint32_t *length, size_t *header)
{
    const uint8_t *p = r->cur + 1;
    const size_t nbytes = (size_t)1 << shift;

    if (fmm_read_left(r) < 1 + nbytes) return FMM_ERR_TRUNCATED;
    *length = shift == 0 ? p[0] : shift == 1 ? fmm_load_be16(p) : fmm_load_be32(p);
    *header = 1 + nbytes;
    return FMM_OK;
}

static inline fmm_status_t fmm_read_str(fmm_reader_t *r, const uint8_t **data, uint32_t *nbytes)
{
    size_t header = 1;

    if (r->cur == r->end) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *r->cur;
    if ((lead & 0xe0) == 0xa0) {
        *nbytes = lead & 0x1f;
    } else if (lead >= 0xd9 && lead <= 0xdb) {
        const fmm_status_t status = fmm_read_length(r, lead - 0xd9, nbytes, &header);
        if (status) return status;
    } else {
        return FMM_ERR_TYPE;
    }
    if (fmm_read_left(r) - header < *nbytes) return FMM_ERR_TRUNCATED;
    *data = r->cur + header;
    r->cur = *data + *nbytes;
    return FMM_OK;
}

static inline fmm_status_t fmm_read_bin(fmm_reader_t *r, const uint8_t **data, uint32_t *nbytes)
{
    size_t header;

    if (r->cur == r->end) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *r->cur;
    if (lead < 0xc4 || lead > 0xc6) return FMM_ERR_TYPE;
    const fmm_status_t status = fmm_read_length(r, lead - 0xc4, nbytes, &header);
    if (status) return status;
    if (fmm_read_left(r) - header < *nbytes) return FMM_ERR_TRUNCATED;
    *data = r->cur + header;
    r->cur = *data + *nbytes;
    return FMM_OK;
}

static inline fmm_status_t fmm_read_ext(fmm_reader_t *r, int8_t *code, const uint8_t **data, uint32_t *nbytes)
{
    size_t header = 1;

    if (r->cur == r->end) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *r->cur;
    if (lead >= 0xd4 && lead <= 0xd8) {
        *nbytes = 1u << (lead - 0xd4);
    } else if (lead >= 0xc7 && lead <= 0xc9) {
        const fmm_status_t status = fmm_read_length(r, lead - 0xc7, nbytes, &header);
        if (status) return status;
    } else {
        return FMM_ERR_TYPE;
    }
    if (fmm_read_left(r) - header < (size_t)*nbytes + 1) return FMM_ERR_TRUNCATED;
    *code = (int8_t)r->cur[header];
    *data = r->cur + header + 1;
    r->cur = *data + *nbytes;
    return FMM_OK;
}

/* The header of an array. Each element takes a byte at least, so a count that the rest cannot hold is refused before
 * anything is allocated for it. */
static inline fmm_status_t fmm_read_array(fmm_reader_t *r, uint32_t *nelem)
{
    size_t header = 1;

    if (r->cur == r->end) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *r->cur;
    if ((lead & 0xf0) == 0x90) {
        *nelem = lead & 0x0f;
    } else if (lead == 0xdc || lead == 0xdd) {
        const fmm_status_t status = fmm_read_length(r, lead - 0xdc + 1, nelem, &header);
        if (status) return status;
    } else {
        return FMM_ERR_TYPE;
    }
    if (fmm_read_left(r) - header < *nelem) return FMM_ERR_TRUNCATED;
    r->cur += header;
    return FMM_OK;
}

/* The header of a map, in pairs; two bytes a pair at least. */
static inline fmm_status_t fmm_read_map(fmm_reader_t *r, uint32_t *npairs)
{
    size_t header = 1;

    if (r->cur == r->end) return FMM_ERR_TRUNCATED;
    const uint8_t lead = *r->cur;
    if ((lead & 0xf0) == 0x80) {
        *npairs = lead & 0x0f;
    } else if (lead == 0xde || lead == 0xdf) {
        const fmm_status_t status = fmm_read_length(r, lead - 0xde + 1, npairs, &header);
        if (status) return status;
    } else {
        return FMM_ERR_TYPE;
    }
    if ((fmm_read_left(r) - header) / 2 < *npairs) return FMM_ERR_TRUNCATED;
    r->cur += header;
    return FMM_OK;
}

/* Steps over one value that is nested at most `max_depth` deep (a scalar is 0 deep), without recursion. Beside the two
 * errors above: FMM_ERR_LIMIT when it is deeper, FMM_ERR_VALUE at a byte that begins no value. On an error the reader is
 * left at the value that is at fault. `*nelem` grows by the elements of every array and map inside. */
static inline fmm_status_t fmm_read_skip(fmm_reader_t *r, int max_depth, uint64_t *nelem)
{
    uint64_t open[FMM_READ_MAX_DEPTH + 1]; /* values still to come in each container around the cursor */
    int depth = 0;

    if (max_depth > FMM_READ_MAX_DEPTH) max_depth = FMM_READ_MAX_DEPTH;
    open[0] = 1;
    for (;;) {
        while (open[depth] == 0) {
            if (depth == 0) return FMM_OK;
            depth--;
        }
        open[depth]--;
        if (r->cur == r->end) return FMM_ERR_TRUNCATED;
        const uint8_t lead = *r->cur;
        size_t nbytes = 1;
        uint32_t count;
        const uint8_t *data;
        int8_t code;
        fmm_status_t status = FMM_OK;
        switch (fmm_kind_of(lead)) {
        case FMM_KIND_NIL:
        case FMM_KIND_BOOL:
            r->cur++;
            break;
        case FMM_KIND_INT:
            if (lead >= 0xcc && lead <= 0xd3) nbytes += (size_t)1 << (lead & 3);
            if (fmm_read_left(r) < nbytes) return FMM_ERR_TRUNCATED;
            r->cur += nbytes;
            break;
        case FMM_KIND_FLOAT:
            nbytes = lead == 0xca ? 5 : 9;
            if (fmm_read_left(r) < nbytes) return FMM_ERR_TRUNCATED;
            r->cur += nbytes;
            break;
        case FMM_KIND_STR: status = fmm_read_str(r, &data, &count); break;
        case FMM_KIND_BIN: status = fmm_read_bin(r, &data, &count); break;
        case FMM_KIND_EXT: status = fmm_read_ext(r, &code, &data, &count); break;
        case FMM_KIND_ARRAY:
        case FMM_KIND_MAP:
            if (depth == max_depth) return FMM_ERR_LIMIT;
            if (fmm_kind_of(lead) == FMM_KIND_ARRAY) {
                status = fmm_read_array(r, &count);
                open[depth + 1] = count;
            } else {
                status = fmm_read_map(r, &count);
                open[depth + 1] = 2 * (uint64_t)count;
            }
            if (status) return status;
            *nelem += count;
            depth++;
            break;
        default: return FMM_ERR_VALUE;
        }
        if (status) return status;
    }
}

#endif /* FASTMM_MSGPACK_READ_H */
