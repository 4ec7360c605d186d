/* Whether memory may be written without anybody else noticing. */
#ifndef FASTMM_MEMORY_KIND_H
#define FASTMM_MEMORY_KIND_H

#include <stdbool.h>
#include <stddef.h>

/* False when the first or the last page of the range is mapped from a file or shared with another process; also when the
 * kernel will not say. Reads one byte of each page, so that it is mapped. */
bool fmm_memory_is_private(const void *data, size_t nbytes);

#endif
