/* device.h - the tables in a device's memory that csrc/gpu fills and the kernels of cuda/ read.
 *
 * A step is two launches for any number of tensors. `begin` measures the gradients. Its last
 * block decides on found inf, norm and clip coefficient, and unless the step is skipped it
 * advances every step counter. `update` reads that decision, so the host need not wait.
 * Addresses are 64-bit numbers, so host and device agree on every struct.
 *
 * Short tables travel in the launch's own parameters, so that nothing has to be copied first. */
#pragma once

#include "base/noise.h"
#include "base/work.h"

enum {
    FST_DEVICE_BLOCK = 256,  /* threads of a block of any kernel, and lanes of the tree */
    FST_DEVICE_MAX_DIMS = 8, /* of a layout after neighbouring dimensions were merged */
    FST_DEVICE_HYPER = 8,
    FST_DEVICE_NUMBERS = 2, /* of a span, beside its step counter */
    FST_DEVICE_ARGS = 64,   /* bytes of a span's fst_rule_args */
    /* Bytes of a launch struct at most, which every device takes as parameters; and of its room for
     * tables. That of a step is small, as it is copied with each launch of a long step too. */
    FST_DEVICE_LAUNCH = 4096,
    FST_DEVICE_STEP_ROOM = 1024,
    FST_DEVICE_LIST_ROOM = 3584,
};

/* The end of a launch struct: room for tables. */
#define FST_DEVICE_ROOM(size) unsigned char room[size] __attribute__((aligned(16)))

/* One fp32 or fp64 number in the device's memory. */
typedef struct {
    uint64_t data; /* 0: absent */
    int32_t is_double;
    int32_t negated; /* the memory holds it with its sign flipped */
} fst_device_scalar;

/* One number of any type in the device's memory. */
typedef struct {
    uint64_t data; /* 0: absent */
    int32_t dtype; /* fst_dtype */
    int32_t negated;
} fst_device_number;

/* An operand of a span; operand k of span i at [i * width + k]. */
typedef struct {
    uint64_t data;  /* 0: absent */
    int32_t layout; /* index of its layout, -1: the elements lie one after another, as they are */
    int32_t dtype;  /* fst_dtype */
} fst_device_operand;

typedef struct {
    int64_t shape[FST_DEVICE_MAX_DIMS], stride[FST_DEVICE_MAX_DIMS]; /* as in fst_layout */
    int32_t ndim, negated;
} fst_device_layout;

/* A span of an update. Parameters without elements have spans without chunks or operands, only
 * for their step counters; they follow the others. No two spans share a step counter or a number.
 */
typedef struct {
    fst_device_scalar step; /* the step counter; absent: the rule has none */
    double value; /* without a counter, the count that the rule reads: 1 for a new state, else 2 */
    uint32_t group;
    int32_t rule; /* fst_rule */
    int32_t maximize;
    int32_t wide;                                  /* computed in double */
    fst_device_number numbers[FST_DEVICE_NUMBERS]; /* see rules/numbers.def */
    fst_noise noise; /* where bf16 states are rounded by it; its step is that of the counter, which
                        is there */
    int32_t noisy;
    uint32_t row;        /* of the blocks of states in codes (rules/codes.h) */
    uint64_t scales;     /* of these: of state k from k * scale_count on; 0: none is in codes */
    int64_t scale_count; /* of a state */
} fst_device_span;

typedef struct {
    double hyper[FST_DEVICE_HYPER];
    fst_device_scalar lr; /* hyper-parameter 0; absent: it is in `hyper` */
} fst_device_group;

/* One chunk, as fst_chunk without its cost. */
typedef struct {
    int64_t begin;
    uint32_t span;
    uint32_t count;
} fst_device_chunk;

/* The chunks of one span, in tables that have no list of chunks. */
typedef struct {
    int64_t count;  /* elements of the span */
    uint32_t first; /* the number of its first chunk */
    uint32_t reserved;
} fst_device_run;

/* What `begin`, `unscale` or `norm` found. All zero before its first use. */
typedef struct {
    double square_sum;       /* of the operand times inv_scale */
    double norm;             /* its root, or the norm that was asked for; NaN: not measured */
    double clip_coefficient; /* 1 where nothing is clipped */
    double inv_scale;
    int32_t skip;
    int32_t nonfinite;
    uint32_t ticket; /* blocks that are done; 0 again after the last one */
    uint32_t seen;   /* nonzero if a block saw an infinity or NaN; 0 again after the launch */
} fst_device_outcome;

/* The tables of one plan on one device. Passes over a list of tensors need no spans, groups or
 * args. A pass that writes is one launch per round; one that only reads is one launch over all
 * chunks. The first five may lie in the launch struct itself, of which the tables are the first
 * member: then their address is an offset in it, less than FST_DEVICE_LAUNCH. */
typedef struct {
    uint64_t operands; /* fst_device_operand */
    uint64_t layouts;  /* fst_device_layout */
    uint64_t spans;    /* fst_device_span */
    uint64_t groups;   /* fst_device_group */
    uint64_t chunks;   /* fst_device_chunk; the first one of all, not of this launch. With
                          `run_count` instead that many fst_device_run, one per span */
    uint64_t args;     /* FST_DEVICE_ARGS bytes per span, aligned to as much; written by `begin` */
    uint64_t partial;  /* a double per chunk, written by reductions */
    uint64_t outcome;  /* fst_device_outcome */
    uint32_t span_count, width;
    uint32_t chunk_first, chunk_count; /* of this launch */
    uint32_t run_count;                /* only of fst_scale, fst_clamp and fst_accumulate */
    uint32_t reserved;
} fst_device_tables;

