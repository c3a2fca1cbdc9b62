/* The type faststep._C.Squares. */
#include "py/step/squares.h"

#include "py/docs.h"
#include "py/step/step_plan.h"
#include "py/torch/quiet.h"

/* measure(slot, param[, values]): True if there is a gradient that can be measured. */
static PyObject *squares_measure(PyObject *object, PyObject *args)
{
    fst_squares_object *self = (fst_squares_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    Py_ssize_t index;
    PyObject *param, *values = NULL;
    if (!PyArg_ParseTuple(args, "nO|O", &index, &param, &values))
        return NULL;
    fst_square *slot = fst_squares_at(self, index);
    if (!slot)
        return NULL;
    Py_CLEAR(slot->grad);
    PyObject *grad = values ? Py_NewRef(values) : fst_tensor_grad(&module->tensors, param);
    const int done = !grad             ? -1
                     : grad == Py_None ? 0
                                       : fst_squares_measure(module, self, index, param, grad);
    Py_XDECREF(grad);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* A gradient's address and version. Reading them may run Python code, which may move the slots. */
typedef struct {
    fst_view view;
    int64_t version;
    int is_tensor; /* in CPU memory; else there is no view */
} gradient;

/* Reads a gradient. Returns 0, or -1 with a Python error. */
static int ask(fst_tensors *tensors, PyObject *grad, gradient *found)
{
    fst_problem problem;
    *found = (gradient){.version = -1};
    if (grad == Py_None)
        return 0;
    for (int i = 0; i == 0 || (tensors->ran_python && i < FST_ATTEMPTS); i++) {
        tensors->ran_python = 0;
        found->is_tensor = !fst_tensor_view(tensors, grad, &found->view, &problem) &&
                           found->view.device == FST_HOST;
    }
    return found->is_tensor ? fst_tensor_version(tensors, grad, &found->version) : 0;
}

/* adopt(slot, param, version): see _C.pyi. */
static PyObject *squares_adopt(PyObject *object, PyObject *args)
{
    fst_squares_object *self = (fst_squares_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    Py_ssize_t index;
    long long expected;
    PyObject *param;
    gradient found;
    if (!PyArg_ParseTuple(args, "nOL", &index, &param, &expected))
        return NULL;
    PyObject *grad = fst_tensor_grad(&module->tensors, param);
    if (!grad)
        return NULL;
    const int failed = ask(&module->tensors, grad, &found);
    fst_square *slot = failed ? NULL : fst_squares_at(self, index);
    if (!slot) {
        Py_DECREF(grad);
        return NULL;
    }
    const int adopts = slot->grad && found.is_tensor && found.view.dtype == slot->dtype &&
                       fst_view_count(&found.view) == slot->count && found.version == expected;
    PyObject *before = grad; /* dropped last, as Python code may run then */
    if (adopts) {
        before = slot->grad;
        slot->grad = grad;
        slot->data = found.view.data;
        slot->version = found.version;
    }
    Py_DECREF(before);
    return PyBool_FromLong(adopts);
}

/* Why the measurement of a gradient cannot be used: a word, NULL if it can, or "" with a Python
 * error. */
static const char *problem_of(const fst_squares_object *self, fst_tensors *tensors, size_t index,
                              PyObject *grad)
{
    int64_t version;
    if (index >= self->slot_count || !self->slots[index].grad)
        return "unmeasured";
    if (self->slots[index].grad != grad)
        return "changed";
    if (fst_tensor_version(tensors, grad, &version))
        return "";
    const fst_square *slot =
        &self->slots[index]; /* the slots may have moved; their number never falls */
    if (slot->grad != grad || version != slot->version)
        return "changed";
    return slot->inv_scale != self->inv_scale ? "scale" : NULL;
}

/* The first such word for a list of parameters, and the parameter's index. */
static const char *problem_in(const fst_squares_object *self, fst_tensors *tensors,
                              PyObject *params, size_t slot, Py_ssize_t *index)
{
    const char *problem = NULL;
    for (*index = 0; !problem && *index < PyList_Size(params); ++*index) {
        PyObject *param = Py_NewRef(PyList_GetItem(params, *index));
        PyObject *grad = fst_tensor_grad(tensors, param);
        Py_DECREF(param);
        if (!grad)
            return "";
        if (grad != Py_None)
            problem = problem_of(self, tensors, slot + (size_t)*index, grad);
        Py_DECREF(grad);
    }
    *index -= problem != NULL;
    return problem;
}

/* Sets the scale that gradients are divided by from now on. Returns 0, or -1 with a TypeError. */
static int take_scale(fst_module *module, fst_squares_object *self, PyObject *scale)
{
    fst_problem problem;
    fst_view view = {0};
    if (scale != Py_None && fst_tensor_scalar(&module->tensors, scale, FST_HOST, &view, &problem)) {
        PyErr_Format(PyExc_TypeError, "grad_scale %s", problem.detail);
        return -1;
    }
    self->inv_scale = fst_inverse_of(&view);
    return 0;
}

/* expect(grad_scale): see _C.pyi. */
static PyObject *squares_expect(PyObject *object, PyObject *scale)
{
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    return take_scale(module, (fst_squares_object *)object, scale) ? NULL : Py_NewRef(Py_None);
}

/* check(param_lists, grad_scale): None, or (word, group, index) of the first gradient whose
 * measurement does not hold. */
static PyObject *squares_check(PyObject *object, PyObject *args)
{
    fst_squares_object *self = (fst_squares_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *lists, *scale;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &lists, &scale) ||
        take_scale(module, self, scale))
        return NULL;
    size_t slot = 0;
    for (Py_ssize_t group = 0; group < PyList_Size(lists); group++) {
        PyObject *params = PyList_GetItem(lists, group);
        Py_ssize_t index;
        if (!PyList_Check(params))
            return PyErr_Format(PyExc_TypeError, "group %zd is not a list", group);
        Py_INCREF(params);
        const char *word = problem_in(self, &module->tensors, params, slot, &index);
        slot += (size_t)PyList_Size(params);
        Py_DECREF(params);
        if (word)
            return *word ? Py_BuildValue("snn", word, group, index) : NULL;
    }
    return Py_NewRef(Py_None);
}

/* forget(): lets go of all gradients. */
static PyObject *squares_forget(PyObject *object, PyObject *unused)
{
    fst_squares_object *self = (fst_squares_object *)object;
    (void)unused;
    for (size_t i = 0; i < self->slot_count; i++)
        Py_CLEAR(self->slots[i].grad);
    return Py_NewRef(Py_None);
}

static PyObject *squares_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Squares() takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fst_squares_object *self = (fst_squares_object *)allocate(type, 0); /* zeroed */
    if (self)
        self->inv_scale = 1.0;
    return (PyObject *)self;
}

static int squares_traverse(PyObject *object, visitproc visit, void *arg)
{
    const fst_squares_object *self = (fst_squares_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->slot_count; i++)
        Py_VISIT(self->slots[i].grad);
    return 0;
}

static int squares_clear(PyObject *object)
{
    Py_XDECREF(squares_forget(object, NULL));
    return 0;
}

static void squares_dealloc(PyObject *object)
{
    fst_squares_object *self = (fst_squares_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    squares_clear(object);
    for (size_t i = 0; i < self->slot_count; i++)
        PyMem_Free(self->slots[i].partial);
    PyMem_Free(self->slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef squares_methods[] = {
    {"adopt", squares_adopt, METH_VARARGS, FST_DOC_SQUARES_ADOPT},
    {"check", squares_check, METH_VARARGS, FST_DOC_SQUARES_CHECK},
    {"expect", squares_expect, METH_O, FST_DOC_SQUARES_EXPECT},
    {"forget", squares_forget, METH_NOARGS, FST_DOC_SQUARES_FORGET},
    {"measure", squares_measure, METH_VARARGS, FST_DOC_SQUARES_MEASURE},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot squares_slots[] = {
    {Py_tp_doc, "Sums of squares that were taken of each gradient in backward."},
    {Py_tp_new, squares_new},
    {Py_tp_dealloc, squares_dealloc},
    {Py_tp_traverse, squares_traverse},
    {Py_tp_clear, squares_clear},
    {Py_tp_methods, squares_methods},
    {0, NULL},
};

PyType_Spec fst_squares_spec = {
    .name = "faststep._C.Squares",
    .basicsize = sizeof(fst_squares_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = squares_slots,
};
