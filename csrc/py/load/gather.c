/* The types faststep._C.Gather, whose threads gather rows into memory that is reused, and Batch. */
#include "py/load/gather.h"

enum { PATIENCE = 50 }; /* milliseconds between two looks at Python's signals */

static PyObject *gather_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fst_module *state = PyType_GetModuleState(type);
    fst_status status = {0};
    PyObject *slots, *fields, *nodes, *owner;
    unsigned threads;
    int may_wait;
    if (!PyArg_ParseTuple(args, "O!O!O!IpO", state->types[FST_SLOTS], &slots, &PyTuple_Type,
                          &fields, &PyTuple_Type, &nodes, &threads, &may_wait, &owner))
        return NULL;
    fst_gather_object *self = fst_object_new(type, keywords);
    if (!self)
        return NULL;
    self->moves = fst_hold_moves();
    self->slots = (fst_slots_object *)Py_NewRef(slots);
    self->owner = Py_NewRef(owner);
    if (fst_gather_parse(state, self, fields, nodes)) {
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

static void gather_dealloc(PyObject *object)
{
    fst_gather_object *self = (fst_gather_object *)object;
    if (self->batcher) { /* its threads end before the memory that they read */
        Py_BEGIN_ALLOW_THREADS
        fst_batcher_free(self->batcher);
        Py_END_ALLOW_THREADS
    }
    fst_gather_forget(self);
    Py_XDECREF(self->slots);
    Py_XDECREF(self->owner);
    fst_object_free(object);
}

/* A batch that was asked for. */
typedef struct {
    PyObject_HEAD
    fst_gather_object *gather;
    fst_batch *batch;  /* NULL once it is taken */
    PyObject *outputs; /* a tuple of tensors, or NULL */
} batch_object;

/* Makes the Python object of a batch, which it takes over in any case. */
static PyObject *new_batch(const fst_module *state, fst_gather_object *gather, fst_batch *batch,
                           PyObject *outputs)
{
    batch_object *self = fst_object_new(state->types[FST_BATCH], NULL);
    if (!self) {
        fst_batcher_drop(gather->batcher, batch);
        return NULL;
    }
    self->gather = (fst_gather_object *)Py_NewRef((PyObject *)gather);
    self->batch = batch;
    self->outputs = outputs == Py_None ? NULL : Py_NewRef(outputs);
    return (PyObject *)self;
}

static void batch_dealloc(PyObject *object)
{
    batch_object *self = (batch_object *)object;
    if (self->batch) {
        Py_BEGIN_ALLOW_THREADS
        fst_batcher_drop(self->gather->batcher, self->batch);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->gather);
    fst_object_free(object);
}

static PyObject *add(fst_gather_object *self, const int64_t *indices, Py_ssize_t count,
                     PyObject *outputs)
{
    fst_module *state = PyType_GetModuleState(Py_TYPE(self));
    fst_status status = {0};
    char **addresses = NULL;
    if (!fst_gather_is_same(state, self))
        return Py_NewRef(Py_None);
    if (outputs != Py_None) {
        if (!(addresses = PyMem_Calloc(self->table.field_count, sizeof *addresses)))
            return PyErr_NoMemory();
        if (fst_gather_read_outputs(state, self, outputs, count, addresses)) {
            PyMem_Free(addresses);
            return NULL;
        }
    }
    fst_batch *batch = fst_batcher_add(self->batcher, indices, (size_t)count, addresses, &status);
    PyMem_Free(addresses);
    if (batch)
        return new_batch(state, self, batch, outputs);
    return status.code ? fst_raise(&status) : Py_NewRef(Py_False);
}

static PyObject *submit_sequence(fst_gather_object *self, PyObject *sequence, Py_ssize_t count,
                                 PyObject *outputs)
{
    int64_t *indices = PyMem_Malloc(((size_t)count + 1) * sizeof *indices);
    PyObject *batch = NULL;
    if (!indices)
        return PyErr_NoMemory();
    if (fst_copy_ints(sequence, indices, count))
        batch = add(self, indices, count, outputs);
    else if (!PyErr_Occurred())
        batch = Py_NewRef(Py_False);
    PyMem_Free(indices);
    return batch;
}

static PyObject *gather_submit(PyObject *object, PyObject *args)
{
    fst_gather_object *self = (fst_gather_object *)object;
    PyObject *indices, *outputs = Py_None;
    Py_ssize_t start = 0, count = -1, all = 0;
    if (!PyArg_ParseTuple(args, "O|nnO", &indices, &start, &count, &outputs))
        return NULL;
    if ((all = fst_sequence_size(indices)) >= 0)
        return submit_sequence(self, indices, all, outputs);
    int64_t *places = fst_read_indices(PyType_GetModuleState(Py_TYPE(object)), indices, &all);
    if (!places && PyErr_Occurred())
        return NULL;
    if (count < 0 && start >= 0)
        count = all - start;
    if (start < 0 || count < 0 || start > all - count)
        return PyErr_Format(PyExc_ValueError, "no %zd indices from %zd on among %zd", count, start,
                            all);
    return add(self, places + start, count, outputs);
}

/* Makes a tensor over a slot, which it takes over in any case. */
static PyObject *tensor_over(const fst_module *state, const fst_field_form *form, size_t rows,
                             fst_slot *slot)
{
    int64_t shape[FST_MAX_ROW_DIMS + 1] = {(int64_t)rows};
    for (int d = 0; d < form->row_dims; d++)
        shape[d + 1] = form->row_shape[d];
    return fst_slot_tensor(state, form->dtype, form->row_dims + 1, shape, NULL, slot);
}

/* The tensors over the slots of a batch that is done, which it frees. */
static PyObject *tensors_of(fst_gather_object *self, fst_batch *batch)
{
    const fst_module *state = PyType_GetModuleState(Py_TYPE(self));
    const size_t fields = self->table.field_count;
    fst_slot **slots = PyMem_Calloc(fields, sizeof(fst_slot *));
    PyObject *list = slots ? PyList_New((Py_ssize_t)fields) : PyErr_NoMemory();
    if (!list) {
        PyMem_Free(slots);
        fst_batcher_drop(self->batcher, batch);
        return NULL;
    }
    const size_t rows = fst_batcher_take(self->batcher, batch, slots);
    for (size_t f = 0; f < fields; f++) {
        if (!list) { /* an earlier field failed */
            fst_slot_give_back(slots[f]);
            continue;
        }
        PyObject *tensor = tensor_over(state, &self->forms[f], rows, slots[f]);
        if (!tensor || PyList_SetItem(list, (Py_ssize_t)f, tensor))
            Py_CLEAR(list);
    }
    PyMem_Free(slots);
    return list;
}

/* Waits for a batch, without the GIL; 0, or -1 with a Python error. */
static int await(fst_batcher *batcher, fst_batch *batch)
{
    fst_status status = {0};
    int done = 0;
    while (!done) {
        Py_BEGIN_ALLOW_THREADS
        fst_batcher_wait(batcher, batch, PATIENCE, &done, &status);
        Py_END_ALLOW_THREADS
        if (status.code)
            fst_raise(&status);
        if (status.code || (!done && PyErr_CheckSignals()))
            return -1;
    }
    return 0;
}

/* take(). Code that runs meanwhile, for a signal or in another thread, finds that it was taken. */
static PyObject *batch_take(PyObject *object, PyObject *unused)
{
    batch_object *self = (batch_object *)object;
    fst_batch *batch = self->batch;
    (void)unused;
    if (!batch)
        return Py_NewRef(Py_None);
    self->batch = NULL;
    if (await(self->gather->batcher, batch)) {
        self->batch = batch;
        return NULL;
    }
    if (!self->outputs)
        return tensors_of(self->gather, batch);
    fst_batcher_drop(self->gather->batcher, batch);
    return PySequence_List(self->outputs);
}

static PyObject *gather_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    fst_batcher_end(((fst_gather_object *)object)->batcher);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyMethodDef gather_methods[] = {
    {"close", gather_close, METH_NOARGS,
     FST_DOC("close($self, /)", "End the threads. Batches are then gathered when they are taken.")},
    {"submit", gather_submit, METH_VARARGS,
     FST_DOC("submit($self, indices, start=0, count=-1, outputs=None, /)",
             "Ask for the Batch of these indices. False means that an index has no sample, and "
             "nothing was done.")},
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

static PyMethodDef batch_methods[] = {
    {"take", batch_take, METH_NOARGS,
     FST_DOC("take($self, /)",
             "Wait for the batch, and return a tensor for each field; None if it was taken.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_doc, "A batch that a Gather was asked for. It is dropped with its last reference."},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_methods, batch_methods},
    {0, NULL},
};

PyType_Spec fst_batch_spec = {
    .name = "faststep._C.Batch",
    .basicsize = sizeof(batch_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = batch_slots,
};
