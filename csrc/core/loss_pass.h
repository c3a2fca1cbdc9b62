/* loss_pass.h - the cross-entropy of a batch of logits, and its gradient. */
#ifndef FST_CORE_LOSS_PASS_H
#define FST_CORE_LOSS_PASS_H

#include "base/status.h"
#include "cpu/kernels.h"

/* Chooses the kernels once, at start-up. */
void fst_loss_use(const fst_cpu_kernels *kernels);

/* Whether every target is ignored or a class. */
int fst_loss_has_classes(const fst_loss_batch *batch);

/* Fills `losses`, `most` and `sum`. Adds up the losses and the weights of the rows that count. */
fst_code fst_loss_forward(const fst_loss_batch *batch, double *total, double *weights,
                          fst_status *status);

/* Fills `grad`, from what forward has found. */
fst_code fst_loss_backward(const fst_loss_batch *batch, fst_status *status);

#endif