/* Every kernel takes one of these structs. Blocks have FST_DEVICE_BLOCK threads and no dynamic
 * shared memory. Results are right for any number of blocks from 1 on; more blocks than run at a
 * time gain nothing. A reduction works on each chunk with a warp, other passes with a block. */

/* fst_begin: measures if asked, decides, and fills the arguments of every span's rule. One launch.
 */
typedef struct {
    fst_device_tables tables;
    fst_device_scalar grad_scale; /* what the gradients were multiplied by; absent: 1 */
    fst_device_scalar found_inf;
    fst_device_scalar norm; /* receives the norm; NaN where found_inf skips the step */
    double max_norm;        /* NaN: no clipping */
    int32_t measure;        /* measure, to find infinities or to clip by a norm that is not known */
    int32_t measure_found_inf; /* set found_inf to 1 instead of reading it */
    int32_t only_measure; /* leave the decision to another launch, which does not measure but reads
                             found_inf and, to clip, the norm */
    int32_t has_numbers;  /* some spans have numbers beside their step counters */
    FST_DEVICE_ROOM(FST_DEVICE_STEP_ROOM);
} fst_begin_launch;

/* fst_update: the optimizer's update of spans with FST_OP_COUNT operands. */
typedef struct {
    fst_device_tables tables;
    int32_t write_grad; /* write gradients back, unscaled and clipped */
    int32_t reserved;
    FST_DEVICE_ROOM(FST_DEVICE_STEP_ROOM);
} fst_update_launch;

/* fst_unscale: multiplies an operand by the inverse scale, in place, and measures it. After the
 * last round the outcome holds the sum of squares, its root, and whether an element was infinite
 * or NaN. */
typedef struct {
    fst_device_tables tables;
    fst_device_scalar scale;
    fst_device_scalar found_inf; /* set to 1 where an element is infinite or NaN, else left alone */
    double factor;               /* the inverse scale where `scale` is absent */
    uint32_t operand;
    int32_t inverse; /* `scale` is the inverse scale already */
    FST_DEVICE_ROOM(FST_DEVICE_LIST_ROOM);
} fst_unscale_launch;

/* fst_norm: the norm of all elements of an operand. One launch. The sums of squares of chunks that
 * several ranks have measured are folded by another launch, which reads no element. */
typedef struct {
    fst_device_tables tables;
    fst_device_scalar norm;      /* receives the norm */
    fst_device_scalar scale;     /* what the elements were multiplied by, for squares; absent: 1 */
    fst_device_scalar found_inf; /* set to 1 where an element is infinite or NaN, else left alone */
    double power;                /* of FST_NORM_POWER */
    uint32_t operand;
    int32_t kind;      /* fst_norm_kind */
    int32_t only_fold; /* `partial` holds the sums of chunk_count chunks already */
    int32_t reserved;
    FST_DEVICE_ROOM(FST_DEVICE_LIST_ROOM);
} fst_norm_launch;

/* fst_scale: multiplies an operand by a factor, in place. The factor is given by value, or is
 * the clip coefficient of a norm in the device's memory, such as the outcome's; at a coefficient
 * of 1 nothing is read. */
typedef struct {
    fst_device_tables tables;
    fst_device_scalar norm; /* absent: use `factor` */
    double max_norm;
    double factor;
    uint32_t operand;
    int32_t reserved;
    FST_DEVICE_ROOM(FST_DEVICE_LIST_ROOM);
} fst_scale_launch;

/* fst_clamp: every element of an operand to [-limit, limit], in place; NaN stays. */
typedef struct {
    fst_device_tables tables;
    double limit;
    uint32_t operand;
    int32_t reserved;
    FST_DEVICE_ROOM(FST_DEVICE_LIST_ROOM);
} fst_clamp_launch;

/* fst_accumulate: on spans of two or three operands, operand 0 += factor * each of the others in
 * turn. With `start` operand 0 is overwritten, not read. Computed in double if one of them is
 * fp64. */
typedef struct {
    fst_device_tables tables;
    double factor;
    int32_t start;
    uint32_t terms; /* 1 or 2; spans have one operand more */
    FST_DEVICE_ROOM(FST_DEVICE_LIST_ROOM);
} fst_accumulate_launch;

/* fst_cross_entropy: the loss of each row of logits, the softmax of its target, and the gradient,
 * as csrc/cpu/loss_rows.h describes them. A block takes a row. A target that is no class makes its
 * row's results NaN. With `only_result` the losses are there already: one block adds them up. There
 * are less than 2^31 rows. */
typedef struct {
    uint64_t logits, target;
    uint64_t weight; /* 0: all are 1 */
    uint64_t losses, likelihoods;
    uint64_t slope;         /* 0: not asked for */
    uint64_t loss, factors; /* see fst_loss_result */
    int64_t rows, classes, stride, target_stride, ignored;
    double smoothing;
    int32_t dtype; /* fst_dtype, not fp64 */
    int32_t mean;
    int32_t only_result;
    int32_t reserved;
} fst_cross_entropy_launch;

/* fst_loss_scale: the loss scale's update, see rules/loss_scale.h. One block. */
typedef struct {
    uint64_t scale;           /* fp32 */
    uint64_t growth_tracker;  /* int32 */
    uint64_t hysteresis_left; /* int32; 0: none, back off at once */
    fst_device_scalar found_inf;
    double growth_factor, backoff_factor;
    double min_scale, max_scale;
    int32_t growth_interval, hysteresis;
} fst_loss_scale_launch;
