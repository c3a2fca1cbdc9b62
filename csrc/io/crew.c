#define _GNU_SOURCE /* pthread_setname_np */
#include "io/crew.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "base/stream.h"
#include "io/clock.h"

enum {
    PIECE_BYTES = 1 << 17, /* piece of a batch: bytes that a thread fills at a time */
    WAKE_BYTES = 1 << 18,  /* waking a thread costs as much as copying so many bytes */
    SLOW_NS = 50000, /* rows that took this much longer than 1 ns per byte were waited for, as those
                        of a file */
    SLOW_BATCHES = 64, /* after such rows, so many small batches are filled by the threads */
};

typedef struct batch {
    struct batch *next;
    uint64_t number;
    size_t rows, taken, done; /* rows in all, taken by some thread, and filled */
    int left;                 /* left to the consumer: the threads do not start it */
    int placed;               /* memory was found for it */
    fst_place *places;
    char **outputs;
    fst_slot *slots[]; /* one per field */
} batch;

struct fst_crew {
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
    batch *oldest, *newest;
    batch *open; /* the oldest batch for the threads with rows that nobody has taken */
    size_t queued;
    uint64_t added;
    int closing;
};

static fst_code wrong_process(fst_status *status)
{
    return fst_fail(status, FST_UNSUPPORTED,
                    "the threads of this iterator stayed in the process that was forked");
}

static void init_conditions(fst_crew *crew)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->work, NULL);
    pthread_cond_init(&crew->finished, &clock);
    pthread_condattr_destroy(&clock);
}

fst_crew *fst_crew_new(const fst_table *table, fst_slots *pool, unsigned threads, int may_wait,
                       fst_status *status)
{
    fst_crew *crew = calloc(1, sizeof *crew);
    pthread_t *handles = calloc(threads ? threads : 1, sizeof *handles);
    if (!crew || !handles) {
        free(crew);
        free(handles);
        fst_fail(status, FST_NO_MEMORY, "no memory for %u threads", threads);
        return NULL;
    }
    const size_t row_bytes = fst_table_row_bytes(table);
    *crew = (fst_crew){.table = table,
                       .pool = pool,
                       .forks = fst_forks(),
                       .may_wait = may_wait,
                       .piece = row_bytes < PIECE_BYTES ? PIECE_BYTES / (row_bytes + 1) : 1,
                       .row_bytes = row_bytes,
                       .wanted = threads,
                       .threads = handles};
    init_conditions(crew);
    return crew;
}

static batch *for_threads(batch *b)
{
    while (b && b->left)
        b = b->next;
    return b;
}

static void give_slots_back(const fst_table *table, batch *b)
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
static fst_code place(const fst_crew *crew, batch *b, fst_status *status)
{
    for (size_t f = 0; f < crew->table->field_count; f++) {
        const size_t row = fst_field_row_bytes(&crew->table->fields[f]);
        if (!(b->slots[f] = fst_slots_take(crew->pool, b->rows * row, status))) {
            give_slots_back(crew->table, b);
            return status->code;
        }
        b->outputs[f] = b->slots[f]->data;
    }
    b->placed = 1;
    return FST_OK;
}

/* Fills the next piece of a batch. Releases the lock meanwhile. */
static void fill_piece(fst_crew *crew, batch *b)
{
    const size_t begin = b->taken, left = b->rows - begin;
    const size_t end = begin + (left < crew->piece ? left : crew->piece);
    b->taken = end;
    if (end == b->rows && crew->open == b)
        crew->open = for_threads(b->next);
    pthread_mutex_unlock(&crew->lock);
    const int64_t start = crew->may_wait ? fst_now_ns() : 0;
    fst_table_copy(crew->table, b->places, begin, end, b->outputs,
                   b->rows * crew->row_bytes >= FST_STREAM_BYTES);
    const int64_t spent = crew->may_wait ? fst_now_ns() - start : 0;
    pthread_mutex_lock(&crew->lock);
    if (spent > SLOW_NS + (int64_t)((end - begin) * crew->row_bytes))
        crew->slow = SLOW_BATCHES;
    b->done += end - begin;
    if (b->done == b->rows)
        pthread_cond_broadcast(&crew->finished);
}

/* Fills a piece of the oldest batch for the threads. Without memory the batch is left to the
 * consumer, who reports it. */
static void help(fst_crew *crew)
{
    batch *b = crew->open;
    fst_status status = {0};
    b->left = !b->placed && place(crew, b, &status);
    if (b->left)
        crew->open = for_threads(b);
    else
        fill_piece(crew, b);
}

