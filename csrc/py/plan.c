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
    if (!PyArg_ParseTuple(spec, "iO!pO!p", &rule, &PyTuple_Type, &keys, &has_step, &PyTuple_Type,
                          &hyper, &maximize))
        return -1;
    if (rule < 0 || rule >= FST_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "no rule %d", rule);
        return -1;
    }
    *group = (fst_group){
        .rule = (fst_rule)rule, .keys = keys, .has_step = has_step, .maximize = maximize};
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
    if (fst_view_count(&view) != 1 || (view.dtype != FST_F32 && view.dtype != FST_F64)) {
        PyErr_Format(PyExc_TypeError,
                     "optimizer.%s must be a one-element float32 or float64 tensor", name);
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
        fst_reserve(&self->fold_keys, &self->arg_capacity, self->arg_count,
                    sizeof *self->fold_keys))
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

static double counted(const fst_counter *c)
{
    return c->data ? read_scalar(c->data, c->is_double ? FST_F64 : FST_F32) : c->value;
}

static void count(const fst_counter *c, double step)
{
    if (c->data && c->is_double)
        *(double *)c->data = step;
    else if (c->data)
        *(float *)c->data = (float)step;
}

/* Advances every step counter and gives every span its scalars. If memory runs out the counters go
 * back. */
static int fold_all(fst_plan_object *self, double coefficient)
{
    for (size_t i = 0; i < self->counter_count; i++) {
        const fst_counter *c = &self->counters[i];
        const double step = c->data ? counted(c) + 1.0 : c->value;
        uint32_t index = 0;
        if (c->span >= 0) {
            const fst_operand *ops = &self->plan.operands[(size_t)c->span * FST_OP_COUNT];
            if (fold(self, c->group, step, ops[FST_OP_PARAM].dtype == FST_F64, coefficient,
                     &index)) {
                while (i-- > 0)
                    count(&self->counters[i], counted(&self->counters[i]) - 1.0);
                return -1;
            }
            self->plan.spans[c->span].args = index;
        }
        count(c, step);
    }
    return 0;
}

static PyObject *list_of(PyObject *const *objects, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        PyList_SetItem(list, (Py_ssize_t)i, Py_NewRef(objects[i]));
    return list;
}

/* The tensors that the step wrote. A short step keeps the list for the next one; a long one does
 * not: it would keep large states alive that a user replaces. */
static PyObject *list_written(fst_plan_object *self)
{
    if (self->hold_tensors) {
        Py_CLEAR(self->last_written);
        return list_of(self->written, self->written_count);
    }
    const Py_ssize_t count = (Py_ssize_t)self->written_count;
    int same = self->last_written && PyList_Size(self->last_written) == count;
    for (Py_ssize_t i = 0; same && i < count; i++)
        same = PyList_GetItem(self->last_written, i) == self->written[i];
    if (!same) {
        Py_XDECREF(self->last_written);
        self->last_written = list_of(self->written, self->written_count);
    }
    Py_XINCREF(self->last_written);
    return self->last_written;
}

/* What the passes need besides the plan, and what they found. */
typedef struct {
    double inv_scale, max_norm;
    int measure, measure_found_inf, write_grads, skip;
    fst_measurement seen;
} step_work;

static int run_measure(fst_plan_object *self, step_work *work, fst_status *status)
{
    if (fst_measure(&self->plan, FST_OP_GRAD, work->inv_scale, &work->seen, status))
        return -1;
    work->skip = work->measure_found_inf && work->seen.nonfinite;
    return 0;
}

/* Both passes, with the GIL released unless the step is short. */
static int run_passes(fst_plan_object *self, step_work *work, fst_status *status)
{
    PyThreadState *released = self->hold_tensors ? PyEval_SaveThread() : NULL;
    int failed = work->measure && run_measure(self, work, status);
    if (released)
        PyEval_RestoreThread(released);
    if (failed || work->skip)
        return failed;
    double coefficient = 1.0;
    if (!isnan(work->max_norm))
        coefficient = fst_clip_coefficient(sqrt(work->seen.square_sum), work->max_norm);
    if (fold_all(self, coefficient))
        return -1;
    released = self->hold_tensors ? PyEval_SaveThread() : NULL;
    failed =
        fst_update(&self->plan, self->args, work->inv_scale, work->write_grads, status) != FST_OK;
    if (released)
        PyEval_RestoreThread(released);
    return failed;
}

