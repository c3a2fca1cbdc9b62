/* loss_pass.h - the cross-entropy of a batch of logits, and its gradient. */
#pragma once

#include "base/status.h"
#include "cpu/kernels.h"
#include "rules/cross_entropy.h"

/* Whether every target is ignored or a class. */
int fst_loss_has_classes(const fst_loss_batch *batch);

/* Fills `losses`, `likelihoods`, `slope` if there is one, and `result`. `factor` is not read: see
 * fst_loss_factor. */
fst_code fst_loss_run(const fst_loss_batch *batch, int mean, fst_loss_result result,
                      fst_status *status);
