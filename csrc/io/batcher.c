#define _GNU_SOURCE /* pthread_setname_np */
#include "io/batcher.h"

#include <stdlib.h>
#include <string.h>

#include "base/stream.h"
#include "base/threads.h"
#include "io/clock.h"

enum {
    PIECE_BYTES = 1 << 17, /* piece of a batch: bytes that a thread fills at a time */
    WAKE_BYTES = 1 << 18,  /* waking a thread costs as much as copying so many bytes */
    SLOW_NS = 50000, /* rows that took this much longer than 1 ns per byte were waited for, as those
                        of a file */
    SLOW_BATCHES = 64, /* after such rows, so many small batches are filled by the threads */
};

struct fst_batch {
    size_t rows, taken, done; /* rows in all, taken by some thread, and filled */
    int waits;                /* is in the queue of the threads */
    int placed;               /* memory was found for it */
    fst_batch *older, *newer; /* in that queue */
    fst_place *places;
    char **outputs;
    fst_slot *slots[]; /* one per field */
};

struct fst_batcher {
    const fst_table *table;
    fst_slots *pool;
    unsigned forks;
    int may_wait;
    unsigned slow;           /* small batches to come that the threads fill too */
    size_t piece, row_bytes; /* rows; bytes */
    unsigned wanted, started;
    pthread_t *threads;
    pthread_mutex_t lock; /* for what follows */
    pthread_cond_t work, finished;
    fst_batch *oldest, *newest; /* batches for the threads with rows that nobody has taken */
    int closing;
};

static fst_code wrong_process(fst_status *status)
{
    return fst_fail(status, FST_UNSUPPORTED,
                    "the threads of this iterator stayed in the process that was forked");
}

static void init_conditions(fst_batcher *batcher)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&batcher->lock, NULL);
    pthread_cond_init(&batcher->work, NULL);
    pthread_cond_init(&batcher->finished, &clock);
    pthread_condattr_destroy(&clock);
}

fst_batcher *fst_batcher_new(const fst_table *table, fst_slots *pool, unsigned threads,
                             int may_wait, fst_status *status)
{
    fst_batcher *batcher = calloc(1, sizeof *batcher);
    pthread_t *handles = calloc(threads ? threads : 1, sizeof *handles);
    if (!batcher || !handles) {
        free(batcher);
        free(handles);
        fst_fail(status, FST_NO_MEMORY, "no memory for %u threads", threads);
        return NULL;
    }
    const size_t row_bytes = fst_table_row_bytes(table);
    *batcher = (fst_batcher){.table = table,
                             .pool = pool,
                             .forks = fst_forks(),
                             .may_wait = may_wait,
                             .piece = row_bytes < PIECE_BYTES ? PIECE_BYTES / (row_bytes + 1) : 1,
                             .row_bytes = row_bytes,
                             .wanted = threads,
                             .threads = handles};
    init_conditions(batcher);
    return batcher;
}

/* Lets the threads begin no more rows of a batch. */
static void unlink_batch(fst_batcher *batcher, fst_batch *b)
{
    if (!b->waits)
        return;
    *(b->older ? &b->older->newer : &batcher->oldest) = b->newer;
    *(b->newer ? &b->newer->older : &batcher->newest) = b->older;
    b->waits = 0;
}

static void give_slots_back(const fst_table *table, fst_batch *b)
{
    for (size_t f = 0; f < table->field_count; f++) {
        if (b->slots[f])
            fst_slot_give_back(b->slots[f]);
        b->slots[f] = NULL;
    }
}

/* Finds memory for a batch when its first rows are copied, with the lock held. A consumer who
 * waits then gets the slots of the last two or three batches again, not one more for each batch
 * queued. */
static fst_code place(const fst_batcher *batcher, fst_batch *b, fst_status *status)
{
    for (size_t f = 0; f < batcher->table->field_count; f++) {
        const size_t row = fst_field_row_bytes(&batcher->table->fields[f]);
        if (!(b->slots[f] = fst_slots_take(batcher->pool, b->rows * row, status))) {
            give_slots_back(batcher->table, b);
            return status->code;
        }
        b->outputs[f] = b->slots[f]->data;
    }
    b->placed = 1;
    return FST_OK;
}

/* Fills the next piece of a batch. Releases the lock meanwhile. */
static void fill_piece(fst_batcher *batcher, fst_batch *b)
{
    const size_t begin = b->taken, left = b->rows - begin;
    const size_t end = begin + (left < batcher->piece ? left : batcher->piece);
    const int stream = b->rows * batcher->row_bytes >= FST_STREAM_BYTES;
    b->taken = end;
    if (end == b->rows)
        unlink_batch(batcher, b);
    pthread_mutex_unlock(&batcher->lock);
    const int64_t start = batcher->may_wait ? fst_now_ns() : 0;
    fst_table_copy(batcher->table, b->places, begin, end, b->outputs, stream);
    const int64_t spent = batcher->may_wait ? fst_now_ns() - start : 0;
    pthread_mutex_lock(&batcher->lock);
    if (spent > SLOW_NS + (int64_t)((end - begin) * batcher->row_bytes))
        batcher->slow = SLOW_BATCHES;
    b->done += end - begin;
    if (b->done == b->rows)
        pthread_cond_broadcast(&batcher->finished);
}

/* Fills a piece of the oldest batch for the threads. Without memory the batch is left to the
 * consumer, who reports it. */
static void help(fst_batcher *batcher)
{
    fst_batch *b = batcher->oldest;
    fst_status status = {0};
    if (b->placed || !place(batcher, b, &status))
        fill_piece(batcher, b);
    else
        unlink_batch(batcher, b);
}

