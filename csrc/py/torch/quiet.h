/* quiet.h - sections of C in which no Python code runs.
 *
 * A step reads the addresses of thousands of tensors and then works on that memory. Python code
 * in between could free it. Up to CPython 3.11 the garbage collector, and with it any finalizer,
 * may run whenever a container is allocated, so it is off in a quiet section. Code that must run
 * Python or release the GIL pauses the section. It sets `ran_python` if addresses may have
 * changed, and the caller then reads them again. */
#pragma once

#include "py/torch/tensor.h"

enum {
    /* How often addresses are read at most, and once more so often after the check for tensors
     * of inference mode has run Python code. Python code that runs every time is that of a
     * subclass or a mode, and only reads the tensor's own attributes. */
    FST_ATTEMPTS = 4,
    /* Up to so many elements a step or a pass keeps the GIL: it takes less than a millisecond. */
    FST_SHORT_STEP = 1 << 20,
};

/* Begin and end a section. Sections of several threads may overlap; the collector is on again
 * when the last one has ended. */
void fst_quiet_begin(fst_tensors *tensors);
void fst_quiet_end(fst_tensors *tensors);

/* Pause a section, if one is open, and resume it with what `pause` returned. Other sections may
 * begin and end in between. */
int fst_quiet_pause(fst_tensors *tensors);
void fst_quiet_resume(fst_tensors *tensors, int paused);

/* Resumes after Python code has run: addresses that were read before must be read again. */
void fst_quiet_resume_after_python(fst_tensors *tensors, int paused);

/* The GIL as it was released within a section. */
typedef struct {
    PyThreadState *thread;
    int paused;
} fst_released_gil;

fst_released_gil fst_quiet_release_gil(fst_tensors *tensors);
void fst_quiet_acquire_gil(fst_tensors *tensors, fst_released_gil released);
