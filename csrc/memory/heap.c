#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise, mremap */
#include "memory/heap.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "memory/spans.h"

enum {
    HUGE_PAGE = 2 << 20, /* addresses become usable by so many bytes at once */
    SLACK = 16 << 20,    /* bytes that blocks and kept memory may have above the peak */
    SLACK_SHARE = 16,    /* and a 16th of the peak */
    PAGES_PER_HUGE = FST_SPAN_HUGE,
    MOST_HOLES = 8192, /* of 65530 mappings that a process may have */
};

_Static_assert(PAGES_PER_HUGE == HUGE_PAGE / FST_HEAP_PAGE, "a huge page has 2 MiB");

#ifndef MAP_FIXED_NOREPLACE /* older kernels take the address as a hint */
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static struct {
    pthread_mutex_t lock;
    fst_spans spans;
    _Atomic(char *) start; /* NULL: not open */
    char *end;
    uint32_t top, usable, noted, pages; /* pages: never used from, mapped, with notes, in all */
    size_t limit, hold;
    fst_heap_counts counts;
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER, .limit = SIZE_MAX, .hold = SIZE_MAX};

static size_t bytes_of(uint32_t pages)
{
    return (size_t)pages * FST_HEAP_PAGE;
}

static void *map(void *at, size_t bytes, int access, int flags)
{
    void *got = mmap(at, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return got == MAP_FAILED ? NULL : got;
}

static int open_heap(size_t bytes)
{
    const size_t pages = bytes / FST_HEAP_PAGE;
    if (pages < PAGES_PER_HUGE || pages > UINT32_MAX - PAGES_PER_HUGE)
        return EINVAL;
    const size_t range = bytes + HUGE_PAGE;
    char *got = map(NULL, 2 * range, PROT_NONE, MAP_NORESERVE);
    if (!got)
        return ENOMEM;
    /* Nothing stays mapped, so that no limit counts it. The kernel gives others the upper half
     * first. */
    munmap(got, 2 * range);
    heap.spans.at = map(NULL, PAGES_PER_HUGE * sizeof(fst_span), PROT_READ | PROT_WRITE, 0);
    if (!heap.spans.at)
        return ENOMEM;
    heap.noted = PAGES_PER_HUGE;
    char *start = got + (HUGE_PAGE - (uintptr_t)got % HUGE_PAGE) % HUGE_PAGE;
    heap.pages = (uint32_t)pages;
    heap.end = start + bytes_of(heap.pages);
    heap.top = heap.usable = 0;
    atomic_store(&heap.start, start);
    return 0;
}

int fst_heap_open(size_t bytes)
{
    pthread_mutex_lock(&heap.lock);
    const int error = atomic_load(&heap.start) ? 0 : open_heap(bytes);
    pthread_mutex_unlock(&heap.lock);
    return error;
}

static char *address_of(uint32_t page)
{
    return atomic_load_explicit(&heap.start, memory_order_relaxed) + bytes_of(page);
}

bool fst_heap_owns(const void *address)
{
    const char *start = atomic_load_explicit(&heap.start, memory_order_acquire);
    return start && (const char *)address >= start && (const char *)address < heap.end;
}

/* Opens pages whose memory the system has. Returns whether it lends them. */
static bool open_pages(uint32_t page, uint32_t pages)
{
    if (mprotect(address_of(page), bytes_of(pages), PROT_READ | PROT_WRITE))
        return false;
#ifdef MADV_HUGEPAGE
    madvise(address_of(page), bytes_of(pages), MADV_HUGEPAGE);
#endif
    return true;
}

/* Gives the memory of pages below the top back. Mapped anew they count against no limit of data;
 * mprotect() alone would leave them counted. */
static void close_pages(uint32_t page, uint32_t pages)
{
    if (heap.spans.count[FST_SPAN_CLEAN] >= MOST_HOLES ||
        !map(address_of(page), bytes_of(pages), PROT_NONE, MAP_FIXED))
        madvise(address_of(page), bytes_of(pages), MADV_DONTNEED);
}

/* Adds free pages to their neighbours of the same kind. Returns the first page of all. */
static uint32_t add_free(uint32_t page, uint32_t pages, fst_span_kind kind)
{
    const fst_span before = page ? heap.spans.at[page - 1] : (fst_span){0};
    if (before.kind == kind) {
        page -= before.pages;
        pages += before.pages;
        fst_spans_remove(&heap.spans, page);
    }
    const uint32_t next = page + pages;
    if (next < heap.top && heap.spans.at[next].kind == kind) {
        pages += heap.spans.at[next].pages;
        fst_spans_remove(&heap.spans, next);
    }
    if (kind == FST_SPAN_CLEAN && page + pages == heap.top) {
        munmap(address_of(page), bytes_of(heap.usable - page));
        heap.top = heap.usable = page;
    } else {
        fst_spans_add(&heap.spans, page, pages, kind);
    }
    return page;
}

/* Keeps the memory of a block that was freed. The kernel may take it when it is short of memory:
 * the huge pages that the block, or a part of it, makes wholly free, as less would split them; and
 * the rest of the block too, once as much is loose as may be held. */
static void keep(uint32_t page, uint32_t pages)
{
    const uint32_t huge = PAGES_PER_HUGE, first = add_free(page, pages, FST_SPAN_KEPT);
    const uint32_t end = first + heap.spans.at[first].pages;
    const uint32_t whole = (first + huge - 1) / huge, begun = page / huge;
    const uint32_t whole_end = end / huge, begun_end = (page + pages + huge - 1) / huge;
    uint32_t from = (whole > begun ? whole : begun) * huge;
    uint32_t to = (whole_end < begun_end ? whole_end : begun_end) * huge;
    if (heap.spans.loose > heap.hold / FST_HEAP_PAGE) {
        const bool none = from >= to;
        from = none || page < from ? page : from;
        to = none || page + pages > to ? page + pages : to;
    }
#ifdef MADV_FREE
    if (from < to)
        madvise(address_of(from), bytes_of(to - from), MADV_FREE);
#endif
}

/* Gives back the end of the span that is kept longest, at most `most` bytes and a page. */
static size_t give_back_oldest(size_t most)
{
    const uint32_t first = heap.spans.oldest, pages = heap.spans.at[first].pages;
    const uint32_t wanted = (uint32_t)((most + FST_HEAP_PAGE - 1) / FST_HEAP_PAGE);
    const uint32_t part = wanted < pages ? wanted : pages;
    const uint32_t page = first + pages - part;
    fst_spans_remove(&heap.spans, first);
    if (part < pages)
        fst_spans_add(&heap.spans, first, pages - part, FST_SPAN_KEPT);
    close_pages(page, part);
    add_free(page, part, FST_SPAN_CLEAN);
    heap.counts.kept -= bytes_of(part);
    return bytes_of(part);
}

static size_t trim(size_t bytes)
{
    size_t gone = 0;
    while (heap.counts.kept > bytes)
        gone += give_back_oldest(heap.counts.kept - bytes);
    return gone;
}

/* Before a block takes fresh memory, and `shared` bytes of what is kept: blocks and what is kept
 * stay near the peak of the blocks. */
static void make_room(uint32_t pages, uint32_t shared)
{
    const size_t used = heap.counts.used + bytes_of(pages);
    const size_t peak = used > heap.counts.peak ? used : heap.counts.peak;
    trim(peak + peak / SLACK_SHARE + SLACK - used + bytes_of(shared));
}

/* The pages of the kept span below the top; 0 if none lies there. */
static uint32_t kept_below_top(void)
{
    const fst_span *below = &heap.spans.at[heap.top - 1];
    return below->kind == FST_SPAN_KEPT ? below->pages : 0;
}

/* Makes room for the notes of pages below this one. */
static bool note_up_to(uint32_t page)
{
    if (page <= heap.noted)
        return true;
    const uint32_t wanted = page / 2 < heap.noted ? 2 * heap.noted : page;
    const size_t size = sizeof(fst_span);
    void *at = mremap(heap.spans.at, heap.noted * size, wanted * size, MREMAP_MAYMOVE);
    if (at == MAP_FAILED)
        return false;
    heap.spans.at = at;
    heap.noted = wanted;
    return true;
}

/* Maps addresses above the top, where nobody else has mapped any meanwhile. */
static bool reach(uint32_t page)
{
    if (page <= heap.usable)
        return true;
    const uint32_t rounded = (page + PAGES_PER_HUGE - 1) / PAGES_PER_HUGE * PAGES_PER_HUGE;
    const uint32_t up_to = rounded < heap.pages ? rounded : heap.pages;
    if (page > heap.pages || !note_up_to(up_to))
        return false;
    char *at = address_of(heap.usable);
    const size_t bytes = bytes_of(up_to - heap.usable);
    char *got = map(at, bytes, PROT_NONE, MAP_FIXED_NOREPLACE);
    if (got != at || !open_pages(heap.usable, up_to - heap.usable)) {
        if (got)
            munmap(got, bytes);
        return false;
    }
    heap.usable = up_to;
    return true;
}

/* The first page of a block in the span, whose rest remains free. */
static uint32_t take_from(uint32_t page, uint32_t pages, fst_span_kind kind)
{
    const uint32_t has = heap.spans.at[page].pages;
    fst_spans_remove(&heap.spans, page);
    if (has > pages)
        fst_spans_add(&heap.spans, page + pages, has - pages, kind);
    if (kind == FST_SPAN_KEPT)
        heap.counts.kept -= bytes_of(pages);
    else
        heap.counts.fresh += bytes_of(pages);
    return page;
}

/* The first page of a block that ends above the top, and begins in the kept span below it, if one
 * lies there; 0 if there are no addresses or no memory left. */
static uint32_t take_from_top(uint32_t pages)
{
    if (!heap.top)
        heap.top = 1;
    make_room(pages, kept_below_top());
    const uint32_t shared = kept_below_top(), page = heap.top - shared;
    if (shared >= pages) /* one of so many that the search gave up */
        return take_from(page, pages, FST_SPAN_KEPT);
    if (pages > heap.pages - page || !reach(page + pages))
        return 0;
    if (shared)
        fst_spans_remove(&heap.spans, page);
    heap.counts.kept -= bytes_of(shared);
    heap.counts.fresh += bytes_of(pages - shared);
    heap.top = page + pages;
    return page;
}

static uint32_t take(uint32_t pages)
{
    uint32_t page = fst_spans_find(&heap.spans, pages, FST_SPAN_KEPT);
    if (page)
        return take_from(page, pages, FST_SPAN_KEPT);
    if (fst_spans_find(&heap.spans, pages, FST_SPAN_CLEAN)) {
        make_room(pages, 0); /* may enlarge a span, and lower the top */
        page = fst_spans_find(&heap.spans, pages, FST_SPAN_CLEAN);
        if (page)
            return open_pages(page, pages) ? take_from(page, pages, FST_SPAN_CLEAN) : 0;
    }
    return take_from_top(pages);
}

void *fst_heap_take(size_t size)
{
    const size_t wanted = size / FST_HEAP_PAGE + (size % FST_HEAP_PAGE != 0);
    uint32_t page = 0;
    pthread_mutex_lock(&heap.lock);
    if (wanted && wanted < heap.pages) {
        const uint32_t pages = (uint32_t)wanted;
        page = take(pages);
        if (!page && trim(0)) /* the system may have memory now */
            page = take(pages);
    }
    if (page) {
        fst_spans_add(&heap.spans, page, (uint32_t)wanted, FST_SPAN_USED);
        heap.counts.blocks++;
        heap.counts.used += bytes_of((uint32_t)wanted);
        if (heap.counts.used > heap.counts.peak)
            heap.counts.peak = heap.counts.used;
    }
    pthread_mutex_unlock(&heap.lock);
    return page ? address_of(page) : NULL;
}

/* The page where a used span begins at this address; 0 if none does. */
static uint32_t block_at(const void *address)
{
    if (!fst_heap_owns(address))
        return 0;
    const size_t offset = (size_t)((const char *)address - address_of(0));
    const uint32_t page = (uint32_t)(offset / FST_HEAP_PAGE);
    if (offset % FST_HEAP_PAGE || page >= heap.top)
        return 0;
    const fst_span *span = &heap.spans.at[page];
    return span->kind == FST_SPAN_USED ? page : 0;
}

size_t fst_heap_give(void *block)
{
    pthread_mutex_lock(&heap.lock);
    const uint32_t page = block_at(block), pages = page ? heap.spans.at[page].pages : 0;
    if (page) {
        fst_spans_remove(&heap.spans, page);
        keep(page, pages);
        heap.counts.blocks--;
        heap.counts.used -= bytes_of(pages);
        heap.counts.kept += bytes_of(pages);
        trim(heap.limit);
    }
    pthread_mutex_unlock(&heap.lock);
    return bytes_of(pages);
}

size_t fst_heap_limit(size_t bytes)
{
    pthread_mutex_lock(&heap.lock);
    heap.limit = bytes;
    const size_t gone = trim(bytes);
    pthread_mutex_unlock(&heap.lock);
    return gone;
}

void fst_heap_hold(size_t bytes)
{
    pthread_mutex_lock(&heap.lock);
    heap.hold = bytes;
    pthread_mutex_unlock(&heap.lock);
}

size_t fst_heap_trim(size_t bytes)
{
    pthread_mutex_lock(&heap.lock);
    const size_t gone = trim(bytes);
    pthread_mutex_unlock(&heap.lock);
    return gone;
}

fst_heap_counts fst_heap_count(void)
{
    pthread_mutex_lock(&heap.lock);
    const fst_heap_counts counts = heap.counts;
    pthread_mutex_unlock(&heap.lock);
    return counts;
}

void fst_heap_before_fork(void)
{
    pthread_mutex_lock(&heap.lock);
}

void fst_heap_after_fork(bool in_child)
{
    if (in_child)
        trim(0);
    pthread_mutex_unlock(&heap.lock);
}
