/* Holds every kernel of this build that this machine runs against the scalar ones, bit by bit; and the scalar ones
 * against a table of known answers. Made for the aarch64 kernels under qemu-user, but runs anywhere.
 *
 *   driver            samples, special values, every length from 0 to 130, misaligned, in place, with canaries
 *   driver full       and all 2^32 float32 inputs
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fastmm/cast.h"
#include "fastmm/cast_one.h"

#define BLOCK_NELEM 65536
#define CANARY 0xa5
#define MARGIN 64

static uint64_t compared = 0;

#define FAIL(...)                     \
    do {                              \
        fprintf(stderr, "FAILED: ");  \
        fprintf(stderr, __VA_ARGS__); \
        fprintf(stderr, "\n");        \
        exit(1);                      \
    } while (0)

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Modes that a caller's thread may be in; the results may not depend on them. */
#if defined(__aarch64__)
static uint64_t set_modes(uint64_t modes) /* and clears the flags, which sit in the upper half of what comes back */
{
    uint64_t before, flags;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("mrs %0, fpsr" : "=r"(flags));
    __asm__ volatile("msr fpcr, %0" : : "r"(modes & 0xffffffffu));
    __asm__ volatile("msr fpsr, %0" : : "r"(UINT64_C(0)));
    return before | (flags << 32);
}
/* nothing; flush to zero, default NaN, round down; the alternative half format, round to zero */
static const uint64_t modes[] = {0, (1u << 24) | (1u << 25) | (2u << 22), (1u << 26) | (3u << 22)};
#elif defined(__x86_64__)
static uint64_t set_modes(uint64_t modes)
{
    unsigned before, after = (unsigned)modes;
    __asm__ volatile("stmxcsr %0" : "=m"(before));
    __asm__ volatile("ldmxcsr %0" : : "m"(after));
    return before;
}
/* nothing; flush to zero, denormals are zero, round down; every exception traps, round to zero */
static const uint64_t modes[] = {0x1f80, 0x1f80 | 0x8040 | 0x2000, 0x6000};
#else
static uint64_t set_modes(uint64_t modes) { return modes; }
static const uint64_t modes[] = {0};
#endif

/* --- scalar against known answers ------------------------------------------------------------------------------- */

static void check_known(void)
{
    static const struct { uint32_t in; uint16_t bf16, f16; } known[] = {
        {0x00000000, 0x0000, 0x0000}, {0x80000000, 0x8000, 0x8000}, /* zeros keep their sign */
        {0x3f800000, 0x3f80, 0x3c00}, {0xbf800000, 0xbf80, 0xbc00}, /* +-1 */
        {0x3f808000, 0x3f80, 0x3c04}, {0x3f818000, 0x3f82, 0x3c0c}, /* bfloat16 ties, to even down and up */
        {0x3f808001, 0x3f81, 0x3c04}, {0x3f801000, 0x3f80, 0x3c00}, /* past the tie; a float16 tie down */
        {0x3f803000, 0x3f80, 0x3c02}, {0x477fef00, 0x4780, 0x7bff}, /* a float16 tie up; 65519 */
        {0x477ff000, 0x4780, 0x7c00}, {0xc7800000, 0xc780, 0xfc00}, /* 65520 and -65536 overflow float16 */
        {0x477fe000, 0x4780, 0x7bff}, {0x7f7fffff, 0x7f80, 0x7c00}, /* 65504; FLT_MAX overflows bfloat16 too */
        {0x7f800000, 0x7f80, 0x7c00}, {0xff800000, 0xff80, 0xfc00}, /* infinities */
        {0x38800000, 0x3880, 0x0400}, {0x387fe000, 0x3880, 0x0400}, /* float16's least normal; a tie that rounds up to it */
        {0x33800000, 0x3380, 0x0001}, {0x33000000, 0x3300, 0x0000}, /* its least subnormal; half of it, a tie to zero */
        {0x33000001, 0x3300, 0x0001}, {0xb3000001, 0xb300, 0x8001}, /* just above half of it */
        {0x00000001, 0x0000, 0x0000}, {0x00400000, 0x0040, 0x0000}, /* float32 subnormals */
        {0x007fffff, 0x0080, 0x0000}, {0x00018000, 0x0002, 0x0000}, {0x00008000, 0x0000, 0x0000},
        {0x7fc00000, 0x7fc0, 0x7e00}, {0xffc00000, 0xffc0, 0xfe00}, /* quiet NaNs */
        {0x7f800001, 0x7fc0, 0x7e00}, {0xff802000, 0xffc0, 0xfe01}, /* signalling NaNs are quieted */
        {0x7fffffff, 0x7fff, 0x7fff}, {0xffabcdef, 0xffeb, 0xff5e}, /* leading payload bits stay */
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (fmm_bf16_from_f32(known[i].in) != known[i].bf16)
            FAIL("%08" PRIx32 " to bfloat16: %04x, not %04x", known[i].in, fmm_bf16_from_f32(known[i].in), known[i].bf16);
        if (fmm_f16_from_f32(known[i].in) != known[i].f16)
            FAIL("%08" PRIx32 " to float16: %04x, not %04x", known[i].in, fmm_f16_from_f32(known[i].in), known[i].f16);
    }
    for (uint32_t bits = 0; bits < 65536; bits++) { /* what is representable comes back as it was, NaNs quieted */
        const uint16_t half = (uint16_t)bits;
        const uint16_t half_nan = (half & 0x7fff) > 0x7c00 ? 0x0200 : 0;
        const uint16_t brain_nan = (half & 0x7fff) > 0x7f80 ? 0x0040 : 0;
        if (fmm_f16_from_f32(fmm_f32_from_f16(half)) != (half | half_nan)) FAIL("float16 %04x does not come back", half);
        if (fmm_bf16_from_f32(fmm_f32_from_bf16(half)) != (half | brain_nan)) FAIL("bfloat16 %04x does not come back", half);
    }
}

