/* The type faststep._C.Plan: one call per optimizer step. */
#include "py/plan.h"

#include "core/passes.h"
#include "rules/loss_scale.h"

/* What the caller of step() asked for. */
typedef struct {
    PyObject *grad_scale, *found_inf;
    int measure_found_inf, write_grads;
    double max_norm; /* NaN: no clipping */
} step_options;

/* Reads (rule, state keys, has a step counter, hyper-parameters, maximize). */
static int parse_group(PyObject *spec, fst_group *group)
{
    PyObject *keys, *hyper;
    int rule, has_step, maximize;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple per group");
        return -1;
    }
    if (!PyArg_ParseTuple(spec, "iO!pO!p", &rule, &PyTuple_Type, &keys, &has_step, &PyTuple_Type, &hyper,
                          &maximize))
        return -1;
    if (rule < 0 || rule >= FST_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "no rule %d", rule);
        return -1;
    }
    *group = (fst_group){.rule = (fst_rule)rule, .keys = keys, .has_step = has_step, .maximize = maximize};
    group->key_count = (unsigned)PyTuple_Size(keys);
    if (group->key_count != fst_rule_states(group->rule) + (unsigned)has_step ||
        (size_t)PyTuple_Size(hyper) != fst_rule_hyper_count(group->rule)) {
        PyErr_Format(PyExc_ValueError, "rule %s takes %u states and %u hyper-parameters",
                     fst_rule_name(group->rule), fst_rule_states(group->rule),
                     fst_rule_hyper_count(group->rule));
        return -1;
    }
    for (unsigned i = 0; i < fst_rule_hyper_count(group->rule); i++) {
        group->hyper[i] = PyFloat_AsDouble(PyTuple_GetItem(hyper, (Py_ssize_t)i));
        if (group->hyper[i] == -1.0 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int parse_groups(fst_plan_object *self, PyObject *specs)
{
    const Py_ssize_t count = PyList_Size(specs);
    self->groups = PyMem_Calloc((size_t)count + 1, sizeof *self->groups);
    if (!self->groups) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (parse_group(PyList_GetItem(specs, i), &self->groups[i]))
            return -1;
    self->group_count = (size_t)count;
    return 0;
}

/* The one float of a CPU tensor such as optimizer.found_inf, or NULL with a Python error. */
static void *scalar_of(fst_module *module, PyObject *object, const char *name, fst_dtype *dtype)
{
    fst_view view;
    fst_problem problem;
    if (fst_tensor_view(&module->tensors, object, &view, &problem)) {
        PyErr_Format(PyExc_TypeError, "optimizer.%s %s", name, problem.detail);
        return NULL;
    }
    if (view.count != 1 || (view.dtype != FST_F32 && view.dtype != FST_F64)) {
        PyErr_Format(PyExc_TypeError, "optimizer.%s must be a one-element float32 or float64 tensor", name);
        return NULL;
    }
    *dtype = view.dtype;
    return view.data;
}

static double read_scalar(const void *data, fst_dtype dtype)
{
    return dtype == FST_F64 ? *(const double *)data : (double)*(const float *)data;
}

/* The index of the folded scalars for a group, a step count and a type. */
static int fold(fst_plan_object *self, uint32_t group, double step, int wide, double coefficient,
                uint32_t *index)
{
    const fst_group *g = &self->groups[group];
    for (size_t back = 0; back < self->arg_count && back < 64; back++) {
        const size_t i = self->arg_count - 1 - back;
        if (self->fold_keys[i].group == group && self->fold_keys[i].step == step &&
            self->args[i].wide == wide) {
            *index = (uint32_t)i;
            return 0;
        }
    }
    size_t capacity = self->arg_capacity;
    if (fst_reserve(&self->args, &capacity, self->arg_count, sizeof *self->args) ||
        fst_reserve(&self->fold_keys, &self->arg_capacity, self->arg_count, sizeof *self->fold_keys))
        return -1;
    fst_update_args *args = &self->args[self->arg_count];
    args->rule = g->rule;
    args->wide = wide;
    args->clip_coefficient = coefficient;
    args->sign = g->maximize ? -1.0 : 1.0;
    fst_rule_fold(args, g->hyper, step);
    self->fold_keys[self->arg_count] = (fst_fold_key){step, group};
    *index = (uint32_t)self->arg_count++;
    return 0;
}

/* Gives every span its scalars. In the first of two rounds nothing is written: if memory runs out, no step
 * counter has moved. */
static int fold_all(fst_plan_object *self, double coefficient, int count_up)
{
    for (size_t i = 0; i < self->counter_count; i++) {
        const fst_counter *c = &self->counters[i];
        const fst_dtype dtype = c->is_double ? FST_F64 : FST_F32;
        const double step = c->data ? read_scalar(c->data, dtype) + 1.0 : c->value;
        uint32_t index;
        if (c->span >= 0) {
            fst_span *span = &self->plan.spans[c->span];
            const fst_operand *param =
                &self->plan.operands[(size_t)c->span * FST_OP_COUNT + FST_OP_PARAM];
            if (fold(self, c->group, step, param->dtype == FST_F64, coefficient, &index))
                return -1;
            span->args = index;
        }
        if (!count_up || !c->data)
            continue;
        if (c->is_double)
            *(double *)c->data = step;
        else
            *(float *)c->data = (float)step;
    }
    return 0;
}

/* The parameters that moved (offset 0) or their gradients (offset 1). */
static PyObject *list_stepped(const fst_plan_object *self, size_t offset)
{
    PyObject *list = PyList_New((Py_ssize_t)(self->stepped_count / 2));
    for (size_t i = offset; list && i < self->stepped_count; i += 2)
        PyList_SetItem(list, (Py_ssize_t)(i / 2), Py_NewRef(self->stepped[i]));
    return list;
}

/* Runs the passes on a bound plan. Returns (skipped, norm or None, parameters, gradients or None). */
static PyObject *run(fst_module *module, fst_plan_object *self, const step_options *options)
{
    fst_status status = {0};
    fst_measurement seen = {0};
    fst_dtype scale_dtype = FST_F32, found_dtype = FST_F32;
    const int clip = !isnan(options->max_norm), measure = clip || options->measure_found_inf;
    double inv_scale = 1.0, coefficient = 1.0;
    void *found = NULL;
    int skip = 0;
    if (options->grad_scale != Py_None) {
        const void *scale = scalar_of(module, options->grad_scale, "grad_scale", &scale_dtype);
        if (!scale)
            return NULL;
        inv_scale = (double)(float)(1.0 / read_scalar(scale, scale_dtype));
    }
    if (options->found_inf != Py_None) {
        found = scalar_of(module, options->found_inf, "found_inf", &found_dtype);
        if (!found)
            return NULL;
    }
    if (fst_plan_seal(&self->plan, FST_OP_PARAM, options->write_grads ? 2 : 1, &status))
        return fst_raise(&status);
    if (found && !options->measure_found_inf)
        skip = read_scalar(found, found_dtype) != 0.0;
    if (measure && !skip) {
        Py_BEGIN_ALLOW_THREADS
        fst_measure(&self->plan, FST_OP_GRAD, inv_scale, &seen, &status);
        Py_END_ALLOW_THREADS
        if (status.code)
            return fst_raise(&status);
        if (options->measure_found_inf && seen.nonfinite) {
            skip = 1;
            if (found_dtype == FST_F64)
                *(double *)found = 1.0;
            else
                *(float *)found = 1.0f;
        }
        if (clip)
            coefficient = fst_clip_coefficient(sqrt(seen.square_sum), options->max_norm);
    }
    if (!skip) {
        if (fold_all(self, coefficient, 0) || fold_all(self, coefficient, 1))
            return NULL;
        Py_BEGIN_ALLOW_THREADS
        fst_update(&self->plan, self->args, inv_scale, options->write_grads, &status);
        Py_END_ALLOW_THREADS
        if (status.code)
            return fst_raise(&status);
    }
    PyObject *norm = measure && self->stepped_count ? PyFloat_FromDouble(sqrt(seen.square_sum))
                                                    : Py_NewRef(Py_None);
    PyObject *params = skip ? PyList_New(0) : list_stepped(self, 0);
    PyObject *grads = skip || !options->write_grads ? Py_NewRef(Py_None) : list_stepped(self, 1);
    if (!norm || !params || !grads) {
        Py_XDECREF(norm);
        Py_XDECREF(params);
        Py_XDECREF(grads);
        return NULL;
    }
    return Py_BuildValue("NNNN", PyBool_FromLong(skip), norm, params, grads);
}

/* step(param_lists, groups, state, fresh, grad_scale, found_inf, measure_found_inf, max_norm, write_grads) */
static PyObject *plan_step(PyObject *object, PyObject *args)
{
    fst_plan_object *self = (fst_plan_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *param_lists, *specs, *state, *fresh, *result = NULL;
    step_options options;
    if (!PyArg_ParseTuple(args, "O!O!O!OOOpdp", &PyList_Type, &param_lists, &PyList_Type, &specs,
                          &PyDict_Type, &state, &fresh, &options.grad_scale, &options.found_inf,
                          &options.measure_found_inf, &options.max_norm, &options.write_grads))
        return NULL;
    if (options.measure_found_inf && options.found_inf == Py_None) {
        PyErr_SetString(PyExc_ValueError, "measure_found_inf needs found_inf");
        return NULL;
    }
    if (PyList_Size(param_lists) != PyList_Size(specs) ||
        (fresh != Py_None && !PyList_Check(fresh))) {
        PyErr_SetString(PyExc_ValueError, "expected one group per list of parameters");
        return NULL;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer is stepping already, in another thread");
        return NULL;
    }
    self->busy = 1;
    if (!parse_groups(self, specs))
        result = fst_plan_bind(module, self, param_lists, state, fresh, options.write_grads);
    if (result && PyList_Size(result) == 0) {
        Py_DECREF(result);
        result = run(module, self, &options);
    }
    fst_plan_release(self);
    self->busy = 0;
    return result;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Plan() takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fst_plan_object *self = (fst_plan_object *)allocate(type, 0); /* zeroed */
    if (self)
        fst_plan_init(&self->plan, FST_OP_COUNT);
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *object)
{
    fst_plan_object *self = (fst_plan_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    fst_plan_release(self);
    fst_plan_free(&self->plan);
    for (size_t i = 0; i < self->param_count; i++) {
        PyMem_Free(self->params[i].geometry);
        PyMem_Free(self->params[i].order);
    }
    PyMem_Free(self->params);
    PyMem_Free(self->counters);
    PyMem_Free(self->held);
    PyMem_Free(self->stepped);
    PyMem_Free(self->layouts);
    PyMem_Free(self->args);
    PyMem_Free(self->fold_keys);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef plan_methods[] = {
    {"step", plan_step, METH_VARARGS, "One optimizer step; see faststep/optim/_base.py."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "What an optimizer remembers of its parameters between steps."},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

PyType_Spec fst_plan_spec = {
    .name = "faststep._C.Plan",
    .basicsize = sizeof(fst_plan_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_slots,
};
