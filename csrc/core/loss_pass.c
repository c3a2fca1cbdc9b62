#include "core/loss_pass.h"

#include <math.h>

#include "cpu/parallel.h"

enum { GRAIN = 1 << 15 }; /* logits of the smallest part worth a thread: some 20 microseconds */

static const fst_cpu_kernels *kernels;

void fst_loss_use(const fst_cpu_kernels *chosen)
{
    kernels = chosen;
}

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
    kernels->loss(batch, begin, end);
}

fst_code fst_loss_run(const fst_loss_batch *batch, int mean, double *total, double *weights,
                      fst_status *status)
{
    fst_loss_batch b = *batch;
    *total = *weights = 0.0;
    for (int64_t row = 0; row < b.rows; row++)
        *weights += fst_loss_weight(&b, fst_loss_target(&b, row));
    b.factor = 1.0;
    if (mean && *weights == 0.0)
        b.factor = (double)INFINITY;
    else if (mean && b.dtype != FST_F16)
        b.factor = 1.0 / *weights;
    if (fst_parallel_for(b.rows, GRAIN / b.classes + 1, run, &b, status))
        return status->code;
    for (int64_t row = 0; row < b.rows; row++)
        *total += (double)b.losses[row];
    return FST_OK;
}
