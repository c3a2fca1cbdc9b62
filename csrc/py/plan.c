/* The type faststep._C.Plan: one call per optimizer step. */
#include "py/plan.h"

#include "py/trace.h"

/* Reads (rule, state keys, has a step counter, hyper-parameters, maximize, {device: lr} or None).
 */
static int parse_group(PyObject *spec, fst_group *group)
{
    PyObject *keys, *hyper, *lr;
    int rule, has_step, maximize;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple per group");
        return -1;
    }
    if (!PyArg_ParseTuple(spec, "iO!pO!pO", &rule, &PyTuple_Type, &keys, &has_step, &PyTuple_Type,
                          &hyper, &maximize, &lr))
        return -1;
    if (rule < 0 || rule >= FST_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "no rule %d", rule);
        return -1;
    }
    if (lr != Py_None && !PyDict_Check(lr)) {
        PyErr_SetString(PyExc_TypeError, "expected lr per device, or None");
        return -1;
    }
    *group = (fst_group){
        .rule = (fst_rule)rule, .keys = keys, .has_step = has_step, .maximize = maximize, .lr = lr};
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

static PyObject *list_of(PyObject *const *objects, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        PyList_SetItem(list, (Py_ssize_t)i, Py_NewRef(objects[i]));
    return list;
}

/* Finds the records of what is written; up to the first that has none. Where what was bound still
 * stands they do too. */
static int count_written(const fst_module *module, fst_plan_object *self)
{
    while (self->counted_count < self->written_count) {
        const void *impl = fst_record_counted(&module->records, self->written[self->counted_count]);
        if (!impl)
            return 0;
        if (fst_reserve(&self->counted, &self->counted_capacity, self->counted_count,
                        sizeof *self->counted))
            return -1;
        self->counted[self->counted_count++] = impl;
    }
    return 0;
}

/* Moves the version counters of what the step wrote, or lists the tensors for Python to do so. A
 * short step keeps the list for the next one; a long one, on any device, does not: it would keep
 * large states alive that a user replaces. */