static void *work(void *argument)
{
    fst_crew *crew = argument;
    pthread_mutex_lock(&crew->lock);
    while (!crew->closing)
        if (crew->open)
            help(crew);
        else
            pthread_cond_wait(&crew->work, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Starts the threads. One that cannot be created is no error: the consumer works too. */
static void start_threads(fst_crew *crew)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (crew->started < crew->wanted &&
           !pthread_create(&crew->threads[crew->started], NULL, work, crew)) {
#ifdef __linux__
        pthread_setname_np(crew->threads[crew->started], "faststep-data");
#endif
        crew->started++;
    }
    crew->wanted = crew->started;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void free_batch(const fst_table *table, batch *b)
{
    give_slots_back(table, b);
    free(b->places);
    free(b->outputs);
    free(b);
}

/* Allocates a batch with room for the places of its samples. */
static batch *new_batch(const fst_crew *crew, size_t rows, fst_status *status)
{
    const fst_table *table = crew->table;
    batch *b = calloc(1, sizeof *b + table->field_count * sizeof b->slots[0]);
    if (!b || !(b->places = malloc((rows + 1) * sizeof *b->places)) ||
        !(b->outputs = malloc((table->field_count + 1) * sizeof *b->outputs))) {
        if (b)
            free_batch(table, b);
        fst_fail(status, FST_NO_MEMORY, "no memory for the places of %zu samples", rows);
        return NULL;
    }
    b->rows = rows;
    return b;
}

/* Whether the threads fill a batch ahead. Otherwise it is filled when it is waited for. */
static int is_for_threads(fst_crew *crew, size_t rows)
{
    if (rows * crew->row_bytes >= WAKE_BYTES)
        return 1;
    if (!crew->may_wait)
        return 0;
    pthread_mutex_lock(&crew->lock);
    const int slow = crew->slow > 0;
    crew->slow -= (unsigned)slow;
    pthread_mutex_unlock(&crew->lock);
    return slow;
}

static void enqueue(fst_crew *crew, batch *b, int wake)
{
    if (wake && crew->started < crew->wanted)
        start_threads(crew);
    pthread_mutex_lock(&crew->lock);
    *(crew->newest ? &crew->newest->next : &crew->oldest) = b;
    crew->newest = b;
    if (!crew->open)
        crew->open = for_threads(b);
    crew->queued++;
    if (wake)
        pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
}

fst_code fst_crew_add(fst_crew *crew, const int64_t *indices, size_t count, char *const *outputs,
                      uint64_t *number, fst_status *status)
{
    int known = count > 0;
    *number = 0;
    if (crew->forks != fst_forks())
        return wrong_process(status);
    batch *b = known ? new_batch(crew, count, status) : NULL;
    if (!b)
        return status->code;
    for (size_t i = 0; known && i < count; i++)
        known = !fst_table_find(crew->table, indices[i], &b->places[i]);
    const int wake = known && is_for_threads(crew, count);
    if (!known) {
        free_batch(crew->table, b);
        return status->code;
    }
    b->left = !wake;
    for (size_t f = 0; outputs && f < crew->table->field_count; f++)
        b->outputs[f] = outputs[f];
    b->placed = outputs != NULL;
    *number = b->number = ++crew->added;
    enqueue(crew, b, wake);
    return FST_OK;
}

fst_code fst_crew_wait(fst_crew *crew, int milliseconds, int *done, fst_status *status)
{
    *done = 0;
    if (crew->forks != fst_forks())
        return wrong_process(status);
    const struct timespec deadline = fst_time_after(milliseconds);
    batch *b = crew->oldest; /* as fst_crew_queued */
    if (!b)
        return fst_fail(status, FST_BAD_VALUE, "no batch was asked for");
    pthread_mutex_lock(&crew->lock);
    while (b->done < b->rows && (b->placed || !place(crew, b, status))) {
        if (b->taken < b->rows)
            fill_piece(crew, b);
        else
            pthread_cond_timedwait(&crew->finished, &crew->lock, &deadline);
        if (fst_time_is_past(&deadline))
            break;
    }
    *done = b->done == b->rows;
    pthread_mutex_unlock(&crew->lock);
    return status->code;
}

size_t fst_crew_take(fst_crew *crew, fst_slot **slots)
{
    pthread_mutex_lock(&crew->lock);
    batch *b = crew->oldest;
    crew->oldest = b->next;
    if (!crew->oldest)
        crew->newest = NULL;
    crew->queued--;
    pthread_mutex_unlock(&crew->lock);
    const size_t rows = b->rows;
    for (size_t f = 0; f < crew->table->field_count; f++) {
        slots[f] = b->slots[f];
        b->slots[f] = NULL;
    }
    free_batch(crew->table, b);
    return rows;
}

uint64_t fst_crew_oldest(const fst_crew *crew)
{
    return crew->oldest ? crew->oldest->number : 0; /* as fst_crew_queued */
}

size_t fst_crew_queued(const fst_crew *crew)
{
    return crew->queued; /* only the caller of these functions changes it */
}

void fst_crew_free(fst_crew *crew)
{
    if (crew->forks != fst_forks())
        return; /* a thread that does not exist here may hold the lock */
    pthread_mutex_lock(&crew->lock);
    crew->closing = 1;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (unsigned i = 0; i < crew->started; i++)
        pthread_join(crew->threads[i], NULL);
    for (batch *b = crew->oldest; b;) {
        batch *next = b->next;
        free_batch(crew->table, b);
        b = next;
    }
    pthread_cond_destroy(&crew->work);
    pthread_cond_destroy(&crew->finished);
    pthread_mutex_destroy(&crew->lock);
    free(crew->threads);
    free(crew);
}
