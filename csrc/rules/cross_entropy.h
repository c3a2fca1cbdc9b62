/* cross_entropy.h - what a row of logits adds up to, and its loss, the same operations on every
 * backend.
 *
 * A row is read in strips. Of a strip every lane takes the elements with its number, modulo
 * FST_LOSS_LANES, in turn; the lanes are folded in halves, and the strips added in double. */
#pragma once

#include "base/dtype.h"
#include "rules/softmax.h"

enum { FST_LOSS_LANES = 32, FST_LOSS_STRIP = 1024 };

/* A row so far: its largest logit, the sum of e^(logit - most), and that of all logits from 0, or
 * from `most` once it is finite. */
typedef struct {
    float most;
    double sum, distance;
} fst_loss_row;

/* What the loss and the gradient of a row follow from, beside its sums. */
typedef struct {
    float logit;   /* of the target */
    double weight; /* of the row; a row that counts nothing has 0 */
    int counts;
    double smoothing; /* the share of all classes in the target */
    double factor;    /* of the gradient */
    int64_t classes;
} fst_loss_target;

/* The gradient of a logit is e^(logit - most) * factor - share, and that of the target is less by
 * `of_target`. All are NaN where the sums are. */
typedef struct {
    float loss, likelihood, most, factor, share, of_target;
} fst_loss_found;

FST_FN fst_loss_row fst_loss_start(void)
{
    fst_loss_row row;
    row.most = -INFINITY;
    row.sum = row.distance = 0.0;
    return row;
}

/* Of the gradient of every row, for the sum of their losses or with `mean` for their mean. fp16 has
 * too small a range for it, so its gradient is to be divided by the weights later. */
FST_FN double fst_loss_factor(int mean, double weights, int dtype)
{
    return !mean ? 1.0 : weights == 0.0 ? (double)INFINITY : dtype == FST_F16 ? 1.0 : 1.0 / weights;
}

FST_FN float fst_loss_larger(float a, float b)
{
    return b > a ? b : a;
}

/* Of the batch. */
typedef struct {
    float *loss;    /* the sum of the rows', or with `mean` their mean */
    float *factors; /* of each row, in the gradient; and what that is still to be multiplied by */
} fst_loss_result;

FST_FN void fst_loss_result_write(fst_loss_result result, int mean, double losses, double weights,
                                  int dtype)
{
    const float factor = (float)(1.0 / weights);
    const int later = mean && dtype == FST_F16;
    *result.loss = (float)(mean ? losses / weights : losses);
    result.factors[0] = mean && !later ? factor : 1.0f;
    result.factors[1] = later && weights != 0.0 ? factor : 1.0f;
}

/* What the sums of a strip count from, where `most` is the largest logit up to its end. */
FST_FN float fst_loss_origin(float most)
{
    return most > -INFINITY ? most : 0.0f;
}

/* Adds a strip with this largest logit; `before` logits of the row came before it. */
FST_FN void fst_loss_add(fst_loss_row *row, float most, double sum, double distance, int64_t before)
{
    if (most > row->most) {
        const float from = fst_loss_origin(row->most), to = fst_loss_origin(most);
        row->sum *= (double)fst_softmax_exp(row->most - most);
        row->distance += (double)before * ((double)from - (double)to);
        row->most = most;
    }
    row->sum += sum;
    row->distance += distance;
}

FST_FN fst_loss_found fst_loss_finish(const fst_loss_row *row, const fst_loss_target *target)
{
    const int is_good = row->sum >= 1.0;
    const double log_sum = is_good ? fst_log(row->sum) : (double)NAN;
    const float sum = is_good ? (float)row->sum : NAN;
    const double from_target = log_sum - ((double)target->logit - (double)row->most);
    const double of_target = (1.0 - target->smoothing) * target->weight * target->factor;
    const double of_all = target->counts ? target->smoothing * target->factor : 0.0;
    double loss = (1.0 - target->smoothing) * target->weight * from_target;
    fst_loss_found found;
    if (target->smoothing != 0.0)
        loss += target->smoothing * (log_sum - row->distance / (double)target->classes);
    found.loss = target->counts ? (float)loss : 0.0f;
    found.likelihood = target->counts ? fst_softmax_exp((float)-from_target) : 0.0f;
    found.most = row->most;
    found.factor = (float)((of_target + of_all) / (double)sum);
    found.share = (float)(of_all / (double)target->classes);
    found.of_target = (float)of_target;
    if (!target->counts) { /* also where `factor` is infinite */
        found.factor = is_good ? 0.0f : NAN;
        found.share = found.of_target = 0.0f;
    }
    return found;
}
