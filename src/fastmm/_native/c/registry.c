/* The ordered registry of kernels, and the one entry point that picks a kernel for a pair of dtypes. */
#include <string.h>

#include "cast_tables.h"
#include "fastmm/size.h"

/* Best first: selection takes the first whose features are all there. */
static const fmm_cast_table_t *const tables[] = {
#ifdef FMM_CAST_HAVE_X86
    &fmm_cast_table_avx512,
    &fmm_cast_table_avx2,
#endif
#ifdef FMM_CAST_HAVE_NEON
    &fmm_cast_table_neon,
#endif
    &fmm_cast_table_scalar,
};

#define TABLE_COUNT (sizeof tables / sizeof tables[0])

const fmm_cast_table_t *const *fmm_cast_tables(size_t *count)
{
    *count = TABLE_COUNT;
    return tables;
}

const fmm_cast_table_t *fmm_cast_table_find(const char *name)
{
    for (size_t i = 0; i < TABLE_COUNT; i++) {
        if (strcmp(tables[i]->name, name) == 0) return tables[i];
    }
    return NULL;
}

int fmm_cast_table_usable(const fmm_cast_table_t *table, uint64_t features)
{
    return (table->features & ~features) == 0;
}

const fmm_cast_table_t *fmm_cast_table_best(uint64_t features)
{
    for (size_t i = 0; i + 1 < TABLE_COUNT; i++) {
        if (fmm_cast_table_usable(tables[i], features)) return tables[i];
    }
    return tables[TABLE_COUNT - 1];
}

static int is_cast_dtype(int dtype)
{
    return dtype == FMM_FLOAT16 || dtype == FMM_BFLOAT16 || dtype == FMM_FLOAT32 || dtype == FMM_FLOAT64;
}

int fmm_cast_supported(int src_dtype, int dst_dtype)
{
    return is_cast_dtype(src_dtype) && is_cast_dtype(dst_dtype) && (dst_dtype != FMM_FLOAT64 || src_dtype == dst_dtype);
}

int fmm_cast_supported_inplace(int src_dtype, int dst_dtype)
{
    return fmm_cast_supported(src_dtype, dst_dtype) &&
           fmm_dtype_infos[dst_dtype].item_nbytes <= fmm_dtype_infos[src_dtype].item_nbytes;
}

/* The kernel that does the pair in one step, NULL when it takes two. */
static fmm_cast_fn_t find_direct(const fmm_cast_table_t *table, int src_dtype, int dst_dtype, int stream)
{
    if (src_dtype == FMM_FLOAT32 && dst_dtype == FMM_BFLOAT16)
        return stream && table->f32_to_bf16_stream ? table->f32_to_bf16_stream : table->f32_to_bf16;
    if (src_dtype == FMM_FLOAT32 && dst_dtype == FMM_FLOAT16)
        return stream && table->f32_to_f16_stream ? table->f32_to_f16_stream : table->f32_to_f16;
    if (dst_dtype != FMM_FLOAT32) return NULL;
    if (src_dtype == FMM_FLOAT64) return table->f64_to_f32;
    if (src_dtype == FMM_FLOAT16) return table->f16_to_f32;
    if (src_dtype == FMM_BFLOAT16) return table->bf16_to_f32;
    return NULL;
}

/* Elements per step of a cast that takes two: 4 KiB of float32 stay in the first-level cache. */
#define CHUNK_NELEM ((size_t)1024)

static void run_two_steps(fmm_cast_fn_t widen, fmm_cast_fn_t narrow, size_t src_item, size_t dst_item,
                          const unsigned char *src, unsigned char *dst, size_t nelem)
{
    float middle[CHUNK_NELEM];
    for (size_t done = 0; done < nelem; done += CHUNK_NELEM) {
        const size_t count = nelem - done < CHUNK_NELEM ? nelem - done : CHUNK_NELEM;
        widen(src + done * src_item, middle, count);
        narrow(middle, dst + done * dst_item, count);
    }
}

