/* batcher.h - threads that fill batches ahead of the consumer, in the order they were added.
 *
 * A batch is the caller's, who takes or drops it before the batcher is freed. Any thread may wait
 * for a batch, take or drop it, one at a time, and end the threads; batches are for one caller at a
 * time to add. In a forked child the batcher has no threads: there the functions fail, and dropping
 * and freeing do nothing. */
#pragma once

#include "io/slots.h"
#include "io/table.h"

typedef struct fst_batcher fst_batcher;
typedef struct fst_batch fst_batch;

/* Makes a batcher. Threads start with the first work for them, and take no signals. The consumer
 * fills small batches; with `may_wait`, for rows of a file, the threads do so after rows that
 * took long. The table and the pool must outlive the batcher. */
fst_batcher *fst_batcher_new(const fst_table *table, fst_slots *pool, unsigned threads,
                             int may_wait, fst_status *status);

/* Makes a batch of `count` samples. Returns NULL with `status` filled, or without a failure if an
 * index has no sample or `count` is 0. With `outputs`, an address per field, the batch is written
 * there, and the memory must stay until the batch is taken or dropped; with NULL it is written to
 * slots. */
fst_batch *fst_batcher_add(fst_batcher *batcher, const int64_t *indices, size_t count,
                           char *const *outputs, fst_status *status);

/* Waits for a batch and works on it too, for about `milliseconds` at most. *done says whether it is
 * filled. */
fst_code fst_batcher_wait(fst_batcher *batcher, fst_batch *batch, int milliseconds, int *done,
                          fst_status *status);

/* Frees a batch that is done. Its slots, one per field, become the caller's; they are NULL for a
 * batch with outputs. Returns the number of samples. */
size_t fst_batcher_take(const fst_batcher *batcher, fst_batch *batch, fst_slot **slots);

/* Frees a batch and gives its slots back, once no thread copies rows of it. */
void fst_batcher_drop(fst_batcher *batcher, fst_batch *batch);

/* Ends the threads after the rows that they are copying. Who waits for a batch then fills it. Where
 * another caller ends them already this returns at once. */
void fst_batcher_end(fst_batcher *batcher);

void fst_batcher_free(fst_batcher *batcher);
