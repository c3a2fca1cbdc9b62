/* The type faststep._C.Slots, and functions on lists of indices. */
#include "io/shuffle.h"
#include "py/gather.h"

PyObject *fst_py_copy_indices(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    const fst_dl_api *api = fst_torch_api(state);
    PyObject *sequence, *out;
    Py_ssize_t count = 0;
    if (!api || !PyArg_ParseTuple(args, "OO", &sequence, &out))
        return NULL;
    int64_t *indices = fst_read_indices(state, api, out, &count);
    if (!indices && PyErr_Occurred())
        return NULL;
    const int whole =
        fst_sequence_size(sequence) == count && fst_copy_ints(sequence, indices, count);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(whole);
}

PyObject *fst_py_permute(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    const fst_dl_api *api = fst_torch_api(state);
    unsigned long long length, seed, epoch, start, step;
    PyObject *out;
    Py_ssize_t count = 0;
    fst_shuffle shuffle;
    if (!api || !PyArg_ParseTuple(args, "OKKKKK", &out, &length, &seed, &epoch, &start, &step))
        return NULL;
    if (length < 1 || length > INT64_MAX || start > INT64_MAX || step > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "no permutation of %llu numbers from place %llu on",
                            length, start);
    int64_t *indices = fst_read_indices(state, api, out, &count);
    if (!indices && PyErr_Occurred())
        return NULL;
    fst_shuffle_init(&shuffle, length, seed, epoch);
    for (Py_ssize_t i = 0; i < count; i++, start += step)
        indices[i] = (int64_t)fst_shuffle_at(&shuffle, start % length);
    return Py_NewRef(Py_None);
}

static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fst_status status = {0};
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    if (PyTuple_Size(args) || (keywords && PyDict_Size(keywords))) {
        PyErr_SetString(PyExc_TypeError, "Slots() takes no arguments");
        return NULL;
    }
    fst_slots_object *self = (fst_slots_object *)alloc(type, 0);
    if (self && !(self->pool = fst_slots_new(&status))) {
        Py_DECREF(self);
        return fst_raise(&status);
    }
    return (PyObject *)self;
}

static void slots_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    fst_slots_object *self = (fst_slots_object *)object;
    if (self->pool)
        fst_slots_close(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *slots_keep(PyObject *object, PyObject *number)
{
    const size_t keep = PyLong_AsSize_t(number);
    if (keep == (size_t)-1 && PyErr_Occurred())
        return NULL;
    fst_slots_keep(((fst_slots_object *)object)->pool, keep);
    return Py_NewRef(Py_None);
}

static PyObject *slots_counts(PyObject *object, PyObject *unused)
{
    const fst_slots_counts counts = fst_slots_counted(((fst_slots_object *)object)->pool);
    (void)unused;
    return Py_BuildValue("nnn", (Py_ssize_t)counts.made, (Py_ssize_t)counts.free,
                         (Py_ssize_t)counts.held);
}

static PyMethodDef slots_methods[] = {
    {"counts", slots_counts, METH_NOARGS, NULL},
    {"keep", slots_keep, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_doc, "Memory for batches, used again when the tensors over it are gone."},
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, slots_methods},
    {0, NULL},
};

PyType_Spec fst_slots_spec = {
    .name = "faststep._C.Slots",
    .basicsize = sizeof(fst_slots_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots_slots,
};