/* Sizes that fit, and memory that is disjoint or, where the element does not grow, the same. */
static fmm_status_t check_memory(size_t src_item, size_t dst_item, const void *src, const void *dst, size_t nelem)
{
    size_t src_nbytes, dst_nbytes, src_end, dst_end;
    if (!fmm_size_mul(nelem, src_item, &src_nbytes) || !fmm_size_mul(nelem, dst_item, &dst_nbytes))
        return FMM_ERR_OVERFLOW;
    if (!fmm_size_add((uintptr_t)src, src_nbytes, &src_end) || !fmm_size_add((uintptr_t)dst, dst_nbytes, &dst_end))
        return FMM_ERR_OVERFLOW;
    if (nelem == 0) return FMM_OK;
    if (src == dst) return dst_item <= src_item ? FMM_OK : FMM_ERR_OVERLAP;
    return (uintptr_t)src < dst_end && (uintptr_t)dst < src_end ? FMM_ERR_OVERLAP : FMM_OK;
}

fmm_status_t fmm_cast_run(const fmm_cast_table_t *table, int src_dtype, int dst_dtype, const void *src, void *dst,
                          size_t nelem)
{
    if (!fmm_cast_supported(src_dtype, dst_dtype)) return FMM_ERR_UNSUPPORTED;
    const size_t src_item = fmm_dtype_infos[src_dtype].item_nbytes;
    const size_t dst_item = fmm_dtype_infos[dst_dtype].item_nbytes;
    const fmm_status_t status = check_memory(src_item, dst_item, src, dst, nelem);
    if (status || nelem == 0) return status;

    if (src_dtype == dst_dtype) {
        if (src != dst) memcpy(dst, src, nelem * src_item);
        return FMM_OK;
    }
    const int stream = src != dst && nelem * src_item >= FMM_CAST_STREAM_MIN_NBYTES;
    const fmm_cast_fn_t direct = find_direct(table, src_dtype, dst_dtype, stream);
    if (direct) {
        direct(src, dst, nelem);
    } else {
        run_two_steps(find_direct(table, src_dtype, FMM_FLOAT32, 0), find_direct(table, FMM_FLOAT32, dst_dtype, 0),
                      src_item, dst_item, src, dst, nelem);
    }
    return FMM_OK;
}

static void swap_items(const unsigned char *src, unsigned char *dst, size_t nelem, size_t item)
{
    if (item == 2) {
        for (size_t i = 0; i < nelem; i++) {
            uint16_t bits;
            memcpy(&bits, src + 2 * i, 2);
            bits = __builtin_bswap16(bits);
            memcpy(dst + 2 * i, &bits, 2);
        }
    } else if (item == 4) {
        for (size_t i = 0; i < nelem; i++) {
            uint32_t bits;
            memcpy(&bits, src + 4 * i, 4);
            bits = __builtin_bswap32(bits);
            memcpy(dst + 4 * i, &bits, 4);
        }
    } else {
        for (size_t i = 0; i < nelem; i++) {
            uint64_t bits;
            memcpy(&bits, src + 8 * i, 8);
            bits = __builtin_bswap64(bits);
            memcpy(dst + 8 * i, &bits, 8);
        }
    }
}

fmm_status_t fmm_cast_run_swapped(const fmm_cast_table_t *table, int src_dtype, int dst_dtype, const void *src,
                                  void *dst, size_t nelem)
{
    unsigned char native[CHUNK_NELEM * 8];

    if (!fmm_cast_supported(src_dtype, dst_dtype)) return FMM_ERR_UNSUPPORTED;
    const size_t src_item = fmm_dtype_infos[src_dtype].item_nbytes;
    const size_t dst_item = fmm_dtype_infos[dst_dtype].item_nbytes;
    const fmm_status_t status = check_memory(src_item, dst_item, src, dst, nelem);
    if (status) return status;

    for (size_t done = 0; done < nelem; done += CHUNK_NELEM) {
        const size_t count = nelem - done < CHUNK_NELEM ? nelem - done : CHUNK_NELEM;
        swap_items((const unsigned char *)src + done * src_item, native, count, src_item);
        const fmm_status_t chunk_status =
            fmm_cast_run(table, src_dtype, dst_dtype, native, (unsigned char *)dst + done * dst_item, count);
        if (chunk_status) return chunk_status; /* cannot happen: the pair and the memory were checked above */
    }
    return FMM_OK;
}
