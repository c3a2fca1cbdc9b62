/* loss_kernel.h - the cross-entropy of rows of logits, and its gradient.
 *
 * A team takes a row: a block, or a warp where the row is short. It goes through the row three
 * times: for the largest logit of each strip, for the strips' sums relative to the largest one up
 * to their ends, and for the gradient. Of the device's memory the row is read once, and then from a
 * cache. A thread loads 16 bytes at a time, of `items` logits in lanes that follow one another, so
 * that 32 / items threads take a strip, and a warp as many strips at once as a word has items. */
#pragma once

#include "fold_sums.h"
#include "loss_words.h"

enum {
    FST_LOSS_STRIPS = 128, /* of a row, that a block takes between two waits for all of it */
    /* Loads of a thread that are in flight together: from memory, and from a cache. */
    FST_LOSS_FROM_FAR = 4,
    FST_LOSS_AT_ONCE = 2,
};

/* What the threads of a block share; a team of one warp has a part of each. */
typedef struct {
    fst_shared fold;
    double sum[FST_LOSS_STRIPS], distance[FST_LOSS_STRIPS]; /* of each strip */
    float most[FST_LOSS_STRIPS], up_to[FST_LOSS_STRIPS]; /* the largest in it, and up to its end */
    fst_loss_found found[FST_WARPS];
    int64_t target[FST_WARPS];
} fst_loss_shared;

/* Those who take a row together. */
typedef struct {
    uint32_t warps, threads;
    uint32_t warp, thread;  /* this one in the team */
    uint32_t place, strips; /* where its part of what is shared begins, and its size */
    uint32_t number;        /* of its results that are shared */
} fst_loss_team;

/* nvcc must not see that there are two kinds: it would not end. */
FST_DEVICE fst_loss_team fst_loss_team_of(int is_short)
{
    const uint32_t teams = (uint32_t)fst_hidden(is_short ? FST_WARPS : 1); /* teams of a block */
    const uint32_t warp = threadIdx.x / FST_WARP, warps = FST_WARPS / teams;
    fst_loss_team team;
    team.warps = warps;
    team.threads = warps * FST_WARP;
    team.warp = warp % warps;
    team.thread = threadIdx.x % team.threads;
    team.number = warp / warps;
    team.strips = FST_LOSS_STRIPS / teams;
    team.place = team.number * team.strips;
    return team;
}

FST_DEVICE void fst_loss_wait(const fst_loss_team *team)
{
    if (fst_hidden((int32_t)team->warps) == 1)
        __syncwarp();
    else
        __syncthreads();
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
    fst_loss_result result;
    result.loss = (float *)fst_global(launch->loss);
    result.factors = (float *)fst_global(launch->factors);
    double lane = 0.0;
    for (uint32_t row = threadIdx.x; row < (uint32_t)launch->rows; row += FST_DEVICE_BLOCK)
        lane += (double)losses[row];
    __syncthreads();
    lane = fst_fold_block(shared, lane, FST_NORM_ABS);
    if (threadIdx.x == 0)
        fst_loss_result_write(result, launch->mean, lane, weights, launch->dtype);
}

/* The largest of a strip's `count` logits at `strip`, in the first of the threads that take it. */
FST_DEVICE float fst_strip_most(const char *strip, uint32_t count, int32_t dtype, unsigned items)
{
    const uint32_t first = threadIdx.x % (FST_LOSS_LANES / items) * items;
    const uint32_t end = (uint32_t)fst_hidden(FST_LOSS_STRIP);
    float most = -INFINITY;
    for (uint32_t at = first; at < end; at += FST_LOSS_LANES * FST_LOSS_FROM_FAR) {
        fst_words words[FST_LOSS_FROM_FAR];
        fst_loss_load(strip + at * (sizeof *words / items), fst_left_of((int64_t)count - at, end),
                      dtype, items, words, FST_LOSS_FROM_FAR);
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_FROM_FAR; k++) {
            float x[8];
            fst_loss_widen(&words[k], dtype, items, x);
            FST_UNROLL
            for (unsigned q = 0; q < items; q++)
                most = fst_loss_larger(most, x[q]);
        }
    }
    FST_UNROLL
    for (unsigned half = FST_LOSS_LANES / items / 2; half > 0; half /= 2)
        most = fst_loss_larger(most, (float)__shfl_down_sync(0xFFFFFFFFu, most, half));
    return most;
}

/* Folds the lanes of a strip in halves; the first of the threads that take it has the sum. */
FST_DEVICE float fst_loss_fold(float *lanes, unsigned items)
{
    FST_UNROLL
    for (unsigned half = FST_LOSS_LANES / 2 / items; half > 0; half /= 2)
        FST_UNROLL
    for (unsigned q = 0; q < items; q++)
        lanes[q] += (float)__shfl_down_sync(0xFFFFFFFFu, lanes[q], half);
    FST_UNROLL
    for (unsigned half = items / 2; half > 0; half /= 2)
        FST_UNROLL
    for (unsigned q = 0; q < half; q++)
        lanes[q] += lanes[q + half];
    return lanes[0];
}

