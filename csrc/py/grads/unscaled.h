/* unscaled.h - the sums of squares that the last unscale_ took of large gradients, for a
 * clip_grad_norm_ that follows. They are where the norm is expected from, not what it is taken
 * from: whoever uses them measures again, chunk by chunk, see fst_clip_expected. So nothing here
 * fails: without memory, or where torch raises an error, nothing is expected. */
#ifndef FST_PY_GRADS_UNSCALED_H
#define FST_PY_GRADS_UNSCALED_H

#include "core/plan.h"
#include "py/module.h"

typedef struct fst_unscaled_grad {
    const void *data; /* never read: it may be gone */
    int64_t count, version;
    size_t first; /* of its chunks, in `partial` */
} fst_unscaled_grad;

/* Keeps the partial sums of the pass that a plan of gradients has just made. `grads` is the list of
 * the tensors that its spans are of. Keeps nothing where that is not worth the time, the sums are
 * not those of what was stored, or a tensor has no version counter. */
void fst_unscaled_keep(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                       PyObject *grads);

/* Takes the sums that the chunks of a sealed plan are expected to have: an array, to be freed by
 * PyMem_Free, or NULL where nothing is known of a gradient, or it was written or replaced since, as
 * far as version counters tell. */
double *fst_unscaled_take(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                          PyObject *grads);

void fst_unscaled_forget(fst_unscaled *self);

#endif