/* --- one kernel against its scalar twin --------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t src_item, dst_item;
    fmm_cast_fn_t kernel, twin;
    int may_be_inplace;
} pair_t;

static unsigned char src_room[BLOCK_NELEM * 8 + 2 * MARGIN], dst_room[BLOCK_NELEM * 8 + 2 * MARGIN];
static unsigned char want[BLOCK_NELEM * 8];

static void check_canaries(const pair_t *pair, const unsigned char *room, const unsigned char *from, size_t nbytes)
{
    for (const unsigned char *p = room; p < from; p++)
        if (*p != CANARY) FAIL("%s wrote before its destination", pair->name);
    for (const unsigned char *p = from + nbytes; p < from + nbytes + MARGIN; p++)
        if (*p != CANARY) FAIL("%s wrote after its destination", pair->name);
}

static void check_block(const pair_t *pair, const unsigned char *src, size_t nelem, size_t src_shift, size_t dst_shift)
{
    const size_t src_nbytes = nelem * pair->src_item, dst_nbytes = nelem * pair->dst_item;
    unsigned char *from = src_room + MARGIN + src_shift, *to = dst_room + MARGIN + dst_shift;

    pair->twin(src, want, nelem);
    memcpy(from, src, src_nbytes);
    memset(dst_room, CANARY, MARGIN + dst_shift + dst_nbytes + MARGIN);
    pair->kernel(from, to, nelem);
    if (memcmp(to, want, dst_nbytes) != 0) {
        for (size_t i = 0; i < nelem; i++)
            if (memcmp(to + i * pair->dst_item, want + i * pair->dst_item, pair->dst_item) != 0)
                FAIL("%s: element %zu of %zu differs", pair->name, i, nelem);
    }
    check_canaries(pair, dst_room, to, dst_nbytes);
    if (memcmp(from, src, src_nbytes) != 0) FAIL("%s wrote into its source", pair->name);

    if (pair->may_be_inplace) {
        memset(src_room, CANARY, MARGIN + src_shift + src_nbytes + MARGIN);
        memcpy(from, src, src_nbytes);
        pair->kernel(from, from, nelem);
        if (memcmp(from, want, dst_nbytes) != 0) FAIL("%s in place differs, %zu elements", pair->name, nelem);
        check_canaries(pair, src_room, from, src_nbytes);
    }
    compared += nelem;
}

/* Bits worth having: uniform ones, and ones near every power of two, every tie and every border. */
static void fill(unsigned char *out, size_t nelem, size_t item)
{
    static const int64_t near[] = {0, 1, -1, 2, -2, 3, -3};
    for (size_t i = 0; i < nelem; i++) {
        uint64_t bits = next_random();
        const int64_t nudge = near[(bits >> 32) % 7];
        if (i % 2 && item == 4) {
            bits = (next_random() & 0xff800000u) | ((next_random() & 0x7ffu) << 12);
            bits = (uint32_t)((int64_t)bits + nudge);
        } else if (i % 2 && item == 8) { /* exponents around what float32 can hold, mantissas near its ties */
            const uint64_t exponent = 1023 - 160 + next_random() % 300;
            bits = (next_random() & (UINT64_C(1) << 63)) | (exponent << 52) | ((next_random() & 0x1ffffffu) << 28);
            if (i % 4 == 1) bits &= ~((UINT64_C(1) << (next_random() % 52)) - 1);
            bits = (uint64_t)((int64_t)bits + nudge);
        } else if (i % 16 == 0 && item == 8) {
            bits |= UINT64_C(0x7ff) << 52;
        } else if (i % 64 == 0 && item == 4) {
            bits |= 0x7f800000u;
        }
        memcpy(out + i * item, &bits, item); /* little endian */
    }
}