/* Adds up e^(logit - from) of a strip, and, if asked, logit - from. */
FST_DEVICE void fst_strip_sums(const char *strip, uint32_t count, float from, int distances,
                               int32_t dtype, unsigned items, float *sum, double *distance)
{
    const uint32_t first = threadIdx.x % (FST_LOSS_LANES / items) * items;
    const uint32_t end = (uint32_t)fst_hidden(FST_LOSS_STRIP);
    const uint32_t whole = count - count % FST_LOSS_LANES;
    float sums[8], apart[8];
    FST_UNROLL
    for (unsigned q = 0; q < items; q++)
        sums[q] = apart[q] = 0.0f;
    for (uint32_t at = first; at < end; at += FST_LOSS_LANES * FST_LOSS_AT_ONCE) {
        fst_words words[FST_LOSS_AT_ONCE];
        fst_loss_load(strip + at * (sizeof *words / items), fst_left_of((int64_t)count - at, end),
                      dtype, items, words, FST_LOSS_AT_ONCE);
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_AT_ONCE; k++) {
            float x[8];
            fst_loss_widen(&words[k], dtype, items, x);
            FST_UNROLL
            for (unsigned q = 0; q < items; q++)
                sums[q] += fst_softmax_exp(x[q] - from);
            if (distances && at + k * FST_LOSS_LANES < whole) {
                FST_UNROLL
                for (unsigned q = 0; q < items; q++)
                    apart[q] += x[q] - from;
            }
        }
    }
    *sum = fst_loss_fold(sums, items);
    *distance = 0.0;
    if (!distances)
        return;
    *distance = (double)fst_loss_fold(apart, items);
    for (uint32_t at = whole; at < count; at++)
        *distance += (double)(fst_logit_of_bits(fst_logit_bits(strip, at, items), dtype) - from);
}

/* The team finds the largest logit of each of its strips, from `base` on. */
FST_DEVICE void fst_loss_look(const fst_cross_entropy_launch *launch, fst_loss_shared *shared,
                              const fst_loss_team *team, const char *row, int64_t left,
                              uint32_t strips, float most, unsigned items)
{
    const uint32_t lane = threadIdx.x % FST_WARP, threads = FST_LOSS_LANES / items;
    for (uint32_t some = team->warp * items; some < strips; some += team->warps * items) {
        const uint32_t strip = some + lane / threads, start = strip * FST_LOSS_STRIP;
        const float found =
            fst_strip_most(row + start * (sizeof(fst_words) / items),
                           fst_left_of(left - start, FST_LOSS_STRIP), launch->dtype, items);
        if (lane % threads == 0 && strip < strips)
            shared->most[team->place + strip] = found;
    }
    fst_loss_wait(team);
    for (uint32_t strip = team->thread; strip < strips; strip += team->threads) {
        float up_to = most;
        for (uint32_t k = 0; k <= strip; k++)
            up_to = fst_loss_larger(up_to, shared->most[team->place + k]);
        shared->up_to[team->place + strip] = up_to;
    }
    fst_loss_wait(team);
}

/* The team adds up a row; its first thread has the sums. */
FST_DEVICE fst_loss_row fst_loss_row_of(const fst_cross_entropy_launch *launch,
                                        fst_loss_shared *shared, const fst_loss_team *team,
                                        int64_t index, unsigned items)
{
    const uint32_t lane = threadIdx.x % FST_WARP, threads = FST_LOSS_LANES / items;
    const int distances = launch->smoothing != 0.0;
    const int64_t most = (int64_t)team->strips * FST_LOSS_STRIP;
    fst_loss_row row = fst_loss_start();
    for (int64_t base = 0; base < launch->classes; base += most) {
        const char *start = fst_logit_at(launch, index * launch->stride + base);
        const uint32_t left = fst_left_of(launch->classes - base, (uint32_t)most);
        const uint32_t strips = (left + FST_LOSS_STRIP - 1) / FST_LOSS_STRIP;
        fst_loss_look(launch, shared, team, start, left, strips, row.most, items);
        for (uint32_t some = team->warp * items; some < strips; some += team->warps * items) {
            const uint32_t strip = some + lane / threads, at = strip * FST_LOSS_STRIP;
            const uint32_t place = team->place + (strip < strips ? strip : 0);
            float sum;
            double distance;
            fst_strip_sums(start + at * (sizeof(fst_words) / items),
                           fst_left_of((int64_t)left - at, FST_LOSS_STRIP),
                           fst_loss_origin(shared->up_to[place]), distances, launch->dtype, items,
                           &sum, &distance);
            if (lane % threads == 0 && strip < strips) {
                shared->sum[place] = (double)sum;
                shared->distance[place] = distance;
            }
        }
        fst_loss_wait(team);
        if (team->thread == 0)
            for (uint32_t k = 0; k < strips; k++)
                fst_loss_add(&row, shared->most[team->place + k], shared->sum[team->place + k],
                             shared->distance[team->place + k], base + (int64_t)k * FST_LOSS_STRIP);
        else
            row.most = shared->up_to[team->place + strips - 1];
        fst_loss_wait(team);
    }
    return row;
}