static PyObject *list_written(fst_module *module, fst_plan_object *self)
{
    const size_t moved = self->counted_count;
    fst_record_move_versions(&module->records, self->counted, moved);
    if (moved)
        return list_of(self->written + moved, self->written_count - moved);
    if (self->hold_tensors || self->written_total > FST_SHORT_STEP) {
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

/* The devices whose parameters have gradients: a list of -1 for the host and CUDA ordinals. *known
 * becomes 0 if one of them is not a key of `scalars`. */
static PyObject *list_devices(const fst_plan_object *self, PyObject *scalars, int *known)
{
    PyObject *devices = PyList_New(0);
    *known = 1;
    for (size_t i = 0; devices && i < self->share_count; i++) {
        if (self->shares[i].counter_count == 0)
            continue;
        PyObject *device = PyLong_FromLong(self->shares[i].device);
        const int has = device ? PyDict_Contains(scalars, device) : -1;
        *known = *known && has;
        if (has < 0 || PyList_Append(devices, device))
            Py_CLEAR(devices);
        Py_XDECREF(device);
    }
    return devices;
}

/* Everything a step needs of its devices, before it changes anything. */
static int prepare_shares(fst_module *module, fst_plan_object *self,
                          const fst_step_options *options)
{
    for (size_t i = 1; i < self->share_count; i++)
        if (self->shares[i].counter_count &&
            fst_device_prepare(module, self, &self->shares[i], options))
            return -1;
    return 0;
}

static int run_shares(fst_module *module, fst_plan_object *self, const fst_step_options *options,
                      fst_step_outcome *outcome)
{
    for (size_t i = 1; i < self->share_count; i++)
        if (self->shares[i].counter_count && fst_device_step(module, &self->shares[i], options))
            return -1;
    return self->shares[0].counter_count ? fst_host_step(module, self, options, outcome) : 0;
}

/* (what, value) of step(); takes over `value`. */
static PyObject *answer(const char *what, PyObject *value)
{
    return value ? Py_BuildValue("sN", what, value) : NULL;
}

/* Runs the passes on a bound plan: "done" and (skipped, norm or None, what was written, gradients
 * that were or None). */
static PyObject *run(fst_module *module, fst_plan_object *self, const fst_step_options *options)
{
    fst_step_outcome outcome = {0};
    if (run_shares(module, self, options, &outcome))
        return NULL;
    if (outcome.refused)
        return answer("squares", Py_NewRef(Py_None));
    PyObject *norm = outcome.measured ? PyFloat_FromDouble(outcome.norm) : Py_NewRef(Py_None);
    PyObject *written = outcome.skipped ? PyList_New(0) : list_written(module, self);
    PyObject *grads = outcome.skipped || !options->write_grads
                          ? Py_NewRef(Py_None)
                          : list_of(self->grads, self->grad_count);
    if (norm && written && grads)
        return answer(
            "done", Py_BuildValue("NNNN", PyBool_FromLong(outcome.skipped), norm, written, grads));
    Py_XDECREF(norm);
    Py_XDECREF(written);
    Py_XDECREF(grads);
    return NULL;
}

/* The text of the Python error that is set, and no longer is. */
static PyObject *error_text(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return text;
}

/* Binds, and runs if nothing is missing. */
static PyObject *bind_and_run(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                              PyObject *state, PyObject *fresh, const fst_step_options *options)
{
    int known;
    if (fresh != Py_None || options->write_grads ||
        !fst_trace_holds(module, self, param_lists, state)) {
        PyObject *missing =
            fst_plan_bind(module, self, param_lists, state, fresh, options->write_grads);
        if (!missing || PyList_Size(missing) > 0)
            return answer("missing", missing);
        Py_DECREF(missing);
    }
    PyObject *devices = list_devices(self, options->scalars, &known);
    if (!devices || !known)
        return answer("devices", devices);
    Py_DECREF(devices);
    if (count_written(module, self) || fst_plan_check_inference(module, self, param_lists))
        return NULL;
    if (prepare_shares(module, self, options))
        return PyErr_ExceptionMatches(PyExc_MemoryError) ? answer("memory", error_text()) : NULL;
    return run(module, self, options);
}

/* step(param_lists, groups, state, fresh, scalars, measure_found_inf, max_norm, write_grads, phase,
 * squares) */
static PyObject *plan_step(PyObject *object, PyObject *args)
{
    fst_plan_object *self = (fst_plan_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *param_lists, *specs, *state, *fresh, *squares = Py_None, *result = NULL;
    fst_step_options options;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!pdpi|O", &PyList_Type, &param_lists, &PyList_Type, &specs,
                          &PyDict_Type, &state, &fresh, &PyDict_Type, &options.scalars,
                          &options.measure_found_inf, &options.max_norm, &options.write_grads,
                          &options.phase, &squares))
        return NULL;
    if (squares != Py_None && !PyObject_TypeCheck(squares, module->squares_type)) {
        PyErr_SetString(PyExc_TypeError, "squares must be a Squares or None");
        return NULL;
    }
    options.squares = squares == Py_None ? NULL : (fst_squares_object *)squares;
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
        result = bind_and_run(module, self, param_lists, state, fresh, &options);
    fst_plan_release(module, self);
    self->busy = 0;
    return result;
}

static int is_on_host(const fst_plan_object *self)
{
    for (size_t i = 1; i < self->share_count; i++)
        if (self->shares[i].counter_count)
            return 0;
    return self->shares[0].counter_count > 0;
}

static int step_if_alike(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                         PyObject *state)
{
    const fst_step_options options = {.max_norm = (double)NAN, .phase = FST_STEP_WHOLE};
    fst_step_outcome outcome = {0};
    if (!fst_trace_holds(module, self, param_lists, state) || !is_on_host(self))
        return 0;
    if (count_written(module, self))
        return -1;
    if (self->counted_count < self->written_count)
        return 0;
    if (fst_host_step(module, self, &options, &outcome))
        return -1;
    fst_record_move_versions(&module->records, self->counted, self->counted_count);
    return 1;
}

int fst_plan_step_alike(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                        PyObject *specs, PyObject *state)
{
    if (self->busy || !self->traced)
        return 0;
    self->busy = 1;
    const int done =
        parse_groups(self, specs) ? -1 : step_if_alike(module, self, param_lists, state);
    fst_plan_release(module, self);
    self->busy = 0;
    return done;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Plan() takes no arguments");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    fst_plan_object *self = (fst_plan_object *)allocate(type, 0); /* zeroed */
    if (self && !fst_plan_share(self, FST_HOST))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *object)
{
    fst_plan_object *self = (fst_plan_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    fst_trace_free(self);
    fst_plan_release(NULL, self);
    Py_XDECREF(self->last_written);
    fst_plan_free_shares(self);
    fst_params_free(self);
    PyMem_Free(self->held);
    PyMem_Free(self->written);
    PyMem_Free(self->counted);
    PyMem_Free(self->grads);
    PyMem_Free(self->layouts);
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

/* forget(): lets go of the tensors, but keeps the tables: a CUDA graph may read them. */
static PyObject *plan_forget(PyObject *object, PyObject *unused)
{
    fst_plan_object *self = (fst_plan_object *)object;
    (void)unused;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer is stepping");
        return NULL;
    }
    fst_trace_forget(self);
    fst_params_free(self);
    Py_CLEAR(self->last_written);
    return Py_NewRef(Py_None);
}

static PyMethodDef plan_methods[] = {
    {"forget", plan_forget, METH_NOARGS, "Let go of the tensors of earlier steps."},
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
