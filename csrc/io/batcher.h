/* batcher.h - threads that fill batches ahead of the consumer, in order.
 *
 * All functions are for one caller at a time. In a forked child the batcher has no threads: there
 * the functions fail, and freeing does nothing. */
#ifndef FST_IO_BATCHER_H
#define FST_IO_BATCHER_H

#include "io/slots.h"
#include "io/table.h"

typedef struct fst_batcher fst_batcher;

/* Makes a batcher. Threads start with the first work for them, and take no signals. The consumer
 * fills small batches; with `may_wait`, for rows of a file, the threads do so after rows that
 * took long. The table and the pool must outlive the batcher. */
fst_batcher *fst_batcher_new(const fst_table *table, fst_slots *pool, unsigned threads,
                             int may_wait, fst_status *status);

/* Adds a batch of `count` samples to the queue. *number counts from 1; it is 0, and nothing is
 * done, if an index has no sample or `count` is 0. With `outputs`, an address per field, the
 * batch is written there, and the memory must stay until the batch is taken or the batcher is
 * freed; with NULL it is written to slots. */
fst_code fst_batcher_add(fst_batcher *batcher, const int64_t *indices, size_t count,
                         char *const *outputs, uint64_t *number, fst_status *status);

/* The number of the oldest batch; 0 if there is none. */
uint64_t fst_batcher_oldest(const fst_batcher *batcher);

/* Waits for the oldest batch and works on it too, for about `milliseconds` at most. *done says
 * whether it is filled. */
fst_code fst_batcher_wait(fst_batcher *batcher, int milliseconds, int *done, fst_status *status);

/* Takes the oldest batch, which must be done, out of the queue. Its slots, one per field, become
 * the caller's; they are NULL for a batch with outputs. Returns the number of samples. */
size_t fst_batcher_take(fst_batcher *batcher, fst_slot **slots);

size_t fst_batcher_queued(const fst_batcher *batcher);

/* Ends the threads after the rows that they are copying, and gives the batches' slots back. */
void fst_batcher_free(fst_batcher *batcher);

#endif
