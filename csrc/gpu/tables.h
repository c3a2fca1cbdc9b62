/* tables.h - a plan's tables in a device's memory (base/device.h), kept from step to step.
 *
 * Every step describes all of its work; what differs from what the device holds is uploaded, in one
 * copy on the stream of the step. While a stream is captured into a graph the tables get memory of
 * their own that nothing writes again but the graph itself, so the graph stays right whatever later
 * steps do; it needs the tables it was captured with, so it must not be replayed after they are
 * freed. */
#ifndef FST_GPU_TABLES_H
#define FST_GPU_TABLES_H

#include "gpu/context.h"
#include "gpu/mirror.h"
#include "gpu/ring.h"

/* Tables in a device's memory; those of a capture were uploaded as a part of it. */
typedef struct {
    fst_gpu_mirror mirror;
    uint64_t memory; /* 0: none that is right */
    uint64_t capture;
} fst_gpu_copy;

typedef struct {
    uint64_t memory;
    void *pinned;
} fst_gpu_kept;

/* One thread at a time uses a set of tables. The fields are for the passes of launch.h. */
typedef struct {
    fst_gpu_device *device;
    fst_gpu_copy eager, captured;
    fst_gpu_ring ring;
    fst_gpu_kept *kept; /* all memory that was taken, freed with the tables */
    size_t kept_count;
    void *done;   /* recorded behind the last pass of a step, on ... */
    void *stream; /* ... the stream that was used last, except for captures */
    int used, unrecorded;
    /* for the passes that follow */
    const fst_gpu_copy *set; /* NULL: none */
    void *set_stream;
    const uint32_t *rounds;
    size_t round_count;
} fst_gpu_tables;

/* Empty tables on a device, or NULL. */
fst_gpu_tables *fst_gpu_tables_new(int device, fst_status *status);

/* Also where the driver has shut down already, and in a forked child. */
void fst_gpu_tables_free(fst_gpu_tables *tables);

/* Brings the tables up to date for the passes that follow, which run on `stream` and read `work`
 * until the next call. `rules` may be NULL. If it fails the next call begins anew. */
fst_code fst_gpu_tables_set(fst_gpu_tables *tables, const fst_work *work,
                            const fst_gpu_rules *rules, void *stream, fst_status *status);

/* Marks the end of what ran on tables->stream: another stream waits for it. Within fst_gpu_enter.
 */
fst_code fst_gpu_tables_mark_end(fst_gpu_tables *tables, fst_status *status);

#endif
