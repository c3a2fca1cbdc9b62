#define _GNU_SOURCE /* memfd_create, fallocate */
#include "io/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    PAGE = 4096,
    STEP = 1 << 20,      /* bytes that the system is asked for at once: signals come between */
    MOST_SIGNALS = 1000, /* during one step */
    SLACK = 1 << 20,     /* bytes that may always be free */
    WASTE = 4,           /* a block may be so many times as large as what is in it */
};

#define LEAST_RESERVE ((size_t)1 << 26)

/* Who owns a block. Only its owner moves it on; FREE and GONE belong to who takes them first. */
typedef enum { UNMADE, FREE, GONE, TAKEN, HELD } block_state;

/* In a worker: whether a tensor is over a block that it took. */
enum { NO_LOAN, LENT, LEAVING };

typedef struct {
    _Atomic uint32_t state;
    _Atomic uint32_t lives; /* how often its memory came from the system */
    size_t offset, capacity;
    uint64_t used; /* when it was taken last */
    char rest[32];
} block_entry;

/* The beginning of the file; zeros at first. */
typedef struct {
    _Atomic size_t made, end, free_bytes, taken_bytes, most_taken;
    _Atomic uint64_t clock;
    char rest[16];
    block_entry blocks[FST_ARENA_BLOCKS];
} arena_header;

struct fst_arena {
    arena_header *header; /* where the file is mapped */
    int file;
    size_t reserve;
    _Atomic size_t references;
    /* of this process: */
    _Atomic uint32_t uses[FST_ARENA_BLOCKS]; /* exports and pins of held blocks */
    _Atomic uint32_t loans[FST_ARENA_BLOCKS];
    uint32_t seen[FST_ARENA_BLOCKS]; /* the life whose pages are mapped here */
};

static size_t round_up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

static fst_code no_memory(fst_status *status, const char *what, int error)
{
    return fst_fail(status, FST_NO_MEMORY, "no shared memory: %s: %s", what, strerror(error));
}

/* Memory for a part of the file; else using it would be a bus error. Returns an errno. */
static int allocate(int file, size_t offset, size_t size)
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

/* Address space, not memory: twice what the machine has, or less where that is limited. */
static size_t wanted_reserve(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t reserve = LEAST_RESERVE;
    while (pages > 0 && page > 0 && reserve / 2 < (size_t)pages * (size_t)page)
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
        error = arena->file < 0 ? errno : allocate(arena->file, 0, sizeof(arena_header));
        arena->reserve = wanted_reserve();
        while (!error && map(arena))
            if ((arena->reserve /= 2) < LEAST_RESERVE)
                error = errno;
    }
    if (error) {
        no_memory(status, "no arena for batches", error);
        if (arena && arena->file >= 0)
            close(arena->file);
        free(arena);
        return NULL;
    }
    atomic_init(&arena->references, 1);
    atomic_init(&arena->header->end, round_up(sizeof(arena_header), PAGE));
    return arena;
}

fst_arena *fst_arena_attach(int file, size_t reserve, fst_status *status)
{
    fst_arena *arena = calloc(1, sizeof *arena);
    if (arena) {
        *arena = (fst_arena){.file = file, .reserve = reserve};
        atomic_init(&arena->references, 1);
    }
    if (!arena || reserve < sizeof(arena_header) || map(arena)) {
        no_memory(status, "the arena of the main process cannot be mapped", errno);
        free(arena);
        return NULL;
    }
    return arena;
}

void fst_arena_keep(fst_arena *arena)
{
    atomic_fetch_add(&arena->references, 1);
}

void fst_arena_drop(fst_arena *arena)
{
    if (atomic_fetch_sub(&arena->references, 1) > 1)
        return;
    munmap(arena->header, arena->reserve);
    close(arena->file);
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

void *fst_arena_data(const fst_arena *arena, size_t block)
{
    return (char *)arena->header + arena->header->blocks[block].offset;
}

size_t fst_arena_made(const fst_arena *arena)
{
    return atomic_load(&arena->header->made);
}

/* How many bytes may be free: as many as two sets of batches on their way need. */
static size_t free_limit(const arena_header *header)
{
    return 2 * atomic_load(&header->most_taken) + SLACK;
}

static void set_state(block_entry *entry, block_state state)
{
    atomic_store(&entry->state, (uint32_t)state);
}

static int move(block_entry *entry, block_state from, block_state to)
{
    uint32_t expected = (uint32_t)from;
    return atomic_compare_exchange_strong(&entry->state, &expected, (uint32_t)to);
}

/* Gives the memory of a block back, not its place in the file. */
static int punch(const fst_arena *arena, const block_entry *entry)
{
    return fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)entry->offset,
                     (off_t)entry->capacity);
}

