/* The type faststep._C.Squares. */
#include "py/squares.h"

#include "core/layout.h"
#include "core/passes.h"
#include "py/param.h"
#include "py/plan.h"

static size_t chunks_in(int64_t count)
{
    return (size_t)((count + FST_CHUNK - 1) / FST_CHUNK);
}

int fst_squares_fill(const fst_squares_object *self, fst_plan *plan, unsigned operand,
                     const uint32_t *slot_of, double inv_scale)
{
    for (size_t s = 0; s < plan->span_count; s++) {
        const fst_operand *op = &plan->operands[s * plan->width + operand];
        if (slot_of[s] >= self->slot_count)
            return 0;
        const fst_square *slot = &self->slots[slot_of[s]];
        if (!slot->grad || slot->data != op->data || slot->count != plan->spans[s].count ||
            slot->inv_scale != inv_scale)
            return 0;
    }
    for (size_t c = 0; c < plan->chunk_count; c++) {
        const fst_chunk *chunk = &plan->chunks[c];
        plan->partial[c] = self->slots[slot_of[chunk->span]].partial[chunk->begin / FST_CHUNK];
    }
    return 1;
}

static void forget(fst_square *slot)
{
    Py_CLEAR(slot->grad);
}

/* The slot, which is made where there is none; NULL with a Python error. */
static fst_square *slot_at(fst_squares_object *self, Py_ssize_t index)
{
    if (index < 0) {
        PyErr_Format(PyExc_ValueError, "no slot %zd", index);
        return NULL;
    }
    if ((size_t)index >= self->slot_count) {
        const size_t count = (size_t)index + 1;
        fst_square *moved = PyMem_Realloc(self->slots, 2 * count * sizeof *moved);
        if (!moved) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(moved + self->slot_count, 0, (2 * count - self->slot_count) * sizeof *moved);
        self->slots = moved;
        self->slot_count = 2 * count;
    }
    return &self->slots[index];
}

