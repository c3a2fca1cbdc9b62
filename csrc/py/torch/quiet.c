/* Sections of C in which no Python code runs. */
#include "py/torch/quiet.h"

void fst_quiet_begin(fst_tensors *tensors)
{
    if (tensors->quiet++ == 0)
        tensors->collects = PyGC_Disable();
}

void fst_quiet_end(fst_tensors *tensors)
{
    if (--tensors->quiet == 0 && tensors->collects)
        PyGC_Enable();
}

int fst_quiet_pause(fst_tensors *tensors)
{
    const int paused = tensors->quiet > 0;
    if (paused)
        fst_quiet_end(tensors);
    return paused;
}

void fst_quiet_resume(fst_tensors *tensors, int paused)
{
    if (paused)
        fst_quiet_begin(tensors);
}

void fst_quiet_resume_after_python(fst_tensors *tensors, int paused)
{
    fst_quiet_resume(tensors, paused);
    /* Set only now: the Python code may have called a function that clears it. */
    tensors->ran_python = 1;
}

fst_released_gil fst_quiet_release_gil(fst_tensors *tensors)
{
    const int paused = fst_quiet_pause(tensors);
    return (fst_released_gil){.thread = PyEval_SaveThread(), .paused = paused};
}

void fst_quiet_acquire_gil(fst_tensors *tensors, fst_released_gil released)
{
    PyEval_RestoreThread(released.thread);
    fst_quiet_resume(tensors, released.paused);
}