/* Lets the owner of a block free it, or give its memory back where enough is free. */
static void set_free(fst_arena *arena, block_entry *entry)
{
    arena_header *header = arena->header;
    const size_t capacity = entry->capacity;
    const int surplus = atomic_load(&header->free_bytes) + capacity > free_limit(header);
    if (surplus && !punch(arena, entry)) {
        set_state(entry, GONE);
        return;
    }
    atomic_fetch_add(&header->free_bytes, capacity);
    set_state(entry, FREE);
}

static void count_taken(arena_header *header, size_t capacity)
{
    const size_t taken = atomic_fetch_add(&header->taken_bytes, capacity) + capacity;
    size_t most = atomic_load(&header->most_taken);
    while (taken > most && !atomic_compare_exchange_weak(&header->most_taken, &most, taken))
        ;
}

/* The counts are advice: after a kill they may be off, and must not wrap. */
static void count_down(_Atomic size_t *count, size_t amount)
{
    size_t now = atomic_load(count);
    while (!atomic_compare_exchange_weak(count, &now, now > amount ? now - amount : 0))
        ;
}

/* Maps a block's pages into this process with one call, not one fault per page. */
static void see(fst_arena *arena, size_t block)
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

/* Of two that fit the smaller; of equals one whose memory is there, and best in this process. */
static int is_better(const fst_arena *arena, size_t block, size_t than)
{
    const block_entry *one = &arena->header->blocks[block], *other = &arena->header->blocks[than];
    if (one->capacity != other->capacity)
        return one->capacity < other->capacity;
    const int gone = atomic_load(&one->state) == GONE, also = atomic_load(&other->state) == GONE;
    if (gone != also)
        return also;
    return arena->seen[block] == atomic_load(&one->lives) &&
           arena->seen[than] != atomic_load(&other->lives);
}

/* Takes the best block that nobody has, or none. A block that is GONE has no memory yet. */
static block_entry *take_made(fst_arena *arena, size_t size, block_state *was)
{
    arena_header *header = arena->header;
    for (;;) {
        const size_t made = atomic_load(&header->made);
        size_t best = made;
        for (size_t b = 0; b < made; b++) {
            const block_entry *entry = &header->blocks[b];
            const uint32_t state = atomic_load(&entry->state);
            if ((state == FREE || state == GONE) && entry->capacity >= size &&
                entry->capacity / WASTE <= round_up(size, PAGE) &&
                (best == made || is_better(arena, b, best)))
                best = b;
        }
        if (best == made)
            return NULL;
        block_entry *entry = &header->blocks[best];
        *was = FREE;
        if (move(entry, FREE, TAKEN))
            return entry;
        *was = GONE;
        if (move(entry, GONE, TAKEN))
            return entry;
    }
}

/* Gives memory of free blocks back, the one used longest ago first, until `size` bytes more are no
 * surplus. */
static void make_room(fst_arena *arena, size_t size)
{
    arena_header *header = arena->header;
    while (atomic_load(&header->free_bytes) + size > free_limit(header)) {
        const size_t made = atomic_load(&header->made);
        block_entry *oldest = NULL;
        for (size_t b = 0; b < made; b++) {
            block_entry *entry = &header->blocks[b];
            if (atomic_load(&entry->state) == FREE && (!oldest || entry->used < oldest->used))
                oldest = entry;
        }
        if (!oldest)
            return;
        if (!move(oldest, FREE, TAKEN))
            continue;
        count_down(&header->free_bytes, oldest->capacity);
        punch(arena, oldest);
        set_state(oldest, GONE);
    }
}

/* Sizes are rounded up by at most an eighth, so that other sizes find a use for the block. */
static size_t capacity_for(size_t size)
{
    size_t unit = PAGE;
    while (unit * 16 <= size)
        unit *= 2;
    return round_up(size ? size : 1, unit);
}

