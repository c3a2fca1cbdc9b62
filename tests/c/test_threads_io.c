/* The threads that fill batches: order, contents, and every way to end. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "batcher_batches.h"

MALLOC_MAY_FAIL

/* A thread that holds batches for a while, as a user's may. */
typedef struct {
    pthread_mutex_t lock;
    fst_slot *held[64][FIELDS];
    size_t count;
    int ending;
} keeper;

static void *let_go(void *argument)
{
    keeper *k = argument;
    for (int ending = 0; !ending;) {
        fst_slot *slots[FIELDS] = {NULL};
        pthread_mutex_lock(&k->lock);
        ending = k->ending && !k->count;
        if (k->count)
            memcpy(slots, k->held[--k->count], sizeof slots);
        pthread_mutex_unlock(&k->lock);
        if (slots[0])
            give_back(slots);
    }
    return NULL;
}

static int keep(keeper *k, fst_slot *const *slots)
{
    pthread_mutex_lock(&k->lock);
    const int room = k->count < 64;
    if (room)
        memcpy(k->held[k->count++], slots, FIELDS * sizeof *slots);
    pthread_mutex_unlock(&k->lock);
    return room;
}

static void batches_come_in_order(unsigned threads, int may_wait, size_t limit)
{
    enum { AHEAD = 5, BATCHES = 60 };
    static request requests[BATCHES];
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&table, pool, threads, may_wait, &status);
    keeper k = {.lock = PTHREAD_MUTEX_INITIALIZER};
    fst_batch *batches[BATCHES];
    pthread_t other;
    int wrong = 0;
    fst_slots_keep(pool, AHEAD * FIELDS);
    CHECK_INT(pthread_create(&other, NULL, let_go, &k), 0);
    for (size_t i = 0; i < BATCHES + AHEAD; i++) {
        if (i < BATCHES) {
            fill_request(&requests[i], limit);
            batches[i] = add(batcher, &requests[i], NULL);
        }
        if (i < AHEAD)
            continue;
        fst_slot *slots[FIELDS];
        CHECK_INT((int64_t)take(batcher, batches[i - AHEAD], slots),
                  (int64_t)requests[i - AHEAD].count);
        wrong += !is_right(&requests[i - AHEAD], slots);
        memset(slots[0]->data, 0xAB, slots[0]->capacity); /* a user may change a batch */
        if (!keep(&k, slots))
            give_back(slots);
    }
    CHECK_INT(wrong, 0);
    fst_batcher_free(batcher);
    fst_slots_close(pool); /* before the other thread has given back what it has */
    pthread_mutex_lock(&k.lock);
    k.ending = 1;
    pthread_mutex_unlock(&k.lock);
    CHECK_INT(pthread_join(other, NULL), 0);
}

static void the_batcher_ends_with_work_left(unsigned threads)
{
    static request r;
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    for (size_t taken = 0; taken < 4; taken++) {
        fst_batcher *batcher = fst_batcher_new(&table, pool, threads, 1, &status);
        fst_batch *batches[6];
        fst_slot *slots[FIELDS];
        int64_t counts[6];
        for (size_t i = 0; i < 6; i++) {
            fill_request(&r, 1500);
            counts[i] = (int64_t)r.count;
            batches[i] = add(batcher, &r, NULL);
        }
        for (size_t i = 0; i < taken; i++) {
            take(batcher, batches[i], slots);
            give_back(slots);
        }
        fst_batcher_drop(batcher, batches[5]); /* before and after the threads have ended */
        fst_batcher_end(batcher);
        CHECK_INT((int64_t)take(batcher, batches[4], slots), counts[4]);
        give_back(slots);
        for (size_t i = taken; i < 4; i++)
            fst_batcher_drop(batcher, batches[i]);
        fst_batcher_free(batcher);
        CHECK_INT((int64_t)fst_slots_counted(pool).held, 0);
    }
    fst_slots_close(pool);
}

static void *end(void *batcher)
{
    fst_batcher_end(batcher);
    return NULL;
}

/* Two callers, while a third one adds batches. */
static void several_end_the_threads(void)
{
    enum { AGAIN = 100, AFTER = 2 };
    static request r;
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    for (int i = 0; i < AGAIN; i++) {
        fst_batcher *batcher = fst_batcher_new(&table, pool, 3, 1, &status);
        fst_slot *slots[FIELDS];
        fst_batch *batches[1 + AFTER];
        int64_t counts[1 + AFTER];
        pthread_t callers[2];
        for (int b = 0; b < 1 + AFTER; b++) {
            fill_request(&r, 1500);
            counts[b] = (int64_t)r.count;
            batches[b] = add(batcher, &r, NULL);
            if (b < 2)
                CHECK_INT(pthread_create(&callers[b], NULL, end, batcher), 0);
        }
        for (int b = 0; b < 1 + AFTER; b++) {
            CHECK_INT((int64_t)take(batcher, batches[b], slots), counts[b]);
            give_back(slots);
        }
        for (int c = 0; c < 2; c++)
            CHECK_INT(pthread_join(callers[c], NULL), 0);
        fst_batcher_free(batcher);
    }
    fst_slots_close(pool);
}