static void *work(void *argument)
{
    fst_batcher *batcher = argument;
    pthread_mutex_lock(&batcher->lock);
    while (!batcher->closing)
        if (batcher->oldest)
            help(batcher);
        else
            pthread_cond_wait(&batcher->work, &batcher->lock);
    pthread_mutex_unlock(&batcher->lock);
    return NULL;
}

/* Starts the threads, with the lock held. One that cannot be created is no error: the consumer
 * works too. */
static void start_threads(fst_batcher *batcher)
{
    while (batcher->started < batcher->wanted &&
           !fst_thread_start(&batcher->threads[batcher->started], "faststep-data", work, batcher))
        batcher->started++;
    batcher->wanted = batcher->started;
}

/* Allocates a batch with room for the places of its samples. */
static fst_batch *new_batch(const fst_table *table, size_t rows, fst_status *status)
{
    const size_t fields = table->field_count;
    const size_t head = sizeof(fst_batch) + fields * (sizeof(fst_slot *) + sizeof(char *));
    fst_batch *b = malloc(head + rows * sizeof *b->places);
    if (!b) {
        fst_fail(status, FST_NO_MEMORY, "no memory for the places of %zu samples", rows);
        return NULL;
    }
    memset(b, 0, head);
    b->rows = rows;
    b->outputs = (char **)&b->slots[fields];
    b->places = (fst_place *)&b->outputs[fields];
    return b;
}

/* Whether the threads fill a batch ahead. Otherwise it is filled when it is waited for. */
static int is_for_threads(fst_batcher *batcher, size_t rows)
{
    if (rows * batcher->row_bytes >= WAKE_BYTES)
        return 1;
    if (!batcher->may_wait)
        return 0;
    pthread_mutex_lock(&batcher->lock);
    const int slow = batcher->slow > 0;
    batcher->slow -= (unsigned)slow;
    pthread_mutex_unlock(&batcher->lock);
    return slow;
}

/* Hands a batch to the threads, and wakes them. */
static void enqueue(fst_batcher *batcher, fst_batch *b)
{
    pthread_mutex_lock(&batcher->lock);
    if (batcher->started < batcher->wanted)
        start_threads(batcher);
    b->waits = 1;
    b->older = batcher->newest;
    *(b->older ? &b->older->newer : &batcher->oldest) = b;
    batcher->newest = b;
    pthread_cond_broadcast(&batcher->work);
    pthread_mutex_unlock(&batcher->lock);
}

fst_batch *fst_batcher_add(fst_batcher *batcher, const int64_t *indices, size_t count,
                           char *const *outputs, fst_status *status)
{
    if (batcher->forks != fst_forks())
        wrong_process(status);
    fst_batch *b = count && !status->code ? new_batch(batcher->table, count, status) : NULL;
    for (size_t i = 0; b && i < count; i++)
        if (fst_table_find(batcher->table, indices[i], &b->places[i])) {
            free(b);
            return NULL;
        }
    if (!b)
        return NULL;
    for (size_t f = 0; outputs && f < batcher->table->field_count; f++)
        b->outputs[f] = outputs[f];
    b->placed = outputs != NULL;
    if (is_for_threads(batcher, count))
        enqueue(batcher, b);
    return b;
}

fst_code fst_batcher_wait(fst_batcher *batcher, fst_batch *b, int milliseconds, int *done,
                          fst_status *status)
{
    *done = 0;
    if (batcher->forks != fst_forks())
        return wrong_process(status);
    const int64_t end = fst_now_ns() + (int64_t)milliseconds * 1000000;
    const struct timespec deadline = fst_time_at(end);
    pthread_mutex_lock(&batcher->lock);
    while (b->done < b->rows && (b->placed || !place(batcher, b, status))) {
        if (b->taken < b->rows)
            fill_piece(batcher, b);
        else
            pthread_cond_timedwait(&batcher->finished, &batcher->lock, &deadline);
        if (fst_now_ns() >= end)
            break;
    }
    *done = b->done == b->rows;
    pthread_mutex_unlock(&batcher->lock);
    return status->code;
}

size_t fst_batcher_take(const fst_batcher *batcher, fst_batch *b, fst_slot **slots)
{
    const size_t rows = b->rows;
    memcpy(slots, b->slots, batcher->table->field_count * sizeof *slots);
    free(b);
    return rows;
}

void fst_batcher_drop(fst_batcher *batcher, fst_batch *b)
{
    if (batcher->forks != fst_forks())
        return; /* a thread that does not exist here may hold the lock */
    pthread_mutex_lock(&batcher->lock);
    unlink_batch(batcher, b);
    b->rows = b->taken;
    while (b->done < b->rows)
        pthread_cond_wait(&batcher->finished, &batcher->lock);
    pthread_mutex_unlock(&batcher->lock);
    give_slots_back(batcher->table, b);
    free(b);
}

void fst_batcher_end(fst_batcher *batcher)
{
    if (batcher->forks != fst_forks())
        return;
    pthread_mutex_lock(&batcher->lock);
    const unsigned started = batcher->started;
    batcher->started = batcher->wanted = 0; /* nobody else starts or joins a thread from now on */
    batcher->closing = 1;
    pthread_cond_broadcast(&batcher->work);
    pthread_mutex_unlock(&batcher->lock);
    for (unsigned i = 0; i < started; i++)
        pthread_join(batcher->threads[i], NULL);
}

void fst_batcher_free(fst_batcher *batcher)
{
    if (batcher->forks != fst_forks())
        return;
    fst_batcher_end(batcher);
    pthread_cond_destroy(&batcher->work);
    pthread_cond_destroy(&batcher->finished);
    pthread_mutex_destroy(&batcher->lock);
    free(batcher->threads);
    free(batcher);
}
