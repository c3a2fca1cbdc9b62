/* Methods of Arena on page-locked blocks. */
#include "gpu/context.h"
#include "io/arena_lock.h"
#include "py/load/arena_object.h"

PyObject *fst_py_keep_locked_memory(PyObject *module, PyObject *whether)
{
    const int keep = PyObject_IsTrue(whether);
    (void)module;
    if (keep < 0)
        return NULL;
    fst_arena_keep_locked(keep);
    return Py_NewRef(Py_None);
}

PyObject *fst_py_arena_prepare_locks(PyObject *object, PyObject *device)
{
    const fst_arena_object *self = (fst_arena_object *)object;
    const long ordinal = PyLong_AsLong(device);
    fst_status status = {0};
    if (PyErr_Occurred())
        return NULL;
    if (ordinal < 0 || ordinal >= FST_GPU_DEVICES)
        return PyErr_Format(PyExc_ValueError, "no CUDA device %ld", ordinal);
    const fst_arena_locker locker = {fst_gpu_lock_host, fst_gpu_unlock_host, (int)ordinal};
    Py_BEGIN_ALLOW_THREADS
    fst_arena_prepare_locks(self->arena, locker, &status);
    Py_END_ALLOW_THREADS
    return status.code ? fst_raise(&status) : Py_NewRef(Py_None);
}

PyObject *fst_py_arena_locked(PyObject *object, PyObject *args)
{
    const fst_arena_object *self = (fst_arena_object *)object;
    fst_status status = {0};
    unsigned long long address;
    Py_ssize_t size;
    size_t block = 0;
    void *locked = NULL;
    if (!PyArg_ParseTuple(args, "Kn", &address, &size))
        return NULL;
    if (size < 0)
        return PyErr_Format(PyExc_ValueError, "no %zd bytes", size);
    Py_BEGIN_ALLOW_THREADS /* locking takes milliseconds */
    fst_arena_lock(self->arena, (const void *)(uintptr_t)address, (size_t)size, &block, &locked,
                   &status);
    Py_END_ALLOW_THREADS
    if (status.code)
        return fst_raise(&status);
    if (!locked)
        return Py_NewRef(Py_None);
    return fst_arena_tensor(self, block, locked, (size_t)size, fst_arena_end_lock);
}
