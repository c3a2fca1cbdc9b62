/* The type faststep._C.Gather: threads gather batches of rows into memory that is reused. */
#include "py/load/gather.h"

enum { PATIENCE = 50 }; /* milliseconds between two looks at Python's signals */

static PyObject *gather_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fst_module *state = PyType_GetModuleState(type);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fst_status status = {0};
    PyObject *slots, *fields, *nodes, *owner;
    unsigned threads;
    int may_wait;
    if (keywords && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Gather() takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!O!IpO", state->slots_type, &slots, &PyTuple_Type, &fields,
                          &PyTuple_Type, &nodes, &threads, &may_wait, &owner))
        return NULL;
    fst_gather_object *self = (fst_gather_object *)alloc(type, 0);
    if (!self)
        return NULL;
    self->moves = fst_hold_moves();
    self->slots = (fst_slots_object *)Py_NewRef(slots);
    self->owner = Py_NewRef(owner);
    self->outputs = PyList_New(0);
    self->api = fst_torch_api(state);
    if (!self->outputs || !self->api || fst_gather_parse(state, self, fields, nodes)) {
        Py_DECREF(self);
        return NULL;
    }
    self->batcher = fst_batcher_new(&self->table, self->slots->pool, threads, may_wait, &status);
    if (!self->batcher) {
        Py_DECREF(self);
        return fst_raise(&status);
    }
    return (PyObject *)self;
}

static void end_batcher(fst_gather_object *self)
{
    fst_batcher *batcher = self->batcher;
    self->batcher = NULL;
    if (!batcher)
        return;
    Py_BEGIN_ALLOW_THREADS
    fst_batcher_free(batcher);
    Py_END_ALLOW_THREADS
}

static void gather_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    fst_gather_object *self = (fst_gather_object *)object;
    end_batcher(self); /* ends the threads before the memory that they write to */
    fst_gather_forget(self);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int is_usable(const fst_gather_object *self)
{
    if (self->batcher && !self->busy)
        return 1;
    PyErr_SetString(PyExc_RuntimeError,
                    self->batcher ? "another thread is in this Gather" : "this Gather is closed");
    return 0;
}

static PyObject *add(fst_gather_object *self, const int64_t *indices, Py_ssize_t count,
                     PyObject *outputs)
{
    fst_module *state = PyType_GetModuleState(Py_TYPE(self));
    fst_status status = {0};
    uint64_t number = 0;
    char **addresses = NULL;
    if (!fst_gather_is_same(state, self))
        return Py_NewRef(Py_None);
    const Py_ssize_t queued = PyList_Size(self->outputs);
    if (outputs != Py_None) {
        if (!(addresses = PyMem_Calloc(self->table.field_count, sizeof *addresses)))
            return PyErr_NoMemory();
        if (fst_gather_read_outputs(state, self, outputs, count, addresses)) {
            PyMem_Free(addresses);
            return NULL;
        }
    }
    int failed = PyList_Append(self->outputs, outputs); /* kept before a thread writes there */
    if (!failed) {
        fst_batcher_add(self->batcher, indices, (size_t)count, addresses, &number, &status);
        if (!number)
            failed = PyList_SetSlice(self->outputs, queued, queued + 1, NULL);
    }
    PyMem_Free(addresses);
    if (status.code)
        return fst_raise(&status);
    return failed ? NULL : PyLong_FromUnsignedLongLong(number);
}

static PyObject *submit_sequence(fst_gather_object *self, PyObject *sequence, Py_ssize_t count,
                                 PyObject *outputs)
{
    int64_t *indices = PyMem_Malloc(((size_t)count + 1) * sizeof *indices);
    PyObject *number = NULL;
    if (!indices)
        return PyErr_NoMemory();
    if (fst_copy_ints(sequence, indices, count))
        number = add(self, indices, count, outputs);
    else if (!PyErr_Occurred())
        number = PyLong_FromLong(0);
    PyMem_Free(indices);
    return number;
}

static PyObject *gather_submit(PyObject *object, PyObject *args)
{
    fst_gather_object *self = (fst_gather_object *)object;
    PyObject *indices, *outputs = Py_None;
    Py_ssize_t start = 0, count = -1, all = 0;
    if (!PyArg_ParseTuple(args, "O|nnO", &indices, &start, &count, &outputs) || !is_usable(self))
        return NULL;
    if ((all = fst_sequence_size(indices)) >= 0)
        return submit_sequence(self, indices, all, outputs);
    int64_t *places =
        fst_read_indices(PyType_GetModuleState(Py_TYPE(object)), self->api, indices, &all);
    if (!places && PyErr_Occurred())
        return NULL;
    if (count < 0)
        count = all - start;
    if (start < 0 || count < 0 || start > all - count)
        return PyErr_Format(PyExc_ValueError, "no %zd indices from %zd on among %zd", count, start,
                            all);
    return add(self, places + start, count, outputs);
}

