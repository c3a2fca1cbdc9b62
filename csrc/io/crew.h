/* crew.h - threads that fill batches ahead of the one who waits for them, in order.
 *
 * All functions are for one caller at a time. None of them works in a child of the process that
 * made the crew, which has no such threads: there they fail, and freeing does nothing. */
#ifndef FST_IO_CREW_H
#define FST_IO_CREW_H

#include "io/slots.h"
#include "io/table.h"

typedef struct fst_crew fst_crew;

/* Threads start with the first work for them; they take no signals. Small batches are filled by the
 * one who waits for them; but where rows may have to be waited for, as those of a file, the threads
 * do it after one that was. The table and the pool must live until the crew is freed. */
fst_crew *fst_crew_new(const fst_table *table, fst_slots *pool, unsigned threads, int may_wait,
                       fst_status *status);

/* Lets `count` samples become the batch after the newest. *number is its number, counted from 1; it
 * is 0 if one of the indices has no sample or there is none, and then nothing was done. With
 * `outputs`, an address per field, it is written there, which must stay until the batch is taken or
 * the crew freed; with NULL into slots. */
fst_code fst_crew_add(fst_crew *crew, const int64_t *indices, size_t count, char *const *outputs,
                      uint64_t *number, fst_status *status);

/* The number of the oldest batch; 0 if there is none. */
uint64_t fst_crew_oldest(const fst_crew *crew);

/* Works on the oldest batch too, for at most about `milliseconds`; *done says whether it is there.
 */
fst_code fst_crew_wait(fst_crew *crew, int milliseconds, int *done, fst_status *status);

/* Takes the oldest batch, which must be done, out of the queue: a slot per field, which are the
 * caller's from now on, or NULL for those of a batch with outputs. Returns its samples. */
size_t fst_crew_take(fst_crew *crew, fst_slot **slots);

size_t fst_crew_queued(const fst_crew *crew);

/* Ends the threads, at once but for the rows they are copying, and gives the batches' slots back.
 */
void fst_crew_free(fst_crew *crew);

#endif
