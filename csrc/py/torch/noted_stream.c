/* Whether torch's current stream lasts as long as the process (gpu/streams.h). */
#include "gpu/streams.h"
#include "py/torch/quiet.h"

int fst_stream_is_new(const fst_tensors *tensors, const void *stream)
{
    return tensors->stream_lasts && fst_gpu_stream_life(stream) == FST_STREAM_UNKNOWN;
}

int fst_stream_note(fst_tensors *tensors, int device, const void *stream, fst_problem *problem)
{
    if (!fst_stream_is_new(tensors, stream))
        return 0;
    const int paused = fst_quiet_pause(tensors);
    PyObject *function = Py_NewRef(tensors->stream_lasts); /* it may set another one */
    PyObject *answer =
        PyObject_CallFunction(function, "iK", device, (unsigned long long)(uintptr_t)stream);
    const int lasts = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_DECREF(function);
    fst_quiet_resume_after_python(tensors, paused);
    if (lasts < 0)
        return fst_problem_from_error(problem, "device");
    fst_gpu_note_stream(stream, lasts);
    return 0;
}
