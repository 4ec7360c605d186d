/* Writing msgpack. Every function writes at `p`, which must have room, and returns where the next byte goes.
 *
 * The shortest form of each value, as msgspec and msgpack write it; floats are always 64 bits wide.
 * Source: the msgpack specification, https://github.com/msgpack/msgpack/blob/master/spec.md
 */
#ifndef FASTMM_MSGPACK_WRITE_H
#define FASTMM_MSGPACK_WRITE_H

#include <stdint.h>
#include <string.h>

/* Room that any single header, number, nil or bool needs, at most. */
#define FMM_WRITE_MAX_NBYTES 16

static inline uint8_t *fmm_write_be16(uint8_t *p, uint16_t value)
{
    value = __builtin_bswap16(value);
    memcpy(p, &value, 2);
    return p + 2;
}

static inline uint8_t *fmm_write_be32(uint8_t *p, uint32_t value)
{
    value = __builtin_bswap32(value);
    memcpy(p, &value, 4);
    return p + 4;
}

static inline uint8_t *fmm_write_be64(uint8_t *p, uint64_t value)
{
    value = __builtin_bswap64(value);
    memcpy(p, &value, 8);
    return p + 8;
}

static inline uint8_t *fmm_write_nil(uint8_t *p)
{
    *p = 0xc0;
    return p + 1;
}

static inline uint8_t *fmm_write_bool(uint8_t *p, int value)
{
    *p = value ? 0xc3 : 0xc2;
    return p + 1;
}

static inline uint8_t *fmm_write_uint(uint8_t *p, uint64_t value)
{
    if (value < 0x80) {
        *p = (uint8_t)value;
        return p + 1;
    }
    if (value < 0x100) {
        p[0] = 0xcc;
        p[1] = (uint8_t)value;
        return p + 2;
    }
    if (value < 0x10000) {
        *p = 0xcd;
        return fmm_write_be16(p + 1, (uint16_t)value);
    }
    if (value < 0x100000000) {
        *p = 0xce;
        return fmm_write_be32(p + 1, (uint32_t)value);
    }
    *p = 0xcf;
    return fmm_write_be64(p + 1, value);
}

static inline uint8_t *fmm_write_int(uint8_t *p, int64_t value)
{
    if (value >= 0) return fmm_write_uint(p, (uint64_t)value);
    if (value >= -32) {
        *p = (uint8_t)value;
        return p + 1;
    }
    if (value >= INT8_MIN) {
        p[0] = 0xd0;
        p[1] = (uint8_t)value;
        return p + 2;
    }
    if (value >= INT16_MIN) {
        *p = 0xd1;
        return fmm_write_be16(p + 1, (uint16_t)value);
    }
    if (value >= INT32_MIN) {
        *p = 0xd2;
        return fmm_write_be32(p + 1, (uint32_t)value);
    }
    *p = 0xd3;
    return fmm_write_be64(p + 1, (uint64_t)value);
}

static inline uint8_t *fmm_write_float(uint8_t *p, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    *p = 0xcb;
    return fmm_write_be64(p + 1, bits);
}

static inline uint8_t *fmm_write_str_header(uint8_t *p, uint32_t nbytes)
{
    if (nbytes < 32) {
        *p = (uint8_t)(0xa0 | nbytes);
        return p + 1;
    }
    if (nbytes < 0x100) {
        p[0] = 0xd9;
        p[1] = (uint8_t)nbytes;
        return p + 2;
    }
    if (nbytes < 0x10000) {
        *p = 0xda;
        return fmm_write_be16(p + 1, (uint16_t)nbytes);
    }
    *p = 0xdb;
    return fmm_write_be32(p + 1, nbytes);
}

static inline uint8_t *fmm_write_bin_header(uint8_t *p, uint32_t nbytes)
{
    if (nbytes < 0x100) {
        p[0] = 0xc4;
        p[1] = (uint8_t)nbytes;
        return p + 2;
    }
    if (nbytes < 0x10000) {
        *p = 0xc5;
        return fmm_write_be16(p + 1, (uint16_t)nbytes);
    }
    *p = 0xc6;
    return fmm_write_be32(p + 1, nbytes);
}

static inline uint8_t *fmm_write_array_header(uint8_t *p, uint32_t nelem)
{
    if (nelem < 16) {
        *p = (uint8_t)(0x90 | nelem);
        return p + 1;
    }
    if (nelem < 0x10000) {
        *p = 0xdc;
        return fmm_write_be16(p + 1, (uint16_t)nelem);
    }
    *p = 0xdd;
    return fmm_write_be32(p + 1, nelem);
}

static inline uint8_t *fmm_write_map_header(uint8_t *p, uint32_t nelem)
{
    if (nelem < 16) {
        *p = (uint8_t)(0x80 | nelem);
        return p + 1;
    }
    if (nelem < 0x10000) {
        *p = 0xde;
        return fmm_write_be16(p + 1, (uint16_t)nelem);
    }
    *p = 0xdf;
    return fmm_write_be32(p + 1, nelem);
}

static inline uint8_t *fmm_write_ext_header(uint8_t *p, int8_t code, uint32_t nbytes)
{
    switch (nbytes) {
    case 1: *p++ = 0xd4; break;
    case 2: *p++ = 0xd5; break;
    case 4: *p++ = 0xd6; break;
    case 8: *p++ = 0xd7; break;
    case 16: *p++ = 0xd8; break;
    default:
        if (nbytes < 0x100) {
            p[0] = 0xc7;
            p[1] = (uint8_t)nbytes;
            p += 2;
        } else if (nbytes < 0x10000) {
            *p = 0xc8;
            p = fmm_write_be16(p + 1, (uint16_t)nbytes);
        } else {
            *p = 0xc9;
            p = fmm_write_be32(p + 1, nbytes);
        }
    }
    *p = (uint8_t)code;
    return p + 1;
}

#endif
