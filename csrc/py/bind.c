/* Binding: one loop over all parameters that reads every pointer anew, and looks closer only at
 * what changed. */
#include "core/layout.h"
#include "py/plan.h"

enum { FETCH_AHEAD = 4 };      /* parameters */
enum { SHORT_STEP = 1 << 20 }; /* elements: below, a step takes less than a millisecond */

/* A step in the making. */
typedef struct {
    fst_module *module;
    fst_plan_object *self;
    PyObject *state, *missing, *fresh;
    Py_ssize_t fresh_at;
    Py_ssize_t group, index; /* of the parameter at hand */
    int write_grads, rescanned;
    size_t param_count;
} binding;

int fst_reserve(void *array, size_t *capacity, size_t count, size_t size)
{
    if (count < *capacity)
        return 0;
    const size_t wanted = *capacity ? 2 * *capacity : 64;
    void *moved = PyMem_Realloc(*(void **)array, wanted * size);
    if (!moved) {
        PyErr_NoMemory();
        return -1;
    }
    *(void **)array = moved;
    *capacity = wanted;
    return 0;
}

void fst_params_free(fst_plan_object *self)
{
    for (size_t i = 0; i < self->param_count; i++)
        fst_param_forget(&self->params[i]);
    PyMem_Free(self->params);
    self->params = NULL;
    self->param_count = 0;
}

/* Appends to an array of borrowed references. */
static int note(PyObject ***array, size_t *count, size_t *capacity, PyObject *object)
{
    if (fst_reserve(array, capacity, *count, sizeof **array))
        return -1;
    (*array)[(*count)++] = object;
    return 0;
}

static int hold(fst_plan_object *self, PyObject *object)
{
    if (!self->hold_tensors)
        return 0;
    if (note(&self->held, &self->held_count, &self->held_capacity, object))
        return -1;
    Py_INCREF(object);
    return 0;
}

static int note_written(fst_plan_object *self, PyObject *object)
{
    return note(&self->written, &self->written_count, &self->written_capacity, object);
}

/* Raises TensorError(group, index, role, kind, detail); Python turns it into the error that users
 * see. */
static int raise_problem(const binding *at, const char *role, const fst_problem *problem)
{
    PyObject *args =
        Py_BuildValue("nnsss", at->group, at->index, role, problem->kind, problem->detail);
    if (args)
        PyErr_SetObject(at->module->tensors.tensor_error, args);
    Py_XDECREF(args);
    return -1;
}

