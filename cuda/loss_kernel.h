/* loss_kernel.h - the cross-entropy of rows of logits, and its gradient. A block takes a row, and a
 * warp a strip of it, with a lane of rules/cross_entropy.h per thread. Of the device's memory a row
 * is read once: a strip is in the first-level cache when it is read again, the row in the second.
 */
#ifndef FST_CUDA_LOSS_KERNEL_H
#define FST_CUDA_LOSS_KERNEL_H

#include "rules/cross_entropy.h"
#include "fold_sums.h"

enum {
    FST_LOSS_ROUND = FST_WARPS * FST_LOSS_STRIP, /* logits that a block takes at a time */
    FST_LOSS_AT_ONCE = 4, /* loads of a thread from a cache that are in flight together */
};

/* What the threads of a block share. */
typedef struct {
    fst_shared fold;
    double sum[FST_WARPS], distance[FST_WARPS]; /* of each strip */
    float most[FST_WARPS];
    fst_loss_found found;
    int64_t target;
} fst_loss_shared;

FST_DEVICE uint32_t fst_left_of(int64_t left, uint32_t most)
{
    return left < 0 ? 0 : left < (int64_t)most ? (uint32_t)left : most;
}

/* Loads logits first, first + step and so on of `count` that lie at `start`, -inf behind them. */
FST_DEVICE void fst_logits(const fst_cross_entropy_launch *launch, int64_t start, uint32_t count,
                           uint32_t first, uint32_t step, float *x, uint32_t loads)
{
    const void *logits = (const void *)fst_global(launch->logits);
    const float *words = (const float *)logits + start + first;
    const uint16_t *halves = (const uint16_t *)logits + start + first;
    const int32_t dtype = fst_hidden(launch->dtype), is_bf16 = dtype == FST_BF16;
    FST_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        x[k] = -INFINITY;
    if (dtype == FST_F32) {
        FST_UNROLL
        for (uint32_t k = 0; k < loads; k++)
            if (first + k * step < count)
                x[k] = words[k * step];
        return;
    }
    FST_UNROLL
    for (uint32_t k = 0; k < loads; k++)
        if (first + k * step < count) {
            const uint16_t half = halves[k * step];
            x[k] = is_bf16 ? fst_bf16_to_f32(half) : fst_widen_f16(half);
        }
}

FST_DEVICE float fst_logit(const fst_cross_entropy_launch *launch, int64_t at)
{
    float x;
    fst_logits(launch, at, 1, 0, 1, &x, 1);
    return x;
}

FST_DEVICE void fst_slope_write(const fst_cross_entropy_launch *launch, int64_t at, float value)
{
    const int32_t dtype = fst_hidden(launch->dtype);
    void *slope = (void *)fst_global(launch->slope);
    if (dtype == FST_F32)
        ((float *)slope)[at] = value;
    else
        ((uint16_t *)slope)[at] = (uint16_t)(dtype == FST_BF16 ? fst_narrow_two_bf16(value, 0.0f)
                                                               : fst_narrow_two_f16(value, 0.0f));
}

FST_DEVICE int64_t fst_class_of(const fst_cross_entropy_launch *launch, int64_t row)
{
    return ((const int64_t *)fst_global(launch->target))[row * launch->target_stride];
}

FST_DEVICE double fst_weight_of(const fst_cross_entropy_launch *launch, int64_t target)
{
    const float *weight = (const float *)fst_global(launch->weight);
    if (target == launch->ignored)
        return 0.0;
    if (target < 0 || target >= launch->classes)
        return (double)NAN;
    return launch->weight ? (double)weight[target] : 1.0;
}

/* The sum of the rows' weights, for all threads of the block. */
FST_DEVICE double fst_weights_of(const fst_cross_entropy_launch *launch, fst_shared *shared)
{
    double lane = 0.0;
    for (uint32_t row = threadIdx.x; row < (uint32_t)launch->rows; row += FST_DEVICE_BLOCK)
        lane += fst_weight_of(launch, fst_class_of(launch, row));
    fst_fold_block(shared, lane, FST_NORM_ABS);
    __syncthreads();
    return shared->lanes[0];
}

FST_DEVICE void fst_add_losses(const fst_cross_entropy_launch *launch, fst_shared *shared,
                               double weights)
{
    const float *losses = (const float *)fst_global(launch->losses);
    double *sums = (double *)fst_global(launch->sums);
    double lane = 0.0;
    for (uint32_t row = threadIdx.x; row < (uint32_t)launch->rows; row += FST_DEVICE_BLOCK)
        lane += (double)losses[row];
    __syncthreads();
    lane = fst_fold_block(shared, lane, FST_NORM_ABS);
    if (threadIdx.x == 0) {
        sums[0] = lane;
        sums[1] = weights;
    }
}

/* Folds the lanes of a warp; its first thread has the sum. */
FST_DEVICE float fst_loss_fold(float lane)
{
    FST_UNROLL
    for (unsigned half = FST_WARP / 2; half > 0; half /= 2)
        lane += (float)__shfl_down_sync(0xFFFFFFFFu, lane, half);
    return lane;
}

/* A warp's strip, `count` logits at `start`: its largest one, then its sums relative to that of the
 * row, for which it is in the first-level cache. `most` is that of the row before this round. */
