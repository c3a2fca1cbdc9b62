/* The type faststep._C.ReleaseHook: a hook that updates a parameter in backward and frees its
 * gradient, or lets it wait for others. It calls Python unless the step is like the one before. The
 * first gradient of each group in a step calls Python too, which makes the group's rule. */
#include "py/step/step_plan.h"

#include <math.h>

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *plan;      /* of this parameter alone */
    PyObject *otherwise; /* a Python callable for all other steps; called with the parameter */
    PyObject *optimizer; /* a weak reference */
    PyObject *rules;     /* {group: rule} of the step that runs; shared by all hooks */
    PyObject *group;
    /* (append, [bytes], limit): a parameter is given to `append`, and waits, while those that wait
     * have fewer bytes. NULL: it does not wait. */
    PyObject *together;
    int64_t bytes; /* of the gradient */
    /* libtorch's count of active TorchDispatchModes; NULL: not asked */
    int64_t (*mode_depth)(void);
    char plain;        /* no Python code has to see the step */
    char clips;        /* gradients are clipped to the optimizer's max_grad_norm */
    char measures;     /* a gradient is measured, and clipped by `last_norm`, not by its own norm */
    char updated;      /* since the last optimizer.step() */
    double last_norm;  /* of all gradients of the step before; negative: not known */
    double square_sum; /* of the gradient that was measured */
} release_hook;

/* What the gradients are divided by to be clipped by the norm of the step before;
 * release/clip_modes.py computes the same. */
static double lagged_divisor(double max_norm, double last_norm)
{
    const double coefficient = max_norm / (last_norm + 1e-6);
    if (coefficient >= 1.0)
        return 1.0;
    return coefficient == 0.0 ? (double)INFINITY : 1.0 / coefficient;
}

/* Reads how a gradient is clipped. Returns 1, 0 if Python has to look at it, or -1 with a Python
 * error. */
static int read_clipping(const fst_module *module, const release_hook *self, PyObject *optimizer,
                         fst_step_options *options)
{
    PyObject *found = PyObject_GetAttr(optimizer, module->names.max_grad_norm);
    if (!found)
        return -1;
    const int clips = self->clips && PyFloat_CheckExact(found), none = found == Py_None;
    const double max_norm = clips ? PyFloat_AsDouble(found) : (double)NAN;
    Py_DECREF(found);
    if (!self->measures) {
        options->max_norm = max_norm;
        return clips ? max_norm >= 0.0 : none;
    }
    options->measure_undivided = 1; /* also for a step without a limit: the next may have one */
    if (none)
        return 1;
    if (!(max_norm >= 0.0) || self->last_norm < 0.0)
        return 0;
    options->divisor = lagged_divisor(max_norm, self->last_norm);
    return 1;
}

/* [object] or [[object]] */
static PyObject *listed(PyObject *object, int deep)
{
    PyObject *list = PyList_New(1);
    PyObject *item = list && deep ? listed(object, 0) : Py_NewRef(object);
    if (list && item)
        PyList_SetItem(list, 0, item);
    else
        Py_XDECREF(item);
    if (list && !item)
        Py_CLEAR(list);
    return list;
}

static int step_alike(fst_module *module, release_hook *self, PyObject *optimizer, PyObject *rule,
                      PyObject *param)
{
    fst_step_options options = {.max_norm = NAN, .divisor = 1.0, .phase = FST_STEP_WHOLE};
    fst_step_outcome outcome = {0};
    int done = read_clipping(module, self, optimizer, &options);
    if (done <= 0)
        return done;
    PyObject *state = PyObject_GetAttr(optimizer, module->names.state);
    PyObject *params = listed(param, 1), *rules = listed(rule, 0);
    done = state && params && rules ? 0 : -1;
    if (!done && PyDict_Check(state))
        done = fst_step_repeat(module, (fst_step_plan *)self->plan, params, rules, state, &options,
                               &outcome);
    if (done > 0)
        self->square_sum = outcome.square_sum;
    Py_XDECREF(state);
    Py_XDECREF(params);
    Py_XDECREF(rules);
    return done;
}

/* Adds a parameter to those that wait. Returns 1, 0 if it is the first or the last of them, for
 * which Python has more to do, or -1 with a Python error. */
static int join_waiting(PyObject *together, int64_t bytes, PyObject *param)
{
    PyObject *append, *sum;
    long long limit;
    if (!PyArg_ParseTuple(together, "OO!L", &append, &PyList_Type, &sum, &limit))
        return -1;
    PyObject *before = PyList_GetItem(sum, 0);
    if (!before || !PyLong_CheckExact(before))
        return before ? 0 : -1;
    const long long waiting = PyLong_AsLongLong(before);
    if (waiting <= 0 || bytes < 0 || bytes >= limit - waiting)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *after = PyLong_FromLongLong(waiting + bytes);
    if (!after || PyList_SetItem(sum, 0, after))
        return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(append, param, NULL);
    Py_XDECREF(done);
    return done ? 1 : -1;
}

/* As join_waiting, unless gradients are clipped. */
static int wait_alike(const fst_module *module, const release_hook *self, PyObject *optimizer,
                      PyObject *param)
{
    fst_step_options options = {0};
    PyObject *together = Py_NewRef(self->together); /* the calls may run Python code */
    int done = read_clipping(module, self, optimizer, &options);
    if (done > 0)
        done = PyTuple_Check(together) ? join_waiting(together, self->bytes, param) : 0;
    Py_DECREF(together);
    return done;
}

