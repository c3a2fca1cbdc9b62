/* quiet.h - stretches of C in which no Python code runs.
 *
 * A step reads addresses of thousands of tensors and then works there. Python code in between could
 * free that memory, so the stretch from the first address to the last pass has the collector off:
 * up to CPython 3.11 it runs, with any finalizer, whenever a container is allocated. What must run
 * Python code in a stretch, or let go of the GIL, pauses it, and sets `ran_python` if what was read
 * may have changed: it is then read again. */
#ifndef FST_PY_TORCH_QUIET_H
#define FST_PY_TORCH_QUIET_H

#include "py/torch/tensor.h"

enum {
    /* How often addresses are read where Python code runs in between. Code that runs each time is
     * that of a subclass or mode: a tensor's own attributes. */
    FST_ATTEMPTS = 4,
    /* Elements up to which a step or a pass keeps the GIL: it takes less than a millisecond. */
    FST_SHORT_STEP = 1 << 20,
};

/* Around a stretch. Where Python code runs in one after all, stretches nest and overlap: the
 * collector is on again when the last of them has ended. */
void fst_quiet_begin(fst_tensors *tensors);
void fst_quiet_end(fst_tensors *tensors);

/* Around what is not quiet, in a stretch or not; `resume` takes what `pause` returned. Other
 * stretches may lie in between, of this thread or of others. */
int fst_quiet_pause(fst_tensors *tensors);
void fst_quiet_resume(fst_tensors *tensors, int paused);

/* The same around what runs Python code: what was read before must be read again. */
void fst_quiet_resume_after_python(fst_tensors *tensors, int paused);

/* Lets go of the GIL in a stretch. */
typedef struct {
    PyThreadState *thread;
    int paused;
} fst_released_gil;

fst_released_gil fst_quiet_release_gil(fst_tensors *tensors);
void fst_quiet_acquire_gil(fst_tensors *tensors, fst_released_gil released);

#endif
