/* device.h - what a pass finds in a device's memory: tables that csrc/gpu fills and cuda/ reads.
 *
 * A step is two launches for any number of tensors. `begin` measures the gradients, and its last
 * block decides: found infinity, norm, clip coefficient; unless the step is skipped it advances
 * every step counter and folds the scalars of every span. `update` reads that decision. Nothing of
 * it passes through the host. Addresses are 64-bit numbers, so that host and device agree on every
 * struct. */
#ifndef FST_BASE_DEVICE_H
#define FST_BASE_DEVICE_H

#include "base/work.h"

enum {
    FST_DEVICE_BLOCK = 256,  /* threads of a block, and lanes of the tree */
    FST_DEVICE_MAX_DIMS = 8, /* of a layout after neighbouring dimensions were merged */
    FST_DEVICE_HYPER = 8,
};

/* An operand of a span; operand k of span i at [i * width + k]. */
typedef struct {
    uint64_t data;  /* 0: absent */
    int32_t layout; /* index of its layout, -1: the elements lie one after another */
    int32_t dtype;  /* fst_dtype */
} fst_device_operand;

typedef struct {
    int64_t shape[FST_DEVICE_MAX_DIMS], stride[FST_DEVICE_MAX_DIMS]; /* as in fst_layout */
    int32_t ndim, reserved;
} fst_device_layout;

typedef struct {
    uint64_t step; /* address of the step counter, one fp32 or fp64 number; 0: the rule has none */
    double value;  /* without a counter, what the rule reads: 1 for a new state, else 2 */
    uint32_t group;
    int32_t step_is_double;
    int32_t wide; /* computed in double */
    int32_t reserved;
} fst_device_span;

typedef struct {
    double hyper[FST_DEVICE_HYPER];
    uint64_t lr; /* address of hyper-parameter 0 on the device, 0: it is in `hyper` */
    int32_t lr_is_double;
    int32_t rule; /* fst_rule */
    int32_t maximize;
    int32_t reserved;
} fst_device_group;

/* One chunk, as fst_chunk without its cost. */
typedef struct {
    int64_t begin;
    uint32_t span;
    uint32_t count;
} fst_device_chunk;

/* What `begin` (or a reduction) decided. All zero before its first use; the ticket returns to 0. */
typedef struct {
    double square_sum;       /* of the gradients times inv_scale */
    double norm;             /* its root, or the norm that a reduction was asked for */
    double clip_coefficient; /* 1 where nothing is clipped */
    double inv_scale;
    int32_t skip;
    int32_t nonfinite;
    uint32_t ticket; /* blocks that are done */
    uint32_t reserved;
} fst_device_outcome;

/* The tables of one plan on one device. */
typedef struct {
    uint64_t operands; /* fst_device_operand */
    uint64_t layouts;  /* fst_device_layout */
    uint64_t spans;    /* fst_device_span */
    uint64_t groups;   /* fst_device_group */
    uint64_t chunks;   /* fst_device_chunk */
    uint64_t args;     /* fst_update_args per span, written by `begin` */
    uint64_t partial;  /* a double per chunk, written by reductions */
    uint64_t outcome;  /* fst_device_outcome */
    uint32_t span_count, group_count, width;
    uint32_t chunk_first, chunk_count; /* of the round that this launch runs */
} fst_device_tables;

#endif
