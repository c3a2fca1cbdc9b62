/* loss_rows.h - a batch of rows of logits, for which a cross-entropy is computed. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"

/* Strides are in elements. The elements of a row lie one after another. */
typedef struct {
    const char *logits;
    int64_t rows, classes, stride;
    fst_dtype dtype; /* not fp64 */
    const int64_t *target;
    int64_t target_stride;
    int64_t ignored;             /* the target of rows that count nothing */
    const float *weight;         /* one per class; NULL: all are 1 */
    double smoothing;            /* the share of all classes in each target */
    float *losses, *likelihoods; /* of each row: that is the softmax of its target, or 0 */
    char *slope;   /* the gradient of their sum, row after row, in the logits' dtype; or NULL */
    double factor; /* of the slope */
} fst_loss_batch;

/* The class of a row, or `ignored`. Another thread may write targets after they were checked, so
 * the class is read once, and one that does not exist is ignored. */
static inline int64_t fst_loss_class(const fst_loss_batch *b, int64_t row)
{
    const int64_t target = *(const volatile int64_t *)(b->target + row * b->target_stride);
    return target >= 0 && target < b->classes ? target : b->ignored;
}

/* What a row counts. */
static inline double fst_loss_weight(const fst_loss_batch *b, int64_t target)
{
    return target == b->ignored ? 0.0 : b->weight ? (double)b->weight[target] : 1.0;
}

/* Rows [begin, end). Targets are checked before. */
typedef void fst_loss_fn(const fst_loss_batch *batch, int64_t begin, int64_t end);
