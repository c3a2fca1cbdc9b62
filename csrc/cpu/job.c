#include "cpu/job.h"

#include "cpu/parallel.h"

/* The cost of the smallest share worth a thread, some 0.2 ms. Waking a thread takes microseconds,
 * but waiting for one takes milliseconds where other programs keep the cores busy. */
enum { GRAIN = 1 << 18, MOST_SHARES = 256 };

/* Chunks of a strip. A backward pass takes the strips from last to first, and each strip's
 * chunks from first to last: it meets early what the measuring pass read last, and the
 * hardware's prefetchers still work from chunk to chunk. */
enum { STRIP = 32 };

/* The direction of the last pass over gradients. The next one goes the other way, as what was
 * touched last is still in the cache. The first one after an update goes forwards, as backward
 * made the first parameters' gradients last. Only speed depends on it. */
typedef enum { NO_PASS, FORWARDS, BACKWARDS } direction;
static direction last_direction;

/* Chunks of at most FETCH_MOST elements are prefetched, so many chunks ahead. */
enum { FETCH_AHEAD = 8, FETCH_MOST = 256 };

/* A share of a round. Its thread takes strips of chunks from one end; threads that have finished
 * their own shares take strips from the other end. */
typedef struct {
    size_t first, last; /* chunks */
    uint64_t left;      /* strips: from the low half to before the high half */
} share;

/* The shares of a round. */
typedef struct {
    const fst_job *job;
    int backwards;
    size_t count;
    share shares[MOST_SHARES];
} shares;

/* Whether a pass runs backwards. */
static int turn(fst_direction wanted)
{
    if (wanted == FST_FORWARDS)
        return 0;
    const direction last = __atomic_load_n(&last_direction, __ATOMIC_RELAXED);
    const int backwards = wanted == FST_TURNS ? last == FORWARDS : last != BACKWARDS;
    const direction now = wanted == FST_TURNS_LAST ? NO_PASS : backwards ? BACKWARDS : FORWARDS;
    __atomic_store_n(&last_direction, now, __ATOMIC_RELAXED);
    return backwards;
}

/* The first chunk from `low` to before `high` whose cost begins at `cost` or later. */
static size_t chunk_at(const fst_work *work, size_t low, size_t high, uint64_t cost)
{
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (work->chunks[middle].cost < cost)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Prefetches a small chunk: small tensors lie anywhere, and each ends before a hardware
 * prefetcher could follow it. */
static void fetch(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    const fst_operand *ops = fst_job_operands(job, index);
    if (chunk->count > FETCH_MOST)
        return;
    for (unsigned k = 0; k < job->operand_count; k++) {
        if (!ops[k].data || ops[k].layout)
            continue;
        const size_t size = fst_dtype_size(ops[k].dtype);
        const char *from = (const char *)ops[k].data + (size_t)chunk->begin * size;
        for (size_t at = 0; at < chunk->count * size; at += 64)
            __builtin_prefetch(from + at);
    }
}

/* The chunk of a share that comes after `done` others. */
static size_t chunk_after(const share *p, size_t done, int backwards)
{
    if (!backwards)
        return p->first + done;
    const size_t in_strip = done % STRIP, left = p->last - p->first - (done - in_strip);
    return p->first + left - (left < STRIP ? left : STRIP) + in_strip;
}

/* Takes a strip from the front or the end of what is left; 0 if nothing is. */
static int take(share *p, int from_end, size_t *strip)
{
    uint64_t left = __atomic_load_n(&p->left, __ATOMIC_RELAXED), rest;
    do {
        const uint64_t begin = left & UINT32_MAX, end = left >> 32;
        if (begin >= end)
            return 0;
        *strip = (size_t)(from_end ? end - 1 : begin);
        rest = from_end ? begin | (end - 1) << 32 : (begin + 1) | end << 32;
    } while (
        !__atomic_compare_exchange_n(&p->left, &left, rest, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

static void run_strips(const shares *all, share *p, int from_end)
{
    const fst_job *job = all->job;
    const int backwards = all->backwards;
    const size_t count = p->last - p->first;
    for (size_t strip; take(p, from_end, &strip);) {
        const size_t end = (strip + 1) * STRIP < count ? (strip + 1) * STRIP : count;
        for (size_t done = strip * STRIP; done < end; done++) {
            if (done + FETCH_AHEAD < count)
                fetch(job, chunk_after(p, done + FETCH_AHEAD, backwards));
            job->chunk(job, chunk_after(p, done, backwards));
        }
    }
}

static share *share_at(shares *all, size_t place)
{
    return &all->shares[all->backwards ? all->count - 1 - place : place];
}

/* A thread's own shares, and then what is left of the others'. */
static void run_shares(int64_t begin, int64_t end, void *context)
{
    shares *all = context;
    for (int64_t i = begin; i < end; i++)
        run_strips(all, share_at(all, (size_t)i), 0);
    for (size_t i = all->count; i-- > 0;)
        run_strips(all, share_at(all, i), 1);
}

/* Cuts a round into shares of equal cost. */
static void cut(const fst_work *work, size_t round, shares *all)
{
    const size_t first = work->rounds[round], last = work->rounds[round + 1];
    const uint64_t begin = work->chunks[first].cost, cost = work->chunks[last].cost - begin;
    const uint64_t wanted = (cost + GRAIN - 1) / GRAIN;
    all->count = wanted < 1 ? 1 : wanted < MOST_SHARES ? (size_t)wanted : MOST_SHARES;
    for (size_t i = 0; i < all->count; i++) {
        share *p = &all->shares[i];
        const uint64_t end = begin + cost / all->count * (uint64_t)(i + 1);
        p->first = i ? p[-1].last : first;
        p->last = i + 1 < all->count ? chunk_at(work, p->first, last, end) : last;
        p->left = (uint64_t)((p->last - p->first + STRIP - 1) / STRIP) << 32;
    }
}

fst_code fst_job_run(const fst_job *job, fst_status *status)
{
    shares all;
    all.job = job;
    all.backwards = turn(job->direction);
    for (size_t round = 0; round < job->work->round_count; round++) {
        cut(job->work, round, &all);
        const fst_code code = fst_parallel_for((int64_t)all.count, 1, run_shares, &all, status);
        if (code)
            return code;
    }
    return FST_OK;
}
