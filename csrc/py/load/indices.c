/* permute: writes the indices of samples into a tensor. */
#include "io/shuffle.h"
#include "py/load/arguments.h"

PyObject *fst_py_permute(PyObject *module, PyObject *args)
{
    unsigned long long length, seed, epoch, start, step;
    PyObject *out;
    Py_ssize_t count = 0;
    fst_shuffle shuffle;
    if (!PyArg_ParseTuple(args, "OKKKKK", &out, &length, &seed, &epoch, &start, &step))
        return NULL;
    if (length < 1 || length > INT64_MAX || start > INT64_MAX || step > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "no permutation of %llu numbers from place %llu on",
                            length, start);
    int64_t *indices = fst_read_indices(fst_module_state(module), out, &count);
    if (!indices && PyErr_Occurred())
        return NULL;
    fst_shuffle_init(&shuffle, length, seed, epoch);
    for (Py_ssize_t i = 0; i < count; i++, start += step)
        indices[i] = (int64_t)fst_shuffle_at(&shuffle, start % length);
    return Py_NewRef(Py_None);
}
