#define _GNU_SOURCE /* memfd_create, fallocate */

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/arena_parts.h"

#define LEAST_RESERVE ((size_t)1 << 26)

/* The size of the address space: twice the machine's memory; where the process has a limit of
 * addresses a sixteenth of them, as the script needs some too. */
static size_t wanted_reserve(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t memory = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    size_t reserve = LEAST_RESERVE;
    struct rlimit limit;
    if (!getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur / 32 < memory)
        memory = limit.rlim_cur / 32; /* RLIM_INFINITY is larger than any */
    while (reserve / 2 < memory)
        reserve *= 2;
    return reserve;
}

static int map(fst_arena *arena)
{
    void *at = mmap(NULL, arena->reserve, PROT_READ | PROT_WRITE, MAP_SHARED, arena->file, 0);
    arena->header = at == MAP_FAILED ? NULL : at;
    return at == MAP_FAILED ? -1 : 0;
}

fst_arena *fst_arena_new(fst_status *status)
{
    fst_arena *arena = calloc(1, sizeof *arena);
    int error = ENOMEM;
    if (arena) {
        arena->file = memfd_create("faststep", MFD_CLOEXEC);
        error = arena->file < 0 ? errno : fst_arena_allocate(arena->file, 0, sizeof(arena_header));
        arena->reserve = wanted_reserve();
        while (!error && map(arena))
            if ((arena->reserve /= 2) < LEAST_RESERVE)
                error = errno;
    }
    if (error) {
        fst_arena_no_memory(status, "no arena for batches", error);
        if (arena && arena->file >= 0)
            close(arena->file);
        free(arena);
        return NULL;
    }
    atomic_init(&arena->references, 1);
    pthread_mutex_init(&arena->locking, NULL);
    atomic_init(&arena->header->end, round_up(sizeof(arena_header), fst_arena_page()));
    return arena;
}

fst_arena *fst_arena_attach(int file, size_t reserve, fst_status *status)
{
    fst_arena *arena = calloc(1, sizeof *arena);
    struct stat found = {0};
    int error = ENOMEM;
    if (arena) {
        *arena = (fst_arena){.file = file, .reserve = reserve};
        atomic_init(&arena->references, 1);
        pthread_mutex_init(&arena->locking, NULL);
        error = fstat(file, &found) ? errno : 0;
        if (!error &&
            (reserve < sizeof(arena_header) || found.st_size < (off_t)sizeof(arena_header)))
            error = EINVAL;
        if (!error && map(arena))
            error = errno;
    }
    if (!error)
        return arena;
    fst_arena_no_memory(status, "the arena of the main process cannot be mapped", error);
    if (file >= 0)
        close(file);
    free(arena);
    return NULL;
}

void fst_arena_keep(fst_arena *arena)
{
    atomic_fetch_add(&arena->references, 1);
}

void fst_arena_drop(fst_arena *arena)
{
    if (atomic_fetch_sub(&arena->references, 1) > 1)
        return;
    fst_arena_unlock(arena);
    munmap(arena->header, arena->reserve);
    close(arena->file);
    pthread_mutex_destroy(&arena->locking);
    free(arena);
}

int fst_arena_file(const fst_arena *arena)
{
    return arena->file;
}

size_t fst_arena_reserve(const fst_arena *arena)
{
    return arena->reserve;
}

void fst_keep_freed_memory(void)
{
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
}