/* Makes a tensor over a slot, which it takes over in any case. */
static PyObject *tensor_over(const fst_dl_api *api, const fst_field_form *form, size_t rows,
                             fst_slot *slot)
{
    int64_t shape[FST_MAX_ROW_DIMS + 1] = {(int64_t)rows};
    for (int d = 0; d < form->row_dims; d++)
        shape[d + 1] = form->row_shape[d];
    return fst_slot_tensor(api, form->dtype, form->row_dims + 1, shape, NULL, slot);
}

static PyObject *tensors_of(fst_gather_object *self)
{
    const size_t fields = self->table.field_count;
    fst_slot **slots = PyMem_Calloc(fields, sizeof(fst_slot *));
    PyObject *given = slots ? PyList_GetItem(self->outputs, 0) : NULL; /* borrowed */
    const int in_slots = given == Py_None;
    Py_XINCREF(given); /* up to CPython 3.11 the collector runs here */
    PyObject *list = in_slots ? PyList_New((Py_ssize_t)fields)
                     : given  ? PySequence_List(given)
                              : NULL;
    Py_XDECREF(given);
    if (!list || PyList_SetSlice(self->outputs, 0, 1, NULL)) {
        Py_XDECREF(list);
        PyMem_Free(slots);
        return slots ? NULL : PyErr_NoMemory();
    }
    const size_t rows = fst_batcher_take(self->batcher, slots);
    for (size_t f = 0; in_slots && f < fields; f++) {
        if (!list) { /* an earlier field failed */
            fst_slot_give_back(slots[f]);
            continue;
        }
        PyObject *tensor = tensor_over(self->api, &self->forms[f], rows, slots[f]);
        if (!tensor || PyList_SetItem(list, (Py_ssize_t)f, tensor))
            Py_CLEAR(list);
    }
    PyMem_Free(slots);
    return list;
}

/* Waits for the oldest batch, without the GIL; 0, or -1 with a Python error. */
static int await_oldest(fst_gather_object *self)
{
    fst_status status = {0};
    int done = 0;
    while (!done) {
        Py_BEGIN_ALLOW_THREADS
        fst_batcher_wait(self->batcher, PATIENCE, &done, &status);
        Py_END_ALLOW_THREADS
        if (status.code)
            fst_raise(&status);
        if (status.code || (!done && PyErr_CheckSignals()))
            return -1;
    }
    return 0;
}

/* Drops older batches: their numbers never reached the caller, because a signal handler raised. */
static PyObject *take(fst_gather_object *self, uint64_t number)
{
    uint64_t oldest = 0;
    while ((oldest = fst_batcher_oldest(self->batcher)) && oldest <= number) {
        PyObject *list = await_oldest(self) ? NULL : tensors_of(self);
        if (!list || oldest == number)
            return list;
        Py_DECREF(list);
    }
    return Py_NewRef(Py_None);
}

/* take(number). Python code that runs meanwhile, for a signal or in a finalizer, is refused as
 * other threads are. */
static PyObject *gather_take(PyObject *object, PyObject *wanted)
{
    fst_gather_object *self = (fst_gather_object *)object;
    const uint64_t number = PyLong_AsUnsignedLongLong(wanted);
    if (PyErr_Occurred() || !is_usable(self))
        return NULL;
    self->busy = 1;
    PyObject *list = take(self, number);
    self->busy = 0;
    return list;
}

static PyObject *gather_queued(PyObject *object, PyObject *unused)
{
    const fst_gather_object *self = (fst_gather_object *)object;
    (void)unused;
    return PyLong_FromSize_t(self->batcher ? fst_batcher_queued(self->batcher) : 0);
}

static PyObject *gather_close(PyObject *object, PyObject *unused)
{
    fst_gather_object *self = (fst_gather_object *)object;
    (void)unused;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in this Gather");
        return NULL;
    }
    end_batcher(self);
    if (PyList_SetSlice(self->outputs, 0, PyList_Size(self->outputs), NULL))
        return NULL;
    return Py_NewRef(Py_None);
}

static PyMethodDef gather_methods[] = {
    {"close", gather_close, METH_NOARGS,
     FST_DOC("close($self, /)", "End the threads. Nothing else can be done after that.")},
    {"queued", gather_queued, METH_NOARGS,
     FST_DOC("queued($self, /)", "The number of batches that were asked for and not taken.")},
    {"submit", gather_submit, METH_VARARGS,
     FST_DOC("submit($self, indices, start=0, count=-1, outputs=None, /)",
             "Ask for the batch of these indices, and return its number. 0 means that an index has "
             "no sample, and nothing was done.")},
    {"take", gather_take, METH_O,
     FST_DOC("take($self, number, /)",
             "Wait for a batch, and return a tensor for each field. Older batches are dropped.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gather_slots[] = {
    {Py_tp_doc, FST_DOC("Gather(slots, fields, nodes, threads, eager, owner, /)",
                        "Gathers batches of rows in threads, in the order they were asked for.")},
    {Py_tp_new, gather_new},
    {Py_tp_dealloc, gather_dealloc},
    {Py_tp_methods, gather_methods},
    {0, NULL},
};

PyType_Spec fst_gather_spec = {
    .name = "faststep._C.Gather",
    .basicsize = sizeof(fst_gather_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = gather_slots,
};
