#include "core/loss_pass.h"

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

static void run_forward(int64_t begin, int64_t end, void *batch)
{
    kernels->loss->forward(batch, begin, end);
}

static void run_backward(int64_t begin, int64_t end, void *batch)
{
    kernels->loss->backward(batch, begin, end);
}

fst_code fst_loss_forward(const fst_loss_batch *batch, double *total, double *weights,
                          fst_status *status)
{
    fst_loss_batch b = *batch;
    if (fst_parallel_for(b.rows, GRAIN / b.classes + 1, run_forward, &b, status))
        return status->code;
    *total = *weights = 0.0;
    for (int64_t row = 0; row < b.rows; row++) {
        const int64_t target = fst_loss_target(&b, row);
        *total += (double)b.losses[row];
        if (target != b.ignored)
            *weights += b.weight ? (double)b.weight[target] : 1.0;
    }
    return FST_OK;
}

fst_code fst_loss_backward(const fst_loss_batch *batch, fst_status *status)
{
    fst_loss_batch b = *batch;
    return fst_parallel_for(b.rows, GRAIN / b.classes + 1, run_backward, &b, status);
}
