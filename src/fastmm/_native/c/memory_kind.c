/* Asks the kernel. A tensor cannot be asked: torch.from_numpy(memmap) forgets where its memory comes from, and even that
 * it was read-only; writing there changes a file, or ends the process. */
#include "fastmm/memory_kind.h"

#ifdef __linux__

#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

/* Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst of Linux). */
#define PAGE_PRESENT (UINT64_C(1) << 63)
#define PAGE_SWAPPED (UINT64_C(1) << 62)
#define PAGE_OF_FILE_OR_SHARED (UINT64_C(1) << 61)

enum answer { PRIVATE, NOT_PRIVATE, UNKNOWN };

/* Opened for each question: a number kept for later may be somebody else's file by then, or another process's after a fork. */
static enum answer ask_pagemap(uintptr_t address, uintptr_t page_nbytes)
{
    uint64_t entry = 0;
    (void)*(volatile const char *)address; /* an untouched page has no entry yet */
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap < 0) return UNKNOWN;
    const ssize_t got = pread(pagemap, &entry, 8, (off_t)(address / page_nbytes * 8));
    close(pagemap);
    if (got != 8) return UNKNOWN;
    if (entry & PAGE_OF_FILE_OR_SHARED) return NOT_PRIVATE;
    return (entry & (PAGE_PRESENT | PAGE_SWAPPED)) ? PRIVATE : UNKNOWN;
}

/* The slow way, for kernels without a pagemap: a mapping with an inode comes from a file. */
static enum answer ask_maps(uintptr_t address)
{
    enum answer answer = UNKNOWN;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL) return UNKNOWN;
    while (answer == UNKNOWN && fgets(line, sizeof line, maps)) {
        uintptr_t start, end;
        unsigned long inode;
        char mode[5];
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %lu", &start, &end, mode, &inode) == 4 &&
            start <= address && address < end)
            answer = (inode == 0 && mode[1] == 'w' && mode[3] == 'p') ? PRIVATE : NOT_PRIVATE;
    }
    fclose(maps);
    return answer;
}

bool fmm_memory_is_private(const void *data, size_t nbytes)
{
    const uintptr_t page_nbytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)data;
    const uintptr_t last = first + (nbytes ? nbytes - 1 : 0);
    for (int end = 0; end < 2; end++) {
        const uintptr_t address = end ? last : first;
        if (end && last / page_nbytes == first / page_nbytes) break;
        enum answer answer = ask_pagemap(address, page_nbytes);
        if (answer == UNKNOWN) answer = ask_maps(address);
        if (answer != PRIVATE) return false;
    }
    return true;
}

#else

/* No such question to ask here; arrays that numpy marks read-only are still never written to. */
bool fmm_memory_is_private(const void *data, size_t nbytes)
{
    (void)data;
    (void)nbytes;
    return true;
}

#endif
