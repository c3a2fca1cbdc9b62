/* The type faststep._C.Plan: one call per optimizer step. */
#include "py/step/step_plan.h"

#include "py/step/bind.h"
#include "py/torch/quiet.h"

#include <structmember.h>

static PyObject *list_of(PyObject *const *objects, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        PyList_SetItem(list, (Py_ssize_t)i, Py_NewRef(objects[i]));
    return list;
}

/* Moves the version counters of the tensors that the step wrote, or lists those that Python has
 * to move. The list of a short step is kept for the next step. That of a long one is not: it
 * would keep large states alive that a user replaces. */
static PyObject *list_written(fst_module *module, fst_step_plan *self)
{
    const size_t moved = self->counted_count;
    fst_record_move_versions(&module->records, self->counted, moved);
    if (moved)
        return list_of(self->written + moved, self->written_count - moved);
    const int keep = self->written_total <= FST_SHORT_STEP;
    const Py_ssize_t count = (Py_ssize_t)self->written_count;
    int same = keep && self->last_written && PyList_Size(self->last_written) == count;
    for (Py_ssize_t i = 0; same && i < count; i++)
        same = PyList_GetItem(self->last_written, i) == self->written[i];
    if (same)
        return Py_NewRef(self->last_written);
    PyObject *list = list_of(self->written, self->written_count), *before = self->last_written;
    self->last_written = keep && list ? Py_NewRef(list) : NULL;
    if (before && !fst_bind_hold(self, before))
        Py_CLEAR(list);
    return list;
}

/* The same for the gradients: None, or those whose version counters Python has to move. */
static PyObject *list_written_grads(const fst_module *module, const fst_step_plan *self)
{
    if (self->traced < 2)
        return list_of(self->grads, self->grad_count);
    fst_trace_move_grads(&module->records, self);
    return Py_NewRef(Py_None);
}

/* The devices whose parameters have gradients: a list of -1 for the host and CUDA ordinals. *known
 * becomes 0 if one of them is not a key of `scalars`. */
static PyObject *list_devices(const fst_step_plan *self, PyObject *scalars, int *known)
{
    PyObject *devices = PyList_New(0);
    *known = 1;
    for (size_t i = 0; devices && i < self->part_count; i++) {
        if (self->parts[i].counter_count == 0)
            continue;
        PyObject *device = PyLong_FromLong(self->parts[i].device);
        const int has = device ? PyDict_Contains(scalars, device) : -1;
        *known = *known && has;
        if (has < 0 || PyList_Append(devices, device))
            Py_CLEAR(devices);
        Py_XDECREF(device);
    }
    return devices;
}

/* (what, value) of step(); takes over `value`. */
static PyObject *answer(const char *what, PyObject *value)
{
    return value ? Py_BuildValue("sN", what, value) : NULL;
}

/* Runs the passes on a bound plan. Returns "done" and (skipped, norm or None, tensors that were
 * written, gradients that were written or None). */
static PyObject *run(fst_module *module, fst_step_plan *self, const fst_step_options *options)
{
    fst_step_outcome outcome = {0};
    int failed = self->is_factored && fst_factored_run(module, self);
    for (size_t i = 1; !failed && i < self->part_count; i++)
        failed = self->parts[i].counter_count && fst_device_step(module, &self->parts[i], options);
    if (!failed && !self->is_factored && self->parts[0].counter_count)
        failed = fst_host_step(module, self, options, &outcome);
    if (failed)
        return NULL;
    PyObject *norm = outcome.measured ? PyFloat_FromDouble(outcome.norm) : Py_NewRef(Py_None);
    const int wrote = !outcome.skipped && options->phase != FST_STEP_MEASURE;
    self->applied += wrote;
    PyObject *written = wrote ? list_written(module, self) : PyList_New(0);
    PyObject *grads =
        wrote && options->write_grads ? list_written_grads(module, self) : Py_NewRef(Py_None);
    if (norm && written && grads)
        return answer(
            "done", Py_BuildValue("NNNN", PyBool_FromLong(outcome.skipped), norm, written, grads));
    Py_XDECREF(norm);
    Py_XDECREF(written);
    Py_XDECREF(grads);
    return NULL;
}

/* The text of the Python error that is set. Clears the error. */
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

static int measures(const fst_step_options *options)
{
    return options->measure_found_inf || !isnan(options->max_norm);
}

/* Learns whether the step is Adafactor's, which measures and writes no gradients. Parameters are
 * learnt anew where that has changed. Returns 0, or -1 with a Python error. */
