/* tables.h - a plan's tables in a device's memory (base/device.h), kept from step to step.
 *
 * Every step describes all of its work. What differs from the device's tables goes with the
 * launches, where it is short, or is uploaded, in one copy on the step's stream. During a capture
 * the tables get memory of their own that only the graph writes, so later steps do not disturb the
 * graph. It belongs to the graph (graph_memory.h). */
#pragma once

#include "gpu/context.h"
#include "gpu/mirror.h"
#include "gpu/ring.h"

/* A copy of the tables in the device's memory. That of a capture was uploaded as a part of it. */
typedef struct {
    fst_gpu_mirror mirror;
    uint64_t memory;  /* 0: no valid copy */
    uint64_t capture; /* on this stream, */
    void *stream;     /* whose work has its order in the graph */
} fst_gpu_copy;

typedef enum {
    FST_GPU_NOTHING,  /* was done that others must wait for */
    FST_GPU_UNMARKED, /* the event is not recorded yet */
    FST_GPU_MARKED,
} fst_gpu_end;

/* One thread at a time uses a set of tables. The fields are for the passes of launch.h. */
typedef struct {
    fst_gpu_device *device;
    fst_gpu_copy eager, captured;
    fst_gpu_ring ring;
    uint64_t *kept; /* all memory that was taken but for graphs, freed with the tables */
    size_t kept_count;
    void *stream; /* that was used last, except for captures */
    uint64_t stream_id;
    fst_gpu_end end; /* of what was done there */
    void *done;      /* the event behind it */
    /* for the passes that follow */
    const fst_gpu_copy *set; /* NULL: none */
    int brief;               /* `work` goes with the launch, and no copy is set */
    fst_work work;
    void *set_stream;
    const uint32_t *rounds;
    size_t round_count;
} fst_gpu_tables;

/* Empty tables on a device, or NULL. */
fst_gpu_tables *fst_gpu_tables_new(int device, fst_status *status);

/* Frees tables, or does nothing for NULL. May be called after the driver has shut down, and in a
 * forked child. */
void fst_gpu_tables_free(fst_gpu_tables *tables);

/* Brings the tables up to date for the passes that follow, which run on `stream`. `work` must
 * stay valid until the next call; `rules` may be NULL. After an error the next call starts anew. */
fst_code fst_gpu_tables_set(fst_gpu_tables *tables, const fst_work *work,
                            const fst_gpu_rules *rules, void *stream, fst_status *status);

/* The same for passes that leave nothing in the tables: scale by a given norm or factor, clamp and
 * accumulate. A short list then needs nothing of the driver but the launch. */
fst_code fst_gpu_tables_set_brief(fst_gpu_tables *tables, const fst_work *work, void *stream,
                                  fst_status *status);

/* Called behind the last pass on tables->stream. Within fst_gpu_enter. */
fst_code fst_gpu_tables_end(fst_gpu_tables *tables, fst_status *status);
