/* What a step has bound: lists of tensors, held references and layouts, and their end. */
#include "py/step/bind.h"
#include "rules/codes.h"

int fst_bind_note(PyObject ***array, size_t *count, size_t *capacity, PyObject *object)
{
    if (fst_reserve(array, capacity, *count, sizeof **array))
        return -1;
    (*array)[(*count)++] = object;
    return 0;
}

PyObject *fst_bind_hold(fst_step_plan *self, PyObject *object)
{
    if (!fst_bind_note(&self->held, &self->held_count, &self->held_capacity, object))
        return object;
    Py_DECREF(object);
    return NULL;
}

void fst_bind_raise_changed(const fst_binding *at)
{
    PyErr_Format(PyExc_RuntimeError,
                 "the parameters of group %zd were changed during the step; nothing was updated",
                 at->group);
}

PyObject *fst_bind_found(fst_binding *at)
{
    PyObject *object = at->self->held[at->held_at];
    if (object)
        at->held_at++;
    else
        fst_bind_raise_changed(at);
    return object;
}

int fst_bind_end_found(fst_binding *at)
{
    fst_step_plan *self = at->self;
    if (!at->again)
        return fst_bind_note(&self->held, &self->held_count, &self->held_capacity, NULL);
    while (self->held[at->held_at++])
        ;
    return 0;
}

int fst_bind_written(fst_step_plan *self, PyObject *object)
{
    return fst_bind_note(&self->written, &self->written_count, &self->written_capacity, object);
}

int fst_step_raise(const fst_module *module, Py_ssize_t group, Py_ssize_t index, const char *role,
                   const char *kind, const char *detail)
{
    const Py_ssize_t length = (Py_ssize_t)strlen(detail); /* it may end within a character */
    PyObject *args = Py_BuildValue("nnssN", group, index, role, kind,
                                   PyUnicode_DecodeUTF8(detail, length, "replace"));
    if (args)
        PyErr_SetObject(module->tensor_error, args);
    Py_XDECREF(args);
    return -1;
}

int fst_bind_problem(const fst_binding *at, const char *role, const fst_problem *problem)
{
    return fst_step_raise(at->module, at->group, at->index, role, problem->kind, problem->detail);
}

int fst_bind_ints(PyObject *tuple, int64_t *out, Py_ssize_t count)
{
    int fits = PyTuple_Check(tuple) && PyTuple_Size(tuple) == count;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        fits = PyLong_CheckExact(item) || PyBool_Check(item);
        out[i] = fits ? PyLong_AsLongLong(item) : 0;
    }
    if (!fits)
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd ints", count);
    return PyErr_Occurred() ? -1 : 0;
}

/* Reads (number, first element, elements of a row of codes, has codes) of a parameter that is a
 * shard. Returns 0, or -1 with a Python error. */
static int read_shard(fst_binding *at, const fst_param *param, PyObject *shard)
{
    const int64_t most = INT64_MAX / 64;
    int64_t ints[4];
    if (fst_bind_ints(shard, ints, 4))
        return -1;
    const int64_t number = ints[0], begin = ints[1], row = ints[2];
    const int coded = ints[3] != 0;
    int bad = number < 0 || number > (int64_t)UINT32_MAX || begin < 0 || begin > most ||
              param->count > most || row < 0 || (row && fst_code_row(row) != (uint32_t)row);
    if (!bad && coded)
        bad = !at->self->groups[at->group].codes_from ||
              (begin - fst_segment_at(begin, (uint32_t)row).begin) % FST_BLOCK;
    if (bad) {
        PyErr_SetString(PyExc_ValueError, "not a shard of a parameter, or it begins in a block");
        return -1;
    }
    at->shard = (fst_shard){(uint32_t)number, coded, (uint32_t)row, begin};
    return 0;
}

