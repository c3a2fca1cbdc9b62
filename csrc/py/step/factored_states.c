/* Binds the states of a parameter of Adafactor: a step counter, and a row and a column per matrix,
 * or the variance of a vector. */
#include "py/step/bind.h"

enum { COUNTER, ROW, COL, VARIANCE }; /* places of their names among a group's keys */

/* Refuses a dictionary that lacks a state. */
static int refuse_part(const fst_binding *at, PyObject *name)
{
    fst_problem problem;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes)
        return -1;
    fst_problem_set(&problem, "key", "has no '%s'", PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return fst_bind_problem(at, "state", &problem);
}

/* Refuses a state of another shape than the parameter's with dimension `one` of a single element.
 * None of its dimensions is, if `one` is -1. */
static int check_shape(const fst_binding *at, const fst_param *param, PyObject *name,
                       const fst_view *view, int one)
{
    fst_problem problem;
    int same = view->ndim == param->ndim;
    for (int d = 0; same && d < param->ndim; d++)
        same = view->shape[d] == (d == one ? 1 : param->geometry[d]);
    if (same)
        return 0;
    fst_problem_set(&problem, "shape",
                    one < 0 ? "is not of the parameter's shape"
                            : "is not of the parameter's shape with dimension %d of size 1",
                    one);
    return fst_state_refuse(at, name, &problem);
}

/* Adds the span of a row, a column or a variance, which the step writes. */
static int add_span(fst_binding *at, PyObject *value, const fst_view *view)
{
    fst_status status = {0};
    fst_operand *ops = fst_plan_add(&at->part->plan, fst_view_count(view), 0, &status);
    if (!ops)
        return fst_raise_int(&status);
    ops[FST_OP_PARAM] = (fst_operand){.data = view->data, .dtype = view->dtype};
    return fst_state_written(at, value, value);
}

/* Binds a state. Returns 1, FST_UNSETTLED if it is for torch, or -1 with a Python error. */
static int bind_state(fst_binding *at, const fst_param *param, int place, PyObject *name,
                      PyObject *value, fst_dtype dtype, fst_counter *counter, fst_view *view)
{
    fst_tensors *tensors = &at->module->tensors;
    fst_problem unused;
    if (!fst_tensor_is_plain(tensors, value))
        return FST_UNSETTLED;
    if (fst_state_check_inference(at, name, value))
        return -1;
    if (fst_tensor_view(tensors, value, view, &unused))
        return FST_UNSETTLED;
    if (place == COUNTER) {
        counter->at = fst_view_number(view);
        return view->device == FST_HOST && fst_view_count(view) == 1 &&
                       (view->dtype == FST_F32 || view->dtype == FST_F64)
                   ? 1
                   : FST_UNSETTLED;
    }
    if (view->device != FST_HOST || view->dtype != dtype)
        return FST_UNSETTLED;
    const int one = place == VARIANCE ? -1 : param->ndim - (place == ROW ? 1 : 2);
    if (check_shape(at, param, name, view, one))
        return -1;
    if (!fst_view_is_packed(view))
        return FST_UNSETTLED;
    return add_span(at, value, view) ? -1 : 1;
}

int fst_factored_bind_states(fst_binding *at, fst_param *param, PyObject *object, fst_dtype dtype,
                             fst_counter *counter)
{
    static const int of_vector[] = {COUNTER, VARIANCE}, of_matrix[] = {COUNTER, ROW, COL};
    const int *places = param->ndim > 1 ? of_matrix : of_vector;
    const unsigned count = param->ndim > 1 ? 3 : 2;
    PyObject *state = fst_state_of(at, param, object), *key;
    Py_ssize_t position = 0;
    if (!state || PyDict_Size(state) == 0)
        return PyErr_Occurred() ? -1 : 0;
    param->dict = state;
    if (at->trace)
        fst_trace_dict(at->trace, state, param->state_at, count);
    for (unsigned k = 0; k < count; k++) {
        PyObject *name = PyTuple_GetItem(at->self->groups[at->group].keys, places[k]);
        PyObject *value = fst_state_find(at, state, &position, name, &key);
        fst_view view;
        if (!value)
            return PyErr_Occurred() ? -1 : refuse_part(at, name);
        const int bound = bind_state(at, param, places[k], name, value, dtype, counter, &view);
        if (bound != 1)
            return bound;
        fst_param_note_state(&at->module->tensors, param, &at->self->old_pins, k, value, &view);
        fst_state_trace(at, param, k, key, value, value, &view);
    }
    return 1;
}