/* Makes an operand of a tensor that must have the parameter's shape. */
static int bind_operand(const binding *at, const fst_param *param, PyObject *object,
                        const char *role, const fst_view *view, int written, fst_operand *op)
{
    fst_plan_object *self = at->self;
    fst_problem problem;
    *op = (fst_operand){.data = view->data, .dtype = view->dtype};
    if (param->flat && view->ndim > 0 && fst_param_fits(param, view))
        return 0;
    if (!fst_param_has_shape(param, view)) {
        fst_problem_set(&problem, "shape", "is not of the parameter's shape");
        return raise_problem(at, role, &problem);
    }
    fst_layout *layout;
    if (fst_tensor_layout(&at->module->tensors, object, view, param->order_count, param->order,
                          written, &layout, &problem))
        return raise_problem(at, role, &problem);
    if (layout) {
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

/* Finds out again where each parameter's entry of optimizer.state lies; once per step at most. */
static void rescan_state(binding *at)
{
    fst_plan_object *self = at->self;
    Py_ssize_t next = 0, here = 0;
    PyObject *key, *value;
    size_t guess = 0;
    at->rescanned = 1;
    for (size_t i = 0; i < self->param_count; i++)
        self->params[i].state_at = -1;
    for (; PyDict_Next(at->state, &next, &key, &value); here = next)
        for (size_t tried = 0; tried < self->param_count; tried++, guess++) {
            fst_param *param = &self->params[guess % self->param_count];
            if (param->param == key) {
                param->state_at = here;
                break;
            }
        }
}

/* The state dictionary of a parameter, borrowed; NULL if it has none. */
static PyObject *state_of(binding *at, const fst_param *param, PyObject *object)
{
    PyObject *key = NULL, *value = NULL;
    if (PyDict_Size(at->state) == 0)
        return NULL;
    for (int again = 0; again < 2; again++) {
        Py_ssize_t position = param->state_at;
        if (position >= 0 && PyDict_Next(at->state, &position, &key, &value) && key == object)
            return PyDict_Check(value) ? value : NULL;
        if (!at->rescanned)
            rescan_state(at);
    }
    /* torch hashes tensors in Python: slow, and needed only for a parameter that is listed twice or
     * new */
    at->module->tensors.ran_python = 1;
    value = PyDict_GetItemWithError(at->state, object);
    return value && PyDict_Check(value) ? value : NULL;
}

static int bind_counter(const binding *at, fst_param *param, PyObject *object, fst_counter *counter)
{
    fst_view view;
    fst_problem problem;
    if (fst_tensor_view(&at->module->tensors, object, &view, &problem))
        return raise_problem(at, "state 'step'", &problem);
    if (fst_view_count(&view) != 1 || (view.dtype != FST_F32 && view.dtype != FST_F64)) {
        fst_problem_set(&problem, "dtype",
                        "is not a one-element tensor of type float32 or float64");
        return raise_problem(at, "state 'step'", &problem);
    }
    fst_param_note_state(&at->module->tensors, param, 0, object, &view);
    counter->data = view.data;
    counter->is_double = view.dtype == FST_F64;
    return 0;
}

/* Binds the states of the parameter at hand: 1 if all are there, 0 if one is missing, -1 with an
 * error. */
static int bind_states(binding *at, fst_param *param, PyObject *object, fst_dtype dtype,
                       fst_operand *ops, fst_counter *counter)
{
    const fst_group *group = &at->self->groups[at->group];
    if (group->key_count == 0)
        return 1;
    PyObject *state = state_of(at, param, object), *key, *value;
    Py_ssize_t position = 0;
    if (!state)
        return PyErr_Occurred() ? -1 : 0;
    param->dict = state;
    for (unsigned k = 0; k < group->key_count; k++) {
        PyObject *wanted = PyTuple_GetItem(group->keys, k);
        if (!PyDict_Next(state, &position, &key, &value) || key != wanted)
            value = PyDict_GetItemWithError(state, wanted);
        if (!value || value == Py_None)
            return PyErr_Occurred() ? -1 : 0;
        if (hold(at->self, value))
            return -1;
        if (k == 0 && group->has_step) {
            if (bind_counter(at, param, value, counter))
                return -1;
            continue;
        }
        fst_view view;
        fst_problem problem;
        char role[64] = "state";
        const int bad = fst_tensor_view(&at->module->tensors, value, &view, &problem);
        if (bad || view.dtype != dtype || !fst_param_fits(param, &view) || !param->flat ||
            !view.ndim) {
            PyObject *name = PyUnicode_AsUTF8String(wanted);
            if (!name)
                return -1;
            PyOS_snprintf(role, sizeof role, "state '%s'", PyBytes_AsString(name));
            Py_DECREF(name);
            if (!bad && view.dtype != dtype)
                fst_problem_set(&problem, "dtype", "has dtype %s, not %s as the parameter has",
                                fst_dtype_name(view.dtype), fst_dtype_name(dtype));
            if (bad || view.dtype != dtype)
                return raise_problem(at, role, &problem);
        }
        const unsigned slot = k - (unsigned)group->has_step;
        fst_param_note_state(&at->module->tensors, param, k, value, &view);
        if (bind_operand(at, param, value, role, &view, 1, &ops[FST_OP_STATE + slot]) ||
            note_written(at->self, value))
            return -1;
    }
    return 1;
}

static int is_fresh(binding *at)
{
    if (!at->fresh || at->fresh_at >= PyList_Size(at->fresh))
        return 0;
    PyObject *pair = PyList_GetItem(at->fresh, at->fresh_at);
    if (PyLong_AsSsize_t(PyTuple_GetItem(pair, 0)) != at->group ||
        PyLong_AsSsize_t(PyTuple_GetItem(pair, 1)) != at->index)
        return 0;
    at->fresh_at++;
    return 1;
}

static int note_missing(const binding *at)
{
    PyObject *pair = Py_BuildValue("nn", at->group, at->index);
    const int failed = !pair || PyList_Append(at->missing, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* Binds one parameter and its gradient, straight into the operands of a new span. */
static int bind_param(binding *at, fst_param *param, PyObject *object, PyObject *grad)
{
    fst_plan_object *self = at->self;
    fst_tensors *tensors = &at->module->tensors;
    fst_operand of_empty[FST_OP_COUNT], *ops = of_empty;
    fst_view view, grad_view;
    fst_problem problem;
    fst_status status = {0};
    if (fst_tensor_view(tensors, object, &view, &problem))
        return raise_problem(at, "parameter", &problem);
    if (fst_tensor_view(tensors, grad, &grad_view, &problem))
        return raise_problem(at, "gradient", &problem);
    param->record = view.shape;
    param->grad = grad;
    param->grad_record = grad_view.shape;
    if ((param->param != object || !fst_param_fits(param, &view)) &&
        fst_param_learn(tensors, param, object, &view, &problem))
        return raise_problem(at, "parameter", &problem);
    if (fst_reserve(&self->counters, &self->counter_capacity, self->counter_count,
                    sizeof *self->counters))
        return -1;
    fst_counter *counter = &self->counters[self->counter_count];
    *counter = (fst_counter){.group = (uint32_t)at->group, .value = 2.0, .span = -1};
    if (param->count > 0) {
        ops = fst_plan_add(&self->plan, param->count, 0, &status);
        if (!ops) {
            fst_raise(&status);
            return -1;
        }
        counter->span = (int64_t)self->plan.span_count - 1;
        self->total += param->count;
    }
    if (bind_operand(at, param, object, "parameter", &view, 1, &ops[FST_OP_PARAM]) ||
        bind_operand(at, param, grad, "gradient", &grad_view, at->write_grads, &ops[FST_OP_GRAD]))
        return -1;
    const int found = bind_states(at, param, object, view.dtype, ops, counter);
    if (found < 0)
        return -1;
    if (!found)
        return note_missing(at);
    if (is_fresh(at))
        counter->value = 1.0;
    self->counter_count++;
    return note_written(self, object) ||
                   note(&self->grads, &self->grad_count, &self->grad_capacity, grad)
               ? -1
               : 0;
}

static int bind_group(binding *at, PyObject *params)
{
    fst_plan_object *self = at->self;
    const Py_ssize_t count = PyList_Size(params);
    if (count < 0)
        return -1;
    for (at->index = 0; at->index < count; at->index++, at->param_count++) {
        PyObject *object = PyList_GetItem(params, at->index);
        if (at->param_count + FETCH_AHEAD < self->param_count)
            fst_param_fetch(&self->params[at->param_count + FETCH_AHEAD]);
        PyObject *grad = object ? fst_tensor_grad(&at->module->tensors, object) : NULL;
        if (!grad)
            return -1; /* or the list shrank meanwhile */
        if (grad == Py_None) {
            Py_DECREF(grad);
            continue;
        }
        const int failed = hold(self, object) || hold(self, grad) ||
                           bind_param(at, &self->params[at->param_count], object, grad);
        Py_DECREF(grad);
        if (failed)
            return -1;
    }
    return 0;
}

/* Makes one entry per parameter; those of a changed list are learnt again as they are met. */
static int count_params(fst_plan_object *self, PyObject *param_lists)
{
    size_t count = 0;
    for (size_t g = 0; g < self->group_count; g++) {
        const Py_ssize_t size = PyList_Size(PyList_GetItem(param_lists, (Py_ssize_t)g));
        if (size < 0)
            return -1;
        count += (size_t)size;
    }
    if (count == self->param_count)
        return 0;
    fst_params_free(self);
    self->params = PyMem_Calloc(count + 1, sizeof *self->params);
    if (!self->params) {
        PyErr_NoMemory();
        return -1;
    }
    self->param_count = count;
    return 0;
}

/* Forgets what was bound in this step, but not the groups. */
static void unbind(fst_plan_object *self)
{
    for (size_t i = 0; i < self->layout_count; i++)
        PyMem_Free(self->layouts[i]);
    for (size_t i = 0; i < self->held_count; i++)
        Py_DECREF(self->held[i]);
    self->layout_count = self->held_count = self->counter_count = self->written_count = 0;
    self->grad_count = 0;
}

static PyObject *bind_all(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                          PyObject *state, PyObject *fresh, int write_grads)
{
    binding at = {.module = module, .self = self, .state = state, .write_grads = write_grads};
    at.fresh = fresh == Py_None ? NULL : fresh;
    at.missing = PyList_New(0);
    unbind(self);
    self->total = 0;
    fst_plan_begin(&self->plan);
    if (!at.missing || count_params(self, param_lists))
        goto error;
    for (; (size_t)at.group < self->group_count; at.group++)
        if (bind_group(&at, PyList_GetItem(param_lists, at.group)))
            goto error;
    return at.missing;
error:
    Py_XDECREF(at.missing);
    return NULL;
}

PyObject *fst_plan_bind(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                        PyObject *state, PyObject *fresh, int write_grads)
{
    module->tensors.ran_python = 0;
    PyObject *missing = bind_all(module, self, param_lists, state, fresh, write_grads);
    const int hold = module->tensors.ran_python || self->total > SHORT_STEP;
    if (missing && hold && !self->hold_tensors) {
        Py_DECREF(missing);
        self->hold_tensors = 1;
        module->tensors.ran_python = 0;
        missing = bind_all(module, self, param_lists, state, fresh, write_grads);
    }
    return missing;
}

void fst_plan_release(fst_module *module, fst_plan_object *self)
{
    unbind(self);
    PyMem_Free(self->groups);
    self->groups = NULL;
    self->group_count = self->arg_count = 0;
    self->hold_tensors = (module && module->tensors.ran_python) || self->total > SHORT_STEP;
}
