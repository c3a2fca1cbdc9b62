/* loss_pass.h - the cross-entropy of a batch of logits, and its gradient. */
#ifndef FST_CORE_LOSS_PASS_H
#define FST_CORE_LOSS_PASS_H

#include "base/status.h"
#include "cpu/kernels.h"

/* Chooses the kernels once, at start-up. */
void fst_loss_use(const fst_cpu_kernels *kernels);

/* Whether every target is ignored or a class. */
int fst_loss_has_classes(const fst_loss_batch *batch);

/* Fills `losses`, `likelihoods`, and `slope` if there is one. Adds up the losses and the weights of
 * the rows. The slope is that of the losses' sum, or with `mean` of their mean; in fp16, whose
 * range is small, this times the sum of the weights. `factor` is not read. */
fst_code fst_loss_run(const fst_loss_batch *batch, int mean, double *total, double *weights,
                      fst_status *status);

#endif
