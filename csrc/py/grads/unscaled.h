/* unscaled.h - the sums of squares of large gradients that the last unscale_ measured, for a
 * clip_grad_norm_ that follows.
 *
 * clip_grad_norm_ measures every chunk again and only compares (fst_clip_expected), so a stale
 * sum cannot change its result. Nothing here fails: without memory, or where torch raises an
 * error, no sums are kept. */
#pragma once

#include "core/plan.h"
#include "py/module.h"

typedef struct fst_unscaled_grad {
    const void *data; /* never read, as the memory may be gone */
    int64_t count, version;
    size_t first; /* of its chunks, in `partial` */
} fst_unscaled_grad;

/* Keeps the partial sums of the pass that has just run over a plan of gradients. `grads` lists
 * the tensors of its spans. Keeps nothing where reuse would not pay, the sums are not those of
 * the stored values, or a tensor has no version counter. */
void fst_unscaled_keep(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                       PyObject *grads);

/* Takes the sums for the chunks of a sealed plan: an array to be freed by PyMem_Free. NULL if a
 * gradient is not known, or if it was written or replaced as far as version counters tell. */
double *fst_unscaled_take(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                          PyObject *grads);

void fst_unscaled_forget(fst_unscaled *self);