/* Runs the passes on a bound plan. Returns (skipped, norm or None, what was written, gradients that
 * were or None). */
static PyObject *run(fst_module *module, fst_plan_object *self, const step_options *options)
{
    fst_status status = {0};
    fst_dtype scale_dtype = FST_F32, found_dtype = FST_F32;
    step_work work = {.inv_scale = 1.0, .max_norm = options->max_norm};
    void *found = NULL;
    work.measure_found_inf = options->measure_found_inf;
    work.measure = work.measure_found_inf || !isnan(options->max_norm);
    work.write_grads = options->write_grads;
    if (options->grad_scale != Py_None) {
        const void *scale = scalar_of(module, options->grad_scale, "grad_scale", &scale_dtype);
        if (!scale)
            return NULL;
        work.inv_scale = (double)(float)(1.0 / read_scalar(scale, scale_dtype));
    }
    if (options->found_inf != Py_None) {
        found = scalar_of(module, options->found_inf, "found_inf", &found_dtype);
        if (!found)
            return NULL;
        work.skip = !work.measure_found_inf && read_scalar(found, found_dtype) != 0.0;
    }
    if (fst_plan_seal(&self->plan, FST_OP_PARAM, work.write_grads ? 2 : 1, &status))
        return fst_raise(&status);
    const int measured = work.measure && !work.skip && self->counter_count > 0;
    if (!work.skip && run_passes(self, &work, &status))
        return status.code ? fst_raise(&status) : NULL;
    if (work.measure_found_inf && work.skip) {
        const fst_counter flag = {.data = found, .is_double = found_dtype == FST_F64};
        count(&flag, 1.0);
    }
    PyObject *norm = measured ? PyFloat_FromDouble(sqrt(work.seen.square_sum)) : Py_NewRef(Py_None);
    PyObject *written = work.skip ? PyList_New(0) : list_written(self);
    PyObject *grads = work.skip || !work.write_grads ? Py_NewRef(Py_None)
                                                     : list_of(self->grads, self->grad_count);
    if (!norm || !written || !grads) {
        Py_XDECREF(norm);
        Py_XDECREF(written);
        Py_XDECREF(grads);
        return NULL;
    }
    return Py_BuildValue("NNNN", PyBool_FromLong(work.skip), norm, written, grads);
}

/* step(param_lists, groups, state, fresh, grad_scale, found_inf, measure_found_inf, max_norm,
 * write_grads) */
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
        PyErr_SetString(PyExc_RuntimeError,
                        "this optimizer is stepping already, in another thread");
        return NULL;
    }
    self->busy = 1;
    if (!parse_groups(self, specs))
        result = fst_plan_bind(module, self, param_lists, state, fresh, options.write_grads);
    if (result && PyList_Size(result) == 0) {
        Py_DECREF(result);
        result = run(module, self, &options);
    }
    fst_plan_release(module, self);
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
    PyObject_GC_UnTrack(object);
    fst_plan_release(NULL, self);
    Py_XDECREF(self->last_written);
    fst_plan_free(&self->plan);
    fst_params_free(self);
    PyMem_Free(self->counters);
    PyMem_Free(self->held);
    PyMem_Free(self->written);
    PyMem_Free(self->grads);
    PyMem_Free(self->layouts);
    PyMem_Free(self->args);
    PyMem_Free(self->fold_keys);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int plan_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((fst_plan_object *)object)->last_written);
    return 0;
}

static int plan_clear(PyObject *object)
{
    Py_CLEAR(((fst_plan_object *)object)->last_written);
    return 0;
}

static PyMethodDef plan_methods[] = {
    {"step", plan_step, METH_VARARGS, "One optimizer step; see faststep/optim/_base.py."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "What an optimizer remembers of its parameters between steps."},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},
    {Py_tp_methods, plan_methods},
    {0, NULL},
};

PyType_Spec fst_plan_spec = {
    .name = "faststep._C.Plan",
    .basicsize = sizeof(fst_plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = plan_slots,
};
