/* loss_rows.h - a batch of rows of logits, for which a cross-entropy is computed. */
#ifndef FST_CPU_LOSS_ROWS_H
#define FST_CPU_LOSS_ROWS_H

#include <stdint.h>

#include "base/dtype.h"

/* Strides are in elements. The elements of a row lie one after another. */
typedef struct {
    const char *logits;
    int64_t rows, classes, stride;
    fst_dtype dtype; /* not fp64 */
    const int64_t *target;
    int64_t target_stride;
    int64_t ignored;          /* the target of rows that count nothing */
    const float *weight;      /* one per class; NULL: all are 1 */
    double smoothing;         /* the share of all classes in each target */
    float *most, *sum;        /* per row: the largest logit, and the sum of e^(logit - most) */
    float *losses;            /* of forward */
    const float *grad_losses; /* of backward: each row's gradient, times `factor` */
    int64_t grad_stride;
    double factor;
    char *grad; /* of the logits, row after row, in their dtype */
} fst_loss_batch;

/* The class of a row, or `ignored`. Another thread may write targets after they were checked, so
 * the class is read once, and one that does not exist is ignored. */
static inline int64_t fst_loss_target(const fst_loss_batch *b, int64_t row)
{
    const int64_t target = *(const volatile int64_t *)(b->target + row * b->target_stride);
    return target >= 0 && target < b->classes ? target : b->ignored;
}

/* Rows [begin, end). Targets are checked before. */
typedef struct {
    void (*forward)(const fst_loss_batch *batch, int64_t begin, int64_t end);
    void (*backward)(const fst_loss_batch *batch, int64_t begin, int64_t end);
} fst_loss_loops;

#endif