/* Steps or waits if that needs no Python code. Returns 1, 0 if Python has to do it, or -1 with a
 * Python error. */
static int try_alone(fst_module *module, release_hook *self, PyObject *param)
{
    if (!self->plain || self->updated || !self->group || (self->mode_depth && self->mode_depth()))
        return 0;
    PyObject *group = Py_NewRef(self->group); /* comparing it may run Python code */
    PyObject *rule = PyDict_GetItemWithError(self->rules, group);
    Py_XINCREF(rule);
    Py_DECREF(group);
    if (!rule)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *optimizer = Py_XNewRef(PyWeakref_GetObject(self->optimizer));
    if (!optimizer || optimizer == Py_None) {
        Py_DECREF(rule);
        Py_XDECREF(optimizer);
        return optimizer ? 0 : -1;
    }
    const int done = self->together ? wait_alike(module, self, optimizer, param)
                                    : step_alike(module, self, optimizer, rule, param);
    Py_DECREF(rule);
    Py_DECREF(optimizer);
    return done;
}

static PyObject *hook_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    release_hook *self = (release_hook *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    PyObject *param;
    if (!PyArg_ParseTuple(args, "O", &param))
        return NULL;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a ReleaseHook takes no keyword arguments");
        return NULL;
    }
    const int done = try_alone(module, self, param);
    if (done < 0)
        return NULL;
    if (!done)
        return PyObject_CallFunctionObjArgs(self->otherwise, param, NULL);
    self->updated = 1;
    if (self->together)
        return Py_NewRef(Py_None);
    return PyObject_SetAttr(param, module->names.grad, Py_None) ? NULL : Py_NewRef(Py_None);
}

/* ReleaseHook(otherwise, optimizer, rules[, mode_depth]). The last argument is the address of
 * libtorch's function that counts the TorchDispatchModes of a thread. While there are any,
 * Python steps. */
static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    fst_module *module = PyType_GetModuleState(type);
    PyObject *otherwise, *optimizer, *rules;
    unsigned long long mode_depth = 0;
    if (!PyArg_ParseTuple(args, "OOO!|K", &otherwise, &optimizer, &PyDict_Type, &rules,
                          &mode_depth))
        return NULL;
    if (!PyCallable_Check(otherwise) || !PyWeakref_Check(optimizer)) {
        PyErr_SetString(PyExc_TypeError, "expected a callable and a weak reference");
        return NULL;
    }
    release_hook *self = fst_object_new(type, kwargs);
    if (!self)
        return NULL;
    self->otherwise = Py_NewRef(otherwise);
    self->optimizer = Py_NewRef(optimizer);
    self->rules = Py_NewRef(rules);
    self->mode_depth = (int64_t (*)(void))(uintptr_t)mode_depth;
    self->last_norm = -1.0;
    self->plan = PyObject_CallNoArgs((PyObject *)module->types[FST_PLAN]);
    if (!self->plan)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    const release_hook *self = (const release_hook *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->plan);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->optimizer);
    Py_VISIT(self->rules);
    Py_VISIT(self->group);
    Py_VISIT(self->together);
    return 0;
}

/* Keeps what a call needs: the other objects of a reference cycle break it. */
static int hook_clear(PyObject *object)
{
    release_hook *self = (release_hook *)object;
    self->plain = 0;
    Py_CLEAR(self->group);
    Py_CLEAR(self->together);
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    release_hook *self = (release_hook *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->plan);
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->optimizer);
    Py_XDECREF(self->rules);
    Py_XDECREF(self->group);
    Py_XDECREF(self->together);
    fst_object_free(object);
}

static PyMemberDef hook_members[] = {
    {"bytes", T_LONGLONG, offsetof(release_hook, bytes), 0, "Bytes of the parameter's gradient."},
    {"clips", T_BOOL, offsetof(release_hook, clips), 0,
     "Gradients are clipped to the optimizer's max_grad_norm."},
    {"group", T_OBJECT, offsetof(release_hook, group), 0, "The number of the parameter's group."},
    {"last_norm", T_DOUBLE, offsetof(release_hook, last_norm), 0,
     "The norm of all gradients of the step before; negative where it is not known."},
    {"measures", T_BOOL, offsetof(release_hook, measures), 0,
     "A gradient is measured, and clipped by last_norm instead of by its own norm."},
    {"plain", T_BOOL, offsetof(release_hook, plain), 0,
     "The hook may step without calling Python."},
    {"plan", T_OBJECT, offsetof(release_hook, plan), READONLY, "The Plan for this parameter only."},
    {"square_sum", T_DOUBLE, offsetof(release_hook, square_sum), 0,
     "The sum of squares of the gradient that was measured."},
    {"together", T_OBJECT, offsetof(release_hook, together), 0,
     "(append, [bytes], limit) of parameters that wait for each other, or None."},
    {"updated", T_BOOL, offsetof(release_hook, updated), 0,
     "The parameter was updated since the last optimizer.step()."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_doc, FST_DOC("ReleaseHook(otherwise, optimizer, rules, /)",
                        "Updates a parameter in backward and frees its gradient, or calls "
                        "otherwise with the parameter.")},
    {Py_tp_new, hook_new},
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},
    {Py_tp_call, hook_call},
    {Py_tp_members, hook_members},
    {0, NULL},
};

PyType_Spec fst_release_hook_spec = {
    .name = "faststep._C.ReleaseHook",
    .basicsize = sizeof(release_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hook_slots,
};