FST_DEVICE void fst_loss_strip(const fst_cross_entropy_launch *launch, fst_loss_shared *shared,
                               int64_t start, uint32_t count, float most)
{
    const uint32_t warp = threadIdx.x / FST_WARP, lane = threadIdx.x % FST_WARP;
    const uint32_t whole = count - count % FST_LOSS_LANES;
    const uint32_t end = (uint32_t)fst_hidden(FST_LOSS_STRIP);
    float x[FST_AT_ONCE], found = -INFINITY, sum = 0.0f, distance = 0.0f;
    for (uint32_t first = lane; first < end; first += FST_LOSS_LANES * FST_AT_ONCE) {
        fst_logits(launch, start, count, first, FST_LOSS_LANES, x, FST_AT_ONCE);
        FST_UNROLL
        for (uint32_t k = 0; k < FST_AT_ONCE; k++)
            found = fst_loss_larger(found, x[k]);
    }
    FST_UNROLL
    for (unsigned half = FST_WARP / 2; half > 0; half /= 2)
        found = fst_loss_larger(found, (float)__shfl_down_sync(0xFFFFFFFFu, found, half));
    if (lane == 0)
        shared->most[warp] = fst_loss_larger(-INFINITY, found);
    __syncthreads();
    for (unsigned k = 0; k <= warp; k++)
        most = fst_loss_larger(most, shared->most[k]);
    const float from = fst_loss_origin(most);
    for (uint32_t first = lane; first < end; first += FST_LOSS_LANES * FST_LOSS_AT_ONCE) {
        fst_logits(launch, start, count, first, FST_LOSS_LANES, x, FST_LOSS_AT_ONCE);
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_AT_ONCE; k++) {
            sum += fst_softmax_exp(x[k] - from);
            distance += first + k * FST_LOSS_LANES < whole ? x[k] - from : 0.0f;
        }
    }
    sum = fst_loss_fold(sum);
    distance = fst_loss_fold(distance);
    if (lane == 0) {
        shared->sum[warp] = (double)sum;
        shared->distance[warp] = (double)distance;
        for (uint32_t at = whole; launch->smoothing != 0.0 && at < count; at++)
            shared->distance[warp] += (double)(fst_logit(launch, start + at) - from);
    }
    __syncthreads();
}

/* Adds up the row at `start`; the first thread has the sums. */
FST_DEVICE fst_loss_row fst_loss_row_of(const fst_cross_entropy_launch *launch,
                                        fst_loss_shared *shared, int64_t start)
{
    const int64_t strip = threadIdx.x / FST_WARP * FST_LOSS_STRIP;
    fst_loss_row row = fst_loss_start();
    for (int64_t base = 0; base < launch->classes; base += FST_LOSS_ROUND) {
        const uint32_t count = fst_left_of(launch->classes - base - strip, FST_LOSS_STRIP);
        fst_loss_strip(launch, shared, start + base + strip, count, row.most);
        const int32_t strips = fst_hidden(FST_WARPS); /* so that nvcc makes no eight copies */
        for (int64_t k = 0; k < strips && base + k * FST_LOSS_STRIP < launch->classes; k++)
            if (threadIdx.x == 0)
                fst_loss_add(&row, shared->most[k], shared->sum[k],
                             launch->smoothing != 0.0 ? shared->distance[k] : 0.0,
                             base + k * FST_LOSS_STRIP);
            else
                row.most = fst_loss_larger(row.most, shared->most[k]);
        __syncthreads();
    }
    return row;
}

FST_DEVICE void fst_loss_end(const fst_cross_entropy_launch *launch, fst_loss_shared *shared,
                             int64_t index, const fst_loss_row *row, double factor)
{
    fst_loss_target target;
    shared->target = fst_class_of(launch, index);
    target.weight = fst_weight_of(launch, shared->target);
    target.counts = shared->target != launch->ignored;
    target.logit = shared->target < 0 || shared->target >= launch->classes
                       ? NAN
                       : fst_logit(launch, index * launch->stride + shared->target);
    target.smoothing = launch->smoothing;
    target.factor = factor;
    target.classes = launch->classes;
    shared->found = fst_loss_finish(row, &target);
    ((float *)fst_global(launch->losses))[index] = shared->found.loss;
    ((float *)fst_global(launch->likelihoods))[index] = shared->found.likelihood;
}

/* The row is in a cache by now, unless it is very long. */
FST_DEVICE void fst_slope_row(const fst_cross_entropy_launch *launch, const fst_loss_shared *shared,
                              int64_t index)
{
    const fst_loss_found found = shared->found;
    const uint32_t some = FST_DEVICE_BLOCK * FST_LOSS_AT_ONCE;
    for (int64_t base = 0; base < launch->classes; base += some) {
        const uint32_t count = fst_left_of(launch->classes - base, some);
        const int64_t out = index * launch->classes + base;
        float x[FST_LOSS_AT_ONCE];
        fst_logits(launch, index * launch->stride + base, count, threadIdx.x, FST_DEVICE_BLOCK, x,
                   FST_LOSS_AT_ONCE);
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_AT_ONCE; k++) {
            const uint32_t at = threadIdx.x + k * FST_DEVICE_BLOCK;
            float value = fst_softmax_exp(x[k] - found.most) * found.factor - found.share;
            if (at == shared->target - base)
                value -= found.of_target;
            if (at < count)
                fst_slope_write(launch, out + at, value);
        }
    }
}

FST_KERNEL(fst_cross_entropy, fst_cross_entropy_launch)
{
    FST_SHARED(fst_loss_shared, shared);
    const double weights = fst_weights_of(&launch, &shared->fold);
    if (launch.only_sums) {
        if (blockIdx.x == 0)
            fst_add_losses(&launch, &shared->fold, weights);
        return;
    }
    const double factor = fst_loss_factor(launch.mean, weights, launch.dtype);
    for (int64_t index = blockIdx.x; index < launch.rows; index += gridDim.x) {
        const fst_loss_row row = fst_loss_row_of(&launch, shared, index * launch.stride);
        if (threadIdx.x == 0)
            fst_loss_end(&launch, shared, index, &row, factor);
        __syncthreads();
        if (fst_hidden(launch.slope != 0))
            fst_slope_row(&launch, shared, index);
    }
}

#endif