/* A place in the file, without memory. */
static block_entry *make(fst_arena *arena, size_t size, fst_status *status)
{
    arena_header *header = arena->header;
    const size_t capacity = capacity_for(size);
    size_t made = atomic_load(&header->made), end = atomic_load(&header->end);
    do {
        if (made >= FST_ARENA_BLOCKS) {
            fst_fail(status, FST_NO_MEMORY, "%d tensors are kept already", FST_ARENA_BLOCKS);
            return NULL;
        }
    } while (!atomic_compare_exchange_weak(&header->made, &made, made + 1));
    do {
        if (size > arena->reserve || capacity > arena->reserve - end) {
            fst_fail(status, FST_NO_MEMORY, "no addresses left for %zu bytes of a batch", size);
            return NULL;
        }
    } while (!atomic_compare_exchange_weak(&header->end, &end, end + capacity));
    block_entry *entry = &header->blocks[made];
    entry->offset = end;
    entry->capacity = capacity;
    set_state(entry, TAKEN);
    return entry;
}

fst_code fst_arena_take(fst_arena *arena, size_t size, size_t *block, fst_status *status)
{
    arena_header *header = arena->header;
    block_state was = GONE;
    block_entry *entry = take_made(arena, size, &was);
    if (!entry) {
        make_room(arena, size);
        entry = make(arena, size, status);
    }
    if (!entry)
        return status->code;
    if (was == FREE) {
        count_down(&header->free_bytes, entry->capacity);
    } else {
        const int error = allocate(arena->file, entry->offset, entry->capacity);
        if (error) {
            punch(arena, entry); /* a part of it may be there */
            set_state(entry, GONE);
            return no_memory(status, "a batch", error);
        }
        atomic_fetch_add(&entry->lives, 1);
    }
    entry->used = atomic_fetch_add(&header->clock, 1);
    count_taken(header, entry->capacity);
    *block = (size_t)(entry - header->blocks);
    see(arena, *block);
    return FST_OK;
}

void fst_arena_give_back(fst_arena *arena, size_t block)
{
    block_entry *entry = &arena->header->blocks[block];
    count_down(&arena->header->taken_bytes, entry->capacity);
    set_free(arena, entry);
}

void fst_arena_lend(fst_arena *arena, size_t block)
{
    atomic_store(&arena->loans[block], LENT);
}

void fst_arena_end_loan(fst_arena *arena, size_t block)
{
    if (atomic_exchange(&arena->loans[block], NO_LOAN) == LENT)
        fst_arena_give_back(arena, block);
}

void fst_arena_send(fst_arena *arena, size_t block)
{
    atomic_store(&arena->loans[block], LEAVING);
}

int fst_arena_sent(fst_arena *arena, size_t block)
{
    uint32_t leaving = LEAVING;
    return !atomic_compare_exchange_strong(&arena->loans[block], &leaving, LENT);
}

fst_code fst_arena_hold(fst_arena *arena, size_t block, size_t size, fst_status *status)
{
    if (block >= fst_arena_made(arena) || size > arena->header->blocks[block].capacity ||
        !move(&arena->header->blocks[block], TAKEN, HELD))
        return fst_fail(status, FST_BAD_VALUE, "no worker filled %zu bytes of block %zu", size,
                        block);
    count_down(&arena->header->taken_bytes, arena->header->blocks[block].capacity);
    atomic_store(&arena->uses[block], 1);
    see(arena, block);
    return FST_OK;
}

void fst_arena_release(fst_arena *arena, size_t block)
{
    if (atomic_fetch_sub(&arena->uses[block], 1) == 1)
        set_free(arena, &arena->header->blocks[block]);
}

int fst_arena_pin(fst_arena *arena, size_t block)
{
    uint32_t uses = atomic_load(&arena->uses[block]);
    while (uses && !atomic_compare_exchange_weak(&arena->uses[block], &uses, uses + 1))
        ;
    return uses > 0;
}

size_t fst_arena_sweep(fst_arena *arena)
{
    const size_t made = fst_arena_made(arena);
    size_t found = 0;
    for (size_t b = 0; b < made; b++) {
        block_entry *entry = &arena->header->blocks[b];
        if (atomic_load(&entry->state) != TAKEN)
            continue;
        found++;
        fst_arena_give_back(arena, b);
    }
    return found;
}

fst_arena_counts fst_arena_counted(const fst_arena *arena)
{
    fst_arena_counts counts = {.made = fst_arena_made(arena)};
    for (size_t b = 0; b < counts.made; b++) {
        const block_entry *entry = &arena->header->blocks[b];
        const uint32_t state = atomic_load(&entry->state);
        counts.free += state == FREE;
        counts.taken += state == TAKEN;
        counts.held += state == HELD;
        counts.gone += state == GONE;
        counts.backed += state == GONE || state == UNMADE ? 0 : entry->capacity;
    }
    return counts;
}

void fst_keep_freed_memory(void)
{
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
}
