/* mirror.h - a copy of the device's tables in the host's memory, in sections of one allocation,
 * with the range of bytes that the device does not have yet. Calls no driver. */
#pragma once

#include "base/device.h"
#include "base/status.h"
#include "base/work.h"

/* What an update reads besides the work. A pass over a list of tensors has neither spans nor
 * groups. Structs are compared as bytes, so their reserved fields must be 0. */
typedef struct {
    const fst_device_span *spans; /* those of the work, and after them those that only count */
    const fst_device_group *groups;
    size_t span_count, group_count;
    /* Contents with the same number are not compared again; 0: unknown. */
    uint64_t bound; /* of the spans, the number of groups, and the operands of an update */
    uint64_t moved; /* of where the gradients among those operands lie */
} fst_gpu_rules;

/* Sections. Those that change from step to step come first: hyper-parameters and addresses. */
enum {
    FST_SECTION_OUTCOME,
    FST_SECTION_SPANS,
    FST_SECTION_GROUPS,
    FST_SECTION_OPERANDS,
    FST_SECTION_LAYOUTS,
    FST_SECTION_CHUNKS,
    FST_SECTION_MIRRORED, /* the sections before this one; kernels write the others */
    FST_SECTION_ARGS = FST_SECTION_MIRRORED,
    FST_SECTION_PARTIAL,
    FST_SECTION_COUNT,
};

typedef struct {
    unsigned char *bytes;
    size_t capacity[FST_SECTION_COUNT];   /* elements */
    size_t offset[FST_SECTION_COUNT + 1]; /* bytes */
    size_t changed_begin, changed_end;    /* equal: nothing changed */
    uint64_t serial;                      /* of the chunk list, 0: unknown */
    uint64_t bound, moved;                /* as in the rules */
    size_t used[FST_SECTION_MIRRORED];    /* elements that launches read */
    uint32_t width;
} fst_gpu_mirror;

/* A layout of at most FST_DEVICE_MAX_DIMS dimensions. */
fst_device_layout fst_gpu_layout(const fst_layout *layout);

/* Fills the mirror from the work. *moved becomes 1 if sections had to move, which makes the
 * device's memory useless. After an error another call may fill the mirror. */
fst_code fst_gpu_mirror_fill(fst_gpu_mirror *mirror, const fst_work *work,
                             const fst_gpu_rules *rules, int *moved, fst_status *status);

/* Bytes of the mirror, and of the device's memory. */
size_t fst_gpu_mirror_size(const fst_gpu_mirror *mirror);
size_t fst_gpu_mirror_total(const fst_gpu_mirror *mirror);

/* Whether the device holds all of it. */
int fst_gpu_mirror_is_current(const fst_gpu_mirror *mirror);

/* Mark all of it as uploaded, or all of it as not. */
void fst_gpu_mirror_uploaded(fst_gpu_mirror *mirror);
void fst_gpu_mirror_lost(fst_gpu_mirror *mirror);

/* The tables at `memory`, for a launch over all chunks. */
fst_device_tables fst_gpu_mirror_tables(const fst_gpu_mirror *mirror, uint64_t memory);

/* Bytes that fst_gpu_mirror_put writes, or SIZE_MAX where it cannot. */
size_t fst_gpu_mirror_short(const fst_gpu_mirror *mirror);

/* Writes the sections with something that the device does not have into a launch struct, from its
 * byte `at` on, and lets the tables lie there. */
void fst_gpu_mirror_put(const fst_gpu_mirror *mirror, void *launch, size_t at,
                        fst_device_tables *tables);

void fst_gpu_mirror_free(fst_gpu_mirror *mirror);