static int learn_kind(fst_step_plan *self, const fst_step_options *options)
{
    size_t factored = 0;
    for (size_t g = 0; g < self->group_count; g++)
        factored += self->groups[g].rule == FST_FACTORED;
    if (factored && (factored < self->group_count || measures(options) || options->write_grads ||
                     options->phase != FST_STEP_WHOLE)) {
        PyErr_SetString(PyExc_ValueError,
                        "a step of adafactor has no other rules, measures and writes no gradients");
        return -1;
    }
    if (self->is_factored != (factored > 0))
        fst_params_free(self);
    self->is_factored = factored > 0;
    return 0;
}

/* Binds unless the step is like the one before, and runs if nothing is missing. */
static PyObject *bind_and_run(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                              PyObject *state, PyObject *fresh, const fst_step_options *options)
{
    int known, followed = fresh == Py_None &&
                          fst_trace_follow(module, self, param_lists, state, options->write_grads);
    if (followed && self->is_long)
        followed = fst_trace_hold(module, self, param_lists);
    if (followed < 0)
        return NULL;
    if (!followed) {
        PyObject *missing =
            fst_step_bind(module, self, param_lists, state, fresh, options->write_grads);
        if (!missing || (!self->unsettled && PyList_Size(missing) > 0))
            return answer("missing", missing);
        Py_DECREF(missing);
    }
    if (self->is_factored && !self->unsettled && fst_factored_prepare(module, self))
        return NULL;
    if (self->unsettled)
        return answer("layouts", Py_NewRef(self->unsettled));
    if (options->phase == FST_STEP_WHOLE && measures(options) && self->has_dtensors)
        return answer("divided", Py_NewRef(Py_None));
    if (options->measure_found_inf > 1 && self->has_fp16) {
        PyErr_SetString(PyExc_ValueError, "Attempting to unscale FP16 gradients."); /* torch's */
        return NULL;
    }
    PyObject *devices = list_devices(self, options->scalars, &known);
    if (!devices || !known)
        return answer("devices", devices);
    Py_DECREF(devices);
    /* everything on CUDA devices that can fail, before anything is changed */
    for (size_t i = 1; i < self->part_count; i++)
        if (self->parts[i].counter_count &&
            fst_device_prepare(module, self, &self->parts[i], options))
            return fst_is_out_of_memory() ? answer("memory", error_text()) : NULL;
    return run(module, self, options);
}