/* Batches in slots and batches in memory of the caller's, one after the other. */
static void batches_go_where_the_caller_says(unsigned threads)
{
    enum { MOST = 1500, MIXED = 6 };
    static int32_t own[MIXED][MOST][WIDTH], own_labels[MIXED][MOST];
    static request requests[MIXED];
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&table, pool, threads, 1, &status);
    fst_batch *batches[MIXED];
    for (size_t i = 0; i < MIXED; i++) {
        char *outputs[FIELDS] = {(char *)own[i], (char *)own_labels[i]};
        fill_request(&requests[i], MOST);
        batches[i] = add(batcher, &requests[i], i % 3 ? outputs : NULL);
    }
    for (size_t i = 0; i < MIXED; i++) {
        fst_slot *slots[FIELDS], mine[FIELDS] = {{.data = own[i]}, {.data = own_labels[i]}};
        fst_slot *const places[FIELDS] = {&mine[0], &mine[1]};
        CHECK_INT((int64_t)take(batcher, batches[i], slots), (int64_t)requests[i].count);
        CHECK(i % 3 ? !slots[0] && !slots[1] : slots[0] && slots[1]);
        CHECK(is_right(&requests[i], i % 3 ? places : slots));
        if (slots[0])
            give_back(slots);
    }
    const size_t made = fst_slots_counted(pool).made;
    CHECK(made >= FIELDS && made <= 2 * FIELDS);
    fst_batcher_free(batcher);
    fst_slots_close(pool);
}

/* Whoever waits for each batch and lets go of it gets the same memory, whatever is asked for ahead.
 */
static void memory_is_found_late(void)
{
    static request r;
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&table, pool, 0, 0, &status);
    fst_slot *slots[FIELDS];
    fst_batch *batches[8];
    fst_slots_keep(pool, 8 * FIELDS);
    for (r.count = 0; r.count < 1000; r.count++)
        r.indices[r.count] = (int64_t)r.count;
    for (int i = 0; i < 8; i++)
        batches[i] = add(batcher, &r, NULL);
    CHECK_INT((int64_t)fst_slots_counted(pool).made, 0);
    for (int i = 0; i < 8; i++) {
        take(batcher, batches[i], slots);
        give_back(slots);
    }
    CHECK_INT((int64_t)fst_slots_counted(pool).made, FIELDS);
    fst_batcher_free(batcher);
    fst_slots_close(pool);
}

/* Batches that no memory holds are errors when they are waited for, and others come as ever. */
static void no_memory_is_told_to_the_one_who_waits(unsigned threads)
{
    static const request zero = {.count = 1};
    fst_field field = {.items = 1 << 20};
    fst_column column = {(char *)numbers, 0};
    fst_node one = {.kind = FST_ROWS, .length = 1, .columns = &column};
    const fst_table huge = {&field, 1, &one, 1};
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&huge, pool, threads, 0, &status);
    fst_slot *slot;
    int done;
    CHECK_INT((int64_t)take(batcher, add(batcher, &zero, NULL), &slot), 1);
    fst_slot_give_back(slot);
    field.items = (size_t)1 << 60;
    fst_batch *batch = add(batcher, &zero, NULL);
    for (int again = 0; again < 2; again++) {
        CHECK_INT(fst_batcher_wait(batcher, batch, 1000, &done, &status), FST_NO_MEMORY);
        CHECK(!done);
        status.code = FST_OK;
    }
    fst_batcher_drop(batcher, batch);
    fst_batcher_free(batcher);
    CHECK_INT((int64_t)fst_slots_counted(pool).held, 0);
    fst_slots_close(pool);
}

static void widen_slowly(char *restrict to, const char *restrict from, size_t items)
{
    (void)to, (void)from, (void)items;
    usleep(2000);
}

/* A small batch is filled by the one who waits for it, in memory that is found then; but not after
 * one whose rows had to be waited for. */
static void slow_rows_are_filled_ahead(int may_wait)
{
    static const fst_widen_loops slow = {.integers = {[FST_U16_TO_I32] = widen_slowly}};
    static const request two = {{1, 2}, 2};
    fst_field tokens = {.items = 4, .conversion = FST_U16_TO_I32};
    const fst_table files = {&tokens, 1, &node, 1};
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&files, pool, 2, may_wait, &status);
    fst_table_use(&slow);
    for (int i = 0; i < 3; i++) {
        fst_slot *slot;
        fst_batch *batch = add(batcher, &two, NULL);
        for (int tries = 0; may_wait && i > 0 && !fst_slots_counted(pool).held && tries < 10000;)
            tries += !usleep(1000);
        CHECK_INT((int64_t)fst_slots_counted(pool).held, may_wait && i > 0);
        CHECK_INT((int64_t)take(batcher, batch, &slot), 2);
        fst_slot_give_back(slot);
    }
    fst_batcher_free(batcher);
    fst_slots_close(pool);
}

static void wrong_calls_are_refused(void)
{
    static const int64_t wrong[] = {1, ROWS};
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&table, pool, 2, 0, &status);
    for (size_t count = 0; count < 3; count += 2)
        CHECK(!fst_batcher_add(batcher, wrong, count, NULL, &status) && !status.code);
    CHECK_INT((int64_t)fst_slots_counted(pool).held, 0);
    fst_batcher_free(batcher);
    fst_slots_close(pool);
}

int main(void)
{
    fill_table();
    for (unsigned threads = 0; threads < 4; threads++)
        for (int may_wait = 0; may_wait < 2; may_wait++) {
            batches_come_in_order(threads, may_wait, 20);
            batches_come_in_order(threads, may_wait, 1500);
        }
    the_batcher_ends_with_work_left(0);
    the_batcher_ends_with_work_left(3);
    several_end_the_threads();
    batches_go_where_the_caller_says(0);
    batches_go_where_the_caller_says(3);
    memory_is_found_late();
    no_memory_is_told_to_the_one_who_waits(0);
    no_memory_is_told_to_the_one_who_waits(2);
    slow_rows_are_filled_ahead(0);
    slow_rows_are_filled_ahead(1);
    wrong_calls_are_refused();
    return check_report();
}
