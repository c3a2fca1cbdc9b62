/* The type faststep._C.Slots, and tensors over its slots. */
#include "py/load/gather.h"

static void end_slot(void *slot)
{
    fst_slot_give_back(slot);
}

PyObject *fst_slot_tensor(const fst_module *state, fst_dl_dtype dtype, int ndim, int64_t *shape,
                          int64_t *strides, fst_slot *slot)
{
    const fst_dl_tensor form = {.data = slot->data,
                                .device = {FST_DL_CPU, 0},
                                .ndim = ndim,
                                .dtype = dtype,
                                .shape = shape,
                                .strides = strides};
    return fst_export_tensor(state, &form, end_slot, slot);
}

static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fst_status status = {0};
    fst_slots_object *self = PyArg_ParseTuple(args, "") ? fst_object_new(type, keywords) : NULL;
    if (self && !(self->pool = fst_slots_new(&status))) {
        Py_DECREF(self);
        return fst_raise(&status);
    }
    return (PyObject *)self;
}

static void slots_dealloc(PyObject *object)
{
    fst_slots_object *self = (fst_slots_object *)object;
    if (self->pool)
        fst_slots_close(self->pool);
    fst_object_free(object);
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

/* Whether a dense tensor with `count` rows like those of `form` can be, and its strides stay
 * inside. *bytes becomes its size. */
static int is_possible(const fst_dl_tensor *form, int64_t count, int64_t *bytes)
{
    int64_t items = count, last = 0; /* offset of the last element */
    if (count < 0 || form->ndim < 1 || form->ndim > FST_MAX_ROW_DIMS + 1 || form->dtype.bits % 8)
        return 0;
    for (int d = 1; d < form->ndim; d++)
        if (__builtin_mul_overflow(items, form->shape[d], &items))
            return 0;
    if (__builtin_mul_overflow(items, form->dtype.bits / 8 * form->dtype.lanes, bytes))
        return 0;
    for (int d = 0; d < form->ndim; d++) {
        const int64_t size = d ? form->shape[d] : count, stride = form->strides[d];
        if (size < 2 || items == 0)
            continue;
        if (stride < 0 || stride > (items - 1 - last) / (size - 1))
            return 0;
        last += (size - 1) * stride;
    }
    return 1;
}

static PyObject *slots_empty(PyObject *object, PyObject *args)
{
    fst_module *state = PyType_GetModuleState(Py_TYPE(object));
    fst_status status = {0};
    PyObject *like;
    fst_dl_tensor form;
    int64_t shape[FST_MAX_ROW_DIMS + 1], bytes;
    long long count;
    if (!PyArg_ParseTuple(args, "OL", &like, &count) || fst_read_tensor(state, like, &form))
        return NULL;
    if (!is_possible(&form, count, &bytes))
        return PyErr_Format(PyExc_ValueError, "no memory has %lld rows of that form", count);
    fst_slot *slot = fst_slots_take(((fst_slots_object *)object)->pool, (size_t)bytes, &status);
    if (!slot)
        return fst_raise(&status);
    memcpy(shape, form.shape, (size_t)form.ndim * sizeof *shape);
    shape[0] = count;
    return fst_slot_tensor(state, form.dtype, form.ndim, shape, form.strides, slot);
}

static PyMethodDef slots_methods[] = {
    {"counts", slots_counts, METH_NOARGS,
     FST_DOC("counts($self, /)", "The numbers of slots whose memory came from the system so far, "
                                 "of free slots, and of slots with a tensor.")},
    {"empty", slots_empty, METH_VARARGS,
     FST_DOC(
         "empty($self, like, rows, /)",
         "A tensor of this many rows, with the dtype, row shape and strides of a dense tensor.")},
    {"keep", slots_keep, METH_O,
     FST_DOC("keep($self, number, /)", "Keep at most this many free slots.")},
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
