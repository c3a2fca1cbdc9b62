/* Functions of faststep._C on the memory that stays with the process. */
#include <stdint.h>

#include "memory/retain.h"
#include "py/module.h"

/* retain_memory(limit, group, version): limit < 0 is none; group is a folder or None. */
PyObject *fst_py_retain_memory(PyObject *module, PyObject *args)
{
    Py_ssize_t limit;
    const char *folder;
    int version;
    fst_cgroup group;
    fst_status status = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "nzi", &limit, &folder, &version))
        return NULL;
    if (version != 1 && version != 2)
        return PyErr_Format(PyExc_ValueError, "control groups have no version %d", version);
    if (folder && fst_cgroup_at(&group, folder, version))
        return PyErr_Format(PyExc_ValueError, "the control group's path is too long: %s", folder);
    if (fst_retain(limit < 0 ? SIZE_MAX : (size_t)limit, folder ? &group : NULL, &status))
        return fst_raise(&status);
    return Py_NewRef(Py_None);
}

PyObject *fst_py_release_memory(PyObject *module, PyObject *unused)
{
    size_t bytes;
    (void)module, (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    bytes = fst_retain_release();
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(bytes);
}

PyObject *fst_py_end_retaining(PyObject *module, PyObject *unused)
{
    size_t bytes;
    (void)module, (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    bytes = fst_retain_undo();
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(bytes);
}

/* (active, limit or None, used, kept, peak, blocks, fresh) */
PyObject *fst_py_retained_memory(PyObject *module, PyObject *unused)
{
    const fst_retain_counts counts = fst_retain_count();
    PyObject *limit;
    (void)module, (void)unused;
    limit = counts.limit == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(counts.limit);
    if (!limit)
        return NULL;
    return Py_BuildValue("NNnnnnn", PyBool_FromLong(counts.active), limit,
                         (Py_ssize_t)counts.heap.used, (Py_ssize_t)counts.heap.kept,
                         (Py_ssize_t)counts.heap.peak, (Py_ssize_t)counts.heap.blocks,
                         (Py_ssize_t)counts.heap.fresh);
}

PyObject *fst_py_foreign_allocator(PyObject *module, PyObject *unused)
{
    const char *file = fst_retain_stranger();
    (void)module, (void)unused;
    return file ? PyUnicode_DecodeFSDefault(file) : Py_NewRef(Py_None);
}
