#include "core/loss_pass.h"

#include "cpu/parallel.h"
#include "rules/tree.h"

enum { GRAIN = 1 << 15 }; /* logits of the smallest part worth a thread: some 20 microseconds */

int fst_loss_has_classes(const fst_loss_batch *b)
{
    for (int64_t row = 0; row < b->rows; row++) {
        const int64_t target = b->target[row * b->target_stride];
        if (target != b->ignored && (target < 0 || target >= b->classes))
            return 0;
    }
    return 1;
}

static void run(int64_t begin, int64_t end, void *batch)
{
    fst_cpu->loss(batch, begin, end);
}

/* Adds up lanes of rows, by the tree of rules/tree.h. */
static double folded(const double *lanes)
{
    return fst_cpu->combine(lanes, FST_LANES, FST_NORM_ABS);
}

fst_code fst_loss_run(const fst_loss_batch *batch, int mean, fst_loss_result result,
                      fst_status *status)
{
    fst_loss_batch b = *batch;
    double lanes[FST_LANES] = {0.0}, losses[FST_LANES] = {0.0};
    for (int64_t row = 0; row < b.rows; row++)
        lanes[row % FST_LANES] += fst_loss_weight(&b, fst_loss_class(&b, row));
    const double weights = folded(lanes);
    b.factor = fst_loss_factor(mean, weights, b.dtype);
    if (fst_parallel_for(b.rows, GRAIN / b.classes + 1, run, &b, status))
        return status->code;
    for (int64_t row = 0; row < b.rows; row++)
        losses[row % FST_LANES] += (double)b.losses[row];
    fst_loss_result_write(result, mean, folded(losses), weights, b.dtype);
    return FST_OK;
}
