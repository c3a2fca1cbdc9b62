#define _GNU_SOURCE /* fallocate */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/arena_parts.h"

enum {
    STEP = 1 << 20,      /* bytes that the system is asked for at once: signals come between */
    MOST_SIGNALS = 1000, /* during one step */
};

fst_code fst_arena_no_memory(fst_status *status, const char *what, int error)
{
    return fst_fail(status, FST_NO_MEMORY, "no shared memory: %s: %s", what, strerror(error));
}

size_t fst_arena_page(void)
{
    const long size = sysconf(_SC_PAGESIZE);
    return size > 0 ? (size_t)size : 4096;
}

void *fst_arena_data(const fst_arena *arena, size_t block)
{
    return (char *)arena->header + arena->header->blocks[block].offset;
}

int fst_arena_allocate(int file, size_t offset, size_t size)
{
    for (size_t done = 0; done < size; done += STEP) {
        const size_t part = size - done < STEP ? size - done : STEP;
        int signals = 0;
        while (fallocate(file, 0, (off_t)(offset + done), (off_t)part))
            if (errno != EINTR || ++signals > MOST_SIGNALS)
                return errno;
    }
    return 0;
}

int fst_arena_punch(const fst_arena *arena, const block_entry *entry)
{
    return fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)entry->offset,
                     (off_t)entry->capacity);
}

void fst_arena_see(fst_arena *arena, size_t block)
{
    const block_entry *entry = &arena->header->blocks[block];
    const uint32_t lives = atomic_load(&entry->lives);
    if (arena->seen[block] == lives)
        return;
    arena->seen[block] = lives;
#ifdef MADV_POPULATE_WRITE /* an older kernel says no, and pages are mapped as they are touched */
    madvise(fst_arena_data(arena, block), entry->capacity, MADV_POPULATE_WRITE);
#endif
}