FST_DEVICE void fst_loss_end(const fst_cross_entropy_launch *launch, fst_loss_shared *shared,
                             const fst_loss_team *team, int64_t index, const fst_loss_row *row,
                             double factor)
{
    const int64_t number = fst_class_of(launch, index);
    fst_loss_target target;
    target.weight = fst_weight_of(launch, number);
    target.counts = number != launch->ignored;
    target.logit = number < 0 || number >= launch->classes
                       ? NAN
                       : fst_logit(launch, index * launch->stride + number);
    target.smoothing = launch->smoothing;
    target.factor = factor;
    target.classes = launch->classes;
    const fst_loss_found found = fst_loss_finish(row, &target);
    ((float *)fst_global(launch->losses))[index] = found.loss;
    ((float *)fst_global(launch->likelihoods))[index] = found.likelihood;
    shared->found[team->number] = found;
    shared->target[team->number] = number;
}

/* The gradient of one logit, at a distance from the target. */
FST_DEVICE float fst_slope_of(float x, const fst_loss_found *found, int64_t from_target)
{
    const float value = fst_softmax_exp(x - found->most) * found->factor - found->share;
    return from_target == 0 ? value - found->of_target : value;
}

/* The row is in a cache by now, unless it is very long. Words where it and its gradient lie on 16
 * bytes, and the rest one by one. */
FST_DEVICE void fst_slope_row(const fst_cross_entropy_launch *launch, const fst_loss_shared *shared,
                              const fst_loss_team *team, int64_t index, unsigned items)
{
    const fst_loss_found found = shared->found[team->number];
    const int64_t target = shared->target[team->number], out = index * launch->classes;
    const char *row = fst_logit_at(launch, index * launch->stride);
    char *slope = (char *)fst_global(launch->slope) + out * (int64_t)(sizeof(fst_words) / items);
    const int32_t dtype = fst_hidden(launch->dtype);
    const int64_t words =
        fst_is_aligned(row) && fst_is_aligned(slope) ? launch->classes / items : 0;
    const uint32_t step = team->threads;
    for (int64_t base = 0; base < words; base += step * FST_LOSS_AT_ONCE) {
        fst_words some[FST_LOSS_AT_ONCE];
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_AT_ONCE; k++) {
            const int64_t at = base + team->thread + k * step;
            some[k] = at < words ? ((const fst_words *)row)[at] : fst_words_zero();
        }
        FST_UNROLL
        for (uint32_t k = 0; k < FST_LOSS_AT_ONCE; k++) {
            const int64_t at = base + team->thread + k * step;
            const int64_t before = target - at * items;
            const int32_t place = before >= 0 && before < items ? (int32_t)before : -1;
            float x[8];
            fst_loss_widen(&some[k], dtype, items, x);
            FST_UNROLL
            for (unsigned q = 0; q < items; q++)
                x[q] = fst_slope_of(x[q], &found, (int32_t)q - place);
            if (at < words)
                fst_store_once((fst_words *)slope + at, fst_loss_narrow(x, dtype, items));
        }
    }
    for (int64_t at = words * items + team->thread; at < launch->classes; at += step) {
        const float x = fst_logit_of_bits(fst_logit_bits(row, at, items), dtype);
        fst_slope_write(launch, out + at, fst_slope_of(x, &found, target - at));
    }
}

/* A row is short if a warp takes all of its strips at once. */
FST_DEVICE void fst_loss_rows(const fst_cross_entropy_launch *launch, fst_loss_shared *shared,
                              double factor, unsigned items)
{
    const int is_short = launch->classes <= (int64_t)items * FST_LOSS_STRIP;
    const fst_loss_team team = fst_loss_team_of(is_short);
    const int64_t teams = (int64_t)gridDim.x * (FST_WARPS / team.warps);
    for (int64_t index = blockIdx.x + (int64_t)team.number * gridDim.x; index < launch->rows;
         index += teams) {
        const fst_loss_row row = fst_loss_row_of(launch, shared, &team, index, items);
        if (team.thread == 0)
            fst_loss_end(launch, shared, &team, index, &row, factor);
        fst_loss_wait(&team);
        if (launch->slope)
            fst_slope_row(launch, shared, &team, index, items);
    }
}

FST_KERNEL(fst_cross_entropy, fst_cross_entropy_launch)
{
    FST_SHARED(fst_loss_shared, shared);
    const double weights = fst_weights_of(&launch, &shared->fold);
    if (launch.only_result) {
        if (blockIdx.x == 0)
            fst_add_losses(&launch, &shared->fold, weights);
        return;
    }
    const double factor = fst_loss_factor(launch.mean, weights, launch.dtype);
    if (launch.dtype == FST_F32)
        fst_loss_rows(&launch, shared, factor, 4);
    else
        fst_loss_rows(&launch, shared, factor, 8);
}