int fst_bind_shard(fst_binding *at, const fst_param *param, PyObject *object)
{
    const fst_group *group = &at->self->groups[at->group];
    const int coded = group->codes_from && param->count >= group->codes_from;
    const int by_rows = coded && param->order_count && param->order[0] == 0;
    const uint32_t row = by_rows ? fst_code_row(param->count / param->geometry[0]) : 0;
    at->shard = (fst_shard){(uint32_t)at->param_count, coded, row, 0};
    PyObject *key = group->shards == Py_None ? NULL : PyLong_FromVoidPtr(object);
    PyObject *shard = key ? PyDict_GetItemWithError(group->shards, key) : NULL; /* borrowed */
    Py_XDECREF(key);
    if (shard)
        return read_shard(at, param, shard);
    if (PyErr_Occurred())
        return -1;
    if (!(group->noisy || group->codes_from) ||
        !fst_tensor_is_dtensor(&at->module->tensors, object))
        return 0;
    fst_problem problem;
    fst_problem_set(&problem, "type", "is a DTensor, of which this step does not know the shard");
    return fst_bind_problem(at, "parameter", &problem);
}

int fst_bind_operand(const fst_binding *at, const fst_param *param, const char *role,
                     const fst_view *view, int written, fst_operand *op)
{
    fst_step_plan *self = at->self;
    fst_problem problem;
    if (fst_view_is_on(view, at->part->device, &problem))
        return fst_bind_problem(at, role, &problem);
    void *data = fst_moved_back(view->data, at->shard.begin, fst_operand_size(view->dtype));
    *op = (fst_operand){.data = data, .dtype = view->dtype};
    if (fst_param_is_packed_in(param, view))
        return 0;
    if (at->shard.begin) {
        fst_problem_set(&problem, "layout", "is not contiguous, and begins inside of a parameter");
        return fst_bind_problem(at, role, &problem);
    }
    if (!fst_param_has_shape(param, view)) {
        fst_problem_set(&problem, "shape", "is not of the parameter's shape");
        return fst_bind_problem(at, role, &problem);
    }
    fst_layout *layout;
    if (fst_view_layout(view, param->order_count, param->order, written, &layout, &problem))
        return fst_bind_problem(at, role, &problem);
    if (layout) {
        if (fst_layout_is_for(layout, at->part->device, &problem)) {
            PyMem_Free(layout);
            return fst_bind_problem(at, role, &problem);
        }
        if (fst_reserve(&self->layouts, &self->layout_capacity, self->layout_count,
                        sizeof *self->layouts)) {
            PyMem_Free(layout);
            return -1;
        }
        self->layouts[self->layout_count++] = layout;
    }
    op->layout = layout;
    return 0;
}

void fst_step_unbind(fst_step_plan *self)
{
    for (size_t i = 0; i < self->layout_count; i++)
        PyMem_Free(self->layouts[i]);
    for (size_t i = 0; i < self->part_count; i++)
        self->parts[i].counter_count = self->parts[i].number_count = 0;
    self->layout_count = self->grad_count = 0;
    self->written_count = self->counted_count = 0;
}

void fst_params_free(fst_step_plan *self)
{
    for (size_t i = 0; i < self->param_count; i++)
        fst_param_forget(&self->params[i], &self->old_pins);
    PyMem_Free(self->params);
    self->params = NULL;
    self->param_count = 0;
}

/* Dropping references may run Python code, which then finds a plan that is ready for another
 * step. */
void fst_step_end(fst_step_plan *self)
{
    PyObject **held = self->held;
    const size_t held_count = self->held_count;
    if (!self->traced)
        fst_step_unbind(self);
    PyObject *unsettled = self->unsettled;
    self->unsettled = NULL;
    self->held = NULL;
    self->held_count = self->held_capacity = 0;
    self->busy = 0;
    for (size_t i = 0; i < held_count; i++)
        Py_XDECREF(held[i]);
    PyMem_Free(held);
    Py_XDECREF(unsettled);
    fst_old_pins_free(&self->old_pins);
}