static PyObject *plan_step(PyObject *object, PyObject *args)
{
    fst_step_plan *self = (fst_step_plan *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *param_lists, *specs, *state, *fresh, *result = NULL;
    fst_step_options options = {.divisor = 1.0};
    if (!PyArg_ParseTuple(args, "O!O!O!OO!idpi", &PyList_Type, &param_lists, &PyList_Type, &specs,
                          &PyDict_Type, &state, &fresh, &PyDict_Type, &options.scalars,
                          &options.measure_found_inf, &options.max_norm, &options.write_grads,
                          &options.phase))
        return NULL;
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
    if (self->offload && fst_offload_check_process(self->offload))
        return NULL;
    self->busy = 1;
    if (!fst_groups_parse(module, self, specs) && !learn_kind(self, &options) &&
        !fst_groups_learn_types(&module->tensors, options.scalars)) {
        fst_quiet_begin(&module->tensors);
        result = bind_and_run(module, self, param_lists, state, fresh, &options);
        fst_quiet_end(&module->tensors);
    }
    fst_step_end(self);
    return result;
}

/* The part that has all parameters of the step; NULL if several have some, or none has. */
static fst_step_part *only_part(const fst_step_plan *self)
{
    fst_step_part *found = NULL;
    for (size_t i = 0; i < self->part_count; i++) {
        if (!self->parts[i].counter_count)
            continue;
        if (found)
            return NULL;
        found = &self->parts[i];
    }
    return found;
}

/* Raises a failed launch as a RuntimeError with the driver's words: nobody adds the parameter's
 * name to a TensorError of a hook. Returns -1. */
static int raise_launch(const fst_module *module)
{
    PyObject *type, *value, *trace, *args = NULL, *text = NULL;
    if (!PyErr_ExceptionMatches(module->tensor_error))
        return -1;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    args = PyObject_GetAttrString(value, "args");
    text = args ? PySequence_GetItem(args, PySequence_Size(args) - 1) : NULL;
    if (text)
        PyErr_SetObject(PyExc_RuntimeError, text);
    Py_XDECREF(text);
    Py_XDECREF(args);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* Launches a step on a device. Returns 1; 0 where nothing was launched and Python has to step,
 * which makes room or explains the error; or -1 with a Python error. */
static int launch_alike(fst_module *module, fst_step_plan *self, fst_step_part *part,
                        const fst_step_options *options)
{
    if (fst_device_prepare(module, self, part, options)) {
        PyErr_Clear();
        return 0;
    }
    return fst_device_step(module, part, options) ? raise_launch(module) : 1;
}

static int step_if_alike(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                         PyObject *state, const fst_step_options *options,
                         fst_step_outcome *outcome)
{
    fst_step_part *part;
    int done = 1;
    if (!fst_trace_follow(module, self, param_lists, state, options->write_grads) ||
        !(part = only_part(self)) || self->counted_count < self->written_count)
        return 0;
    if (part->device != FST_HOST)
        done = launch_alike(module, self, part, options);
    else if (fst_host_step(module, self, options, outcome))
        done = -1;
    if (done > 0)
        fst_record_move_versions(&module->records, self->counted, self->counted_count);
    return done;
}

int fst_step_repeat(fst_module *module, fst_step_plan *self, PyObject *param_lists, PyObject *specs,
                    PyObject *state, const fst_step_options *options, fst_step_outcome *outcome)
{
    if (self->busy || !self->traced || self->is_factored || self->is_long)
        return 0;
    self->busy = 1;
    int done = fst_groups_parse(module, self, specs);
    if (!done)
        done = step_if_alike(module, self, param_lists, state, options, outcome);
    fst_step_end(self);
    return done;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    fst_step_plan *self = PyArg_ParseTuple(args, "") ? fst_object_new(type, kwargs) : NULL;
    if (self && !fst_step_part_on(self, FST_HOST))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *object)
{
    fst_step_plan *self = (fst_step_plan *)object;
    PyObject_GC_UnTrack(object);
    fst_groups_free(self);
    fst_trace_free(self);
    fst_params_free(self);
    fst_step_unsettle(self);
    fst_step_end(self);
    Py_XDECREF(self->last_written);
    Py_XDECREF(self->offload);
    fst_step_free_parts(self);
    PyMem_Free(self->written);
    PyMem_Free(self->counted);
    PyMem_Free(self->grads);
    PyMem_Free(self->layouts);
    PyMem_Free(self->factored);
    fst_object_free(object);
}

static int plan_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((fst_step_plan *)object)->last_written);
    Py_VISIT(((fst_step_plan *)object)->offload);
    return 0;
}

static int plan_clear(PyObject *object)
{
    Py_CLEAR(((fst_step_plan *)object)->last_written);
    return 0;
}

/* forget(): drops the tensors but keeps the tables, which a CUDA graph may read. */
static PyObject *plan_forget(PyObject *object, PyObject *unused)
{
    fst_step_plan *self = (fst_step_plan *)object;
    (void)unused;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer is stepping");
        return NULL;
    }
    self->traced = 0;
    fst_params_free(self);
    fst_step_unsettle(self);
    Py_CLEAR(self->last_written);
    fst_old_pins_free(&self->old_pins);
    fst_groups_free(self);
    return Py_NewRef(Py_None);
}

static PyMethodDef plan_methods[] = {
    {"forget", plan_forget, METH_NOARGS,
     FST_DOC("forget($self, /)",
             "Drop the tensors of earlier steps. Raises RuntimeError during a step.")},
    {"offload", fst_step_offload, METH_O,
     FST_DOC("offload($self, offload, /)",
             "Let an OffloadPipe update the parameters that it has, and return them.")},
    {"settle", fst_step_settle, METH_VARARGS,
     FST_DOC("settle($self, index, param_spec, grad_spec, state_specs=(), /)",
             "Take a gradient and states with these specs for a parameter with that one: all are "
             "divided in the same way. The index counts the parameters of all lists.")},
    {"step", plan_step, METH_VARARGS,
     FST_DOC("step($self, param_lists, groups, state, fresh, scalars, measure_found_inf, max_norm, "
             "write_grads, phase, /)",
             "Update all parameters that have a gradient. Returns (word, value): the word says "
             "what was done or what is missing.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef plan_members[] = {
    {"applied", T_PYSSIZET, offsetof(fst_step_plan, applied), READONLY,
     "How many calls of step() have updated parameters, or have left that to a device."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "What an optimizer remembers of its parameters between steps."},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_clear},
    {Py_tp_methods, plan_methods},
    {Py_tp_members, plan_members},
    {0, NULL},
};

PyType_Spec fst_step_plan_spec = {
    .name = "faststep._C.Plan",
    .basicsize = sizeof(fst_step_plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = plan_slots,
};
