/* fold_sums.h - the tree of rules/tree.h from a thread's lanes on: over a warp, a block, and the
 * grid. */
#pragma once

#include "rules/tree.h"
#include "read_tables.h"

/* What the threads of a block share. */
typedef struct {
    double lanes[FST_LANES];
    int last, skip;
} fst_shared;

/* What a pass reduces. */
typedef struct {
    fst_norm_kind kind;
    double power, factor;
    int write; /* the products with the factor replace the elements */
    int deep;  /* squares, by loops that know the type of the elements */
} fst_reduction;

/* |x|^power by the library's pow(). Not inlined, as that code is long and only one kind of norm
 * needs it. */
FST_DEVICE_CALL double fst_power(double x, double power)
{
    return pow(fabs(x), power);
}

/* What a norm sums or compares of x. */
FST_DEVICE double fst_term(double x, const fst_reduction *what)
{
    return what->kind == FST_NORM_SQUARES   ? x * x
           : what->kind == FST_NORM_NONZERO ? (x != 0.0 ? 1.0 : 0.0)
           : what->kind == FST_NORM_POWER   ? fst_power(x, what->power)
                                            : fabs(x);
}

/* Lanes of squares that fst_join_square fills are 2^48 times the sum, which is exact. */
#define FST_LANE_SCALE 0x1p48
#define FST_SQUARE_SCALE 0x1p24f

/* Adds FST_LANE_SCALE times the square of x to a lane, with one operation of the fp64 pipe.
 *
 * y = |x| * 2^24 is 0, normal, infinite or NaN. The bits of a float 29 places higher are those of
 * the double y * 2^-896, and with the exponent raised by 1792 those of y * 2^896. The product of
 * the two is y^2: exact, 0 for 0, and infinite or NaN as y is. From 2^104 on y is infinite, so the
 * caller must sum up anew where a lane is not finite. */
FST_DEVICE double fst_join_square(double lane, float x)
{
    const uint64_t low = (uint64_t)fst_bits_of_f32(fabsf(x) * FST_SQUARE_SCALE) * 0x20000000u;
    const uint64_t high = low | (uint64_t)1792 << 52;
    double a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, &high, sizeof b);
    return fma(a, b, lane);
}

/* Folds 8 lanes of each thread of a warp; the result is in the warp's first thread. The bits of
 * a lane's number are, from the highest: those of its index in the thread from bit `shift` on,
 * those of the thread, and the rest of the index; see tile.h. */
FST_DEVICE double fst_fold_shifted(double *lanes, unsigned shift, fst_norm_kind kind)
{
    const unsigned run = 1u << shift;
    FST_UNROLL
    for (unsigned half = 4; half >= run; half /= 2)
        FST_UNROLL
    for (unsigned q = 0; q < half; q++)
        lanes[q] = fst_tree_join(lanes[q], lanes[q + half], kind);
    FST_UNROLL
    for (unsigned half = FST_WARP / 2; half > 0; half /= 2)
        FST_UNROLL
    for (unsigned q = 0; q < run; q++)
        lanes[q] = fst_tree_join(lanes[q], __shfl_down_sync(0xFFFFFFFFu, lanes[q], half), kind);
    FST_UNROLL
    for (unsigned half = run / 2; half > 0; half /= 2)
        FST_UNROLL
    for (unsigned q = 0; q < half; q++)
        lanes[q] = fst_tree_join(lanes[q], lanes[q + half], kind);
    return lanes[0];
}

FST_DEVICE double fst_fold_warp(double *lanes, unsigned shift, fst_norm_kind kind)
{
    switch (shift) {
    case 0:
        return fst_fold_shifted(lanes, 0, kind);
    case 1:
        return fst_fold_shifted(lanes, 1, kind);
    case 2:
        return fst_fold_shifted(lanes, 2, kind);
    default:
        return fst_fold_shifted(lanes, 3, kind);
    }
}

/* Folds one lane per thread of a block; thread 0 has the result. */
FST_DEVICE double fst_fold_block(fst_shared *shared, double lane, fst_norm_kind kind)
{
    shared->lanes[threadIdx.x] = lane;
    for (unsigned half = FST_LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            shared->lanes[threadIdx.x] =
                fst_tree_join(shared->lanes[threadIdx.x], shared->lanes[threadIdx.x + half], kind);
    }
    return shared->lanes[threadIdx.x];
}

/* Folds the results of chunks [0, count) by one block; thread 0 has the result. */
FST_DEVICE double fst_fold_partial(fst_shared *shared, const double *partial, uint32_t count,
                                   fst_norm_kind kind)
{
    double lane = fst_tree_neutral(kind);
    for (uint32_t base = threadIdx.x; base < count; base += FST_LANES * FST_AT_ONCE) {
        double values[FST_AT_ONCE];
        FST_UNROLL
        for (uint32_t k = 0; k < FST_AT_ONCE; k++) {
            const uint32_t i = base + k * FST_LANES;
            values[k] = i < count ? partial[i] : fst_tree_neutral(kind);
        }
        FST_UNROLL
        for (uint32_t k = 0; k < FST_AT_ONCE; k++)
            lane = fst_tree_join(lane, values[k], kind);
    }
    return fst_fold_block(shared, lane, kind);
}

/* Called by all threads of a block that has done its work. Returns 1 in the last block to come,
 * which sees what all others wrote, and resets the ticket. `seen` is passed on to it if any
 * thread sets it. */
FST_DEVICE int fst_is_last_block(fst_shared *shared, fst_device_outcome *outcome, int seen)
{
    const int any = __syncthreads_or(seen);
    if (threadIdx.x == 0) {
        if (any)
            atomicOr(&outcome->seen, 1u);
        __threadfence();
        shared->last = atomicInc(&outcome->ticket, gridDim.x - 1u) == gridDim.x - 1u;
        __threadfence();
    }
    __syncthreads();
    return shared->last;
}

/* Whether any block saw an infinity or NaN. Called by one thread of the last block. */
FST_DEVICE int fst_any_seen(fst_device_outcome *outcome)
{
    return atomicExch(&outcome->seen, 0u) != 0u;
}