/* tensor._version; 0, or -1 with a Python error. */
static int version_of(PyObject *tensor, int64_t *version)
{
    PyObject *number = PyObject_GetAttrString(tensor, "_version");
    *version = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* A gradient as a plan of one span, in the order in which a step goes through its parameter. */
typedef struct {
    fst_plan plan;
    fst_param param;
    fst_layout *layout;
    const void *data;
    int64_t count;
} measuring;

static void measuring_free(measuring *m)
{
    fst_plan_free(&m->plan);
    fst_param_forget(&m->param);
    PyMem_Free(m->layout);
}

/* 0, or -1 with `problem` filled: the step will find the same problem, and say so. */
static int bind(fst_tensors *tensors, measuring *m, PyObject *param, PyObject *grad,
                fst_problem *problem)
{
    fst_view view, grad_view;
    fst_status status = {0};
    if (fst_tensor_view(tensors, param, &view, problem) ||
        fst_view_is_on(&view, FST_HOST, problem) ||
        fst_tensor_view(tensors, grad, &grad_view, problem) ||
        fst_view_is_on(&grad_view, FST_HOST, problem) ||
        fst_param_learn(tensors, &m->param, param, &view, problem))
        return -1;
    if (!fst_param_has_shape(&m->param, &grad_view))
        return fst_problem_set(problem, "shape", "is not of the parameter's shape");
    m->data = grad_view.data;
    m->count = m->param.count;
    if (m->count == 0)
        return 0;
    const int flat = m->param.flat && view.ndim > 0 && fst_param_fits(&m->param, &grad_view);
    if (!flat && fst_tensor_layout(tensors, grad, &grad_view, m->param.order_count, m->param.order,
                                   0, &m->layout, problem))
        return -1;
    fst_operand *op = fst_plan_add(&m->plan, m->count, 0, &status);
    if (!op || fst_plan_seal(&m->plan, 0, 0, &status))
        return fst_problem_set(problem, "storage", "%s", status.message);
    op = &m->plan.operands[0];
    *op = (fst_operand){grad_view.data, m->layout, grad_view.dtype};
    return 0;
}

/* Moves the sums into the slot; 0, or -1 with a Python error. */
static int keep(fst_square *slot, const measuring *m, PyObject *grad, int64_t version,
                double inv_scale)
{
    const size_t chunks = chunks_in(m->count);
    forget(slot);
    if (chunks > slot->capacity) {
        double *moved = PyMem_Realloc(slot->partial, chunks * sizeof *moved);
        if (!moved) {
            PyErr_NoMemory();
            return -1;
        }
        slot->partial = moved;
        slot->capacity = chunks;
    }
    if (chunks)
        memcpy(slot->partial, m->plan.partial, chunks * sizeof *slot->partial);
    slot->grad = Py_NewRef(grad);
    slot->data = m->data;
    slot->count = m->count;
    slot->version = version;
    slot->inv_scale = inv_scale;
    return 0;
}

static int measure(fst_module *module, fst_squares_object *self, Py_ssize_t index, PyObject *param,
                   PyObject *grad)
{
    const double inv_scale = self->inv_scale;
    measuring m = {.count = 0};
    fst_measurement seen;
    fst_problem problem;
    fst_status status = {0};
    int64_t version;
    fst_plan_init(&m.plan, 1);
    int done = 0;
    if (!bind(&module->tensors, &m, param, grad, &problem) && !version_of(grad, &version)) {
        if (m.count > 0) {
            Py_BEGIN_ALLOW_THREADS fst_measure(&m.plan, 0, inv_scale, &seen, &status);
            Py_END_ALLOW_THREADS
        }
        fst_square *slot = status.code ? NULL : slot_at(self, index);
        done = slot && !keep(slot, &m, grad, version, inv_scale);
        if (status.code)
            fst_raise(&status);
    }
    measuring_free(&m);
    return PyErr_Occurred() ? -1 : done;
}

/* measure(slot, param): True if there is a gradient that can be measured. */
static PyObject *squares_measure(PyObject *object, PyObject *args)
{
    fst_squares_object *self = (fst_squares_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    Py_ssize_t index;
    PyObject *param;
    if (!PyArg_ParseTuple(args, "nO", &index, &param))
        return NULL;
    fst_square *slot = slot_at(self, index);
    if (!slot)
        return NULL;
    forget(slot);
    PyObject *grad = fst_tensor_grad(&module->tensors, param);
    const int done = !grad ? -1 : grad == Py_None ? 0 : measure(module, self, index, param, grad);
    Py_XDECREF(grad);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* What keeps the measurement of a gradient from being used: NULL, or a word; "" for an error. */
static const char *problem_of(const fst_squares_object *self, size_t index, PyObject *grad)
{
    const fst_square *slot = index < self->slot_count ? &self->slots[index] : NULL;
    int64_t version;
    if (!slot || !slot->grad)
        return "unmeasured";
    if (slot->grad != grad)
        return "changed";
    if (version_of(grad, &version))
        return "";
    if (version != slot->version)
        return "changed";
    return slot->inv_scale != self->inv_scale ? "scale" : NULL;
}

/* The first problem of a list of parameters, as above. */
static const char *problem_in(const fst_squares_object *self, fst_tensors *tensors,
                              PyObject *params, size_t slot, Py_ssize_t *index)
{
    const char *problem = NULL;
    for (*index = 0; !problem && *index < PyList_Size(params); ++*index) {
        PyObject *grad = fst_tensor_grad(tensors, PyList_GetItem(params, *index));
        if (!grad)
            return "";
        if (grad != Py_None)
            problem = problem_of(self, slot + (size_t)*index, grad);
        Py_DECREF(grad);
    }
    *index -= problem != NULL;
    return problem;
}

/* check(param_lists, grad_scale): None, or (word, group, index) of the first gradient whose
 * measurement does not hold. */
static PyObject *squares_check(PyObject *object, PyObject *args)
{
    fst_squares_object *self = (fst_squares_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *lists, *scale;
    fst_problem problem;
    fst_view view = {0};
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &lists, &scale))
        return NULL;
    if (scale != Py_None && fst_tensor_scalar(&module->tensors, scale, FST_HOST, &view, &problem))
        return PyErr_Format(PyExc_TypeError, "grad_scale %s", problem.detail);
    self->inv_scale = fst_inverse_of(&view);
    size_t slot = 0;
    for (Py_ssize_t group = 0; group < PyList_Size(lists); group++) {
        PyObject *params = PyList_GetItem(lists, group);
        Py_ssize_t index;
        if (!PyList_Check(params))
            return PyErr_Format(PyExc_TypeError, "group %zd is not a list", group);
        const char *word = problem_in(self, &module->tensors, params, slot, &index);
        if (word)
            return *word ? Py_BuildValue("snn", word, group, index) : NULL;
        slot += (size_t)PyList_Size(params);
    }
    return Py_NewRef(Py_None);
}

/* forget(): lets go of all gradients. */
static PyObject *squares_forget(PyObject *object, PyObject *unused)
{
    fst_squares_object *self = (fst_squares_object *)object;
    (void)unused;
    for (size_t i = 0; i < self->slot_count; i++)
        forget(&self->slots[i]);
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
    {"check", squares_check, METH_VARARGS, NULL},
    {"forget", squares_forget, METH_NOARGS, NULL},
    {"measure", squares_measure, METH_VARARGS, NULL},
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