static void check_pair(const pair_t *pair, int full)
{
    static unsigned char src[BLOCK_NELEM * 8];

    for (size_t mode = 0; mode < sizeof modes / sizeof modes[0]; mode++) {
        for (int round = 0; round < 8; round++) {
            fill(src, BLOCK_NELEM, pair->src_item);
            const uint64_t before = set_modes(modes[mode]);
            check_block(pair, src, BLOCK_NELEM, 0, 0);
            if (set_modes(before) != modes[mode]) FAIL("%s left modes or flags behind", pair->name);
        }
    }
    for (size_t nelem = 0; nelem <= 130; nelem++)
        for (size_t shift = 0; shift < 8; shift++) check_block(pair, src + shift * 8 * 130, nelem, shift, (shift * 3) & 7);

    if (pair->src_item == 2) {
        for (uint32_t i = 0; i < 65536; i++) memcpy(src + 2 * i, &(uint16_t){(uint16_t)i}, 2);
        check_block(pair, src, 65536, 0, 0);
    }
    if (pair->src_item == 4) { /* every upper half with lower halves that tie, and nearly do; or all of them */
        static const uint16_t lower[] = {0, 1, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff};
        const uint32_t rounds = full ? 65536 : sizeof lower / sizeof lower[0];
        for (uint32_t round = 0; round < rounds; round++) {
            for (uint32_t i = 0; i < 65536; i++) {
                const uint32_t bits = (i << 16) | (full ? round : lower[round]);
                memcpy(src + 4 * i, &bits, 4);
            }
            check_block(pair, src, 65536, 0, 0);
        }
    }
}

int main(int argc, char **argv)
{
    const int full = argc > 1 && strcmp(argv[1], "full") == 0;
    const uint64_t features = fmm_cpu_features();
    const fmm_cast_table_t *scalar = fmm_cast_table_find("scalar");
    size_t count;
    const fmm_cast_table_t *const *tables = fmm_cast_tables(&count);

    check_known();
    printf("selected: %s\n", fmm_cast_table_best(features)->name);
    for (size_t i = 0; i < count; i++) {
        const fmm_cast_table_t *table = tables[i];
        if (!fmm_cast_table_usable(table, features)) {
            printf("%-8s not on this machine\n", table->name);
            continue;
        }
        const pair_t pairs[] = {
            {"f32_to_bf16", 4, 2, table->f32_to_bf16, scalar->f32_to_bf16, 1},
            {"f32_to_f16", 4, 2, table->f32_to_f16, scalar->f32_to_f16, 1},
            {"f32_to_bf16_stream", 4, 2, table->f32_to_bf16_stream, scalar->f32_to_bf16, 0},
            {"f32_to_f16_stream", 4, 2, table->f32_to_f16_stream, scalar->f32_to_f16, 0},
            {"f64_to_f32", 8, 4, table->f64_to_f32, scalar->f64_to_f32, 1},
            {"f16_to_f32", 2, 4, table->f16_to_f32, scalar->f16_to_f32, 0},
            {"bf16_to_f32", 2, 4, table->bf16_to_f32, scalar->bf16_to_f32, 0},
        };
        compared = 0;
        for (size_t p = 0; p < sizeof pairs / sizeof pairs[0]; p++)
            if (pairs[p].kernel) check_pair(&pairs[p], full);
        printf("%-8s equals scalar, %" PRIu64 " elements\n", table->name, compared);
    }
    return 0;
}
