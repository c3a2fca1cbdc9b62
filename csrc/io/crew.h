/* crew.h - threads that fill batches ahead of the consumer, in order.
 *
 * All functions are for one caller at a time. In a forked child the crew has no threads: there
 * the functions fail, and freeing does nothing. */
#ifndef FST_IO_CREW_H
#define FST_IO_CREW_H

#include "io/slots.h"
#include "io/table.h"

typedef struct fst_crew fst_crew;

/* Makes a crew. Threads start with the first work for them, and take no signals. The consumer
 * fills small batches; with `may_wait`, for rows of a file, the threads do so after rows that
 * took long. The table and the pool must outlive the crew. */
fst_crew *fst_crew_new(const fst_table *table, fst_slots *pool, unsigned threads, int may_wait,
                       fst_status *status);

/* Adds a batch of `count` samples to the queue. *number counts from 1; it is 0, and nothing is
 * done, if an index has no sample or `count` is 0. With `outputs`, an address per field, the
 * batch is written there, and the memory must stay until the batch is taken or the crew is
 * freed; with NULL it is written to slots. */
fst_code fst_crew_add(fst_crew *crew, const int64_t *indices, size_t count, char *const *outputs,
                      uint64_t *number, fst_status *status);

/* The number of the oldest batch; 0 if there is none. */
uint64_t fst_crew_oldest(const fst_crew *crew);

/* Waits for the oldest batch and works on it too, for about `milliseconds` at most. *done says
 * whether it is filled. */
fst_code fst_crew_wait(fst_crew *crew, int milliseconds, int *done, fst_status *status);

/* Takes the oldest batch, which must be done, out of the queue. Its slots, one per field, become
 * the caller's; they are NULL for a batch with outputs. Returns the number of samples. */
size_t fst_crew_take(fst_crew *crew, fst_slot **slots);

size_t fst_crew_queued(const fst_crew *crew);

/* Ends the threads after the rows that they are copying, and gives the batches' slots back. */
void fst_crew_free(fst_crew *crew);

#endif
