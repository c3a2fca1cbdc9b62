/* Parses the parameter groups of a step. */
#include "py/step/bind.h"

/* group[place], or group[key][index] where the place is (key, index); a new reference. */
static PyObject *value_at(PyObject *group, PyObject *place)
{
    if (!PyTuple_Check(place))
        return PyObject_GetItem(group, place);
    PyObject *key = PyTuple_GetItem(place, 0), *index = PyTuple_GetItem(place, 1);
    PyObject *pair = key && index ? PyObject_GetItem(group, key) : NULL, *value = NULL;
    const Py_ssize_t size = pair ? PyObject_Size(pair) : -1;
    if (size == 2)
        value = PyObject_GetItem(pair, index);
    else if (size >= 0)
        PyErr_Format(PyExc_ValueError, "%R of a parameter group has %zd values, not 2", key, size);
    Py_XDECREF(pair);
    return value;
}

static int parse_hyper(PyObject *group, PyObject *place, double *hyper)
{
    PyObject *value = value_at(group, place);
    if (value && !PyFloat_Check(value) && !PyLong_Check(value) &&
        PyObject_HasAttrString(value, "item")) { /* torch warns of float() with requires_grad */
        PyObject *tensor = value;
        value = PyObject_CallMethod(tensor, "item", NULL);
        Py_DECREF(tensor);
    }
    *hyper = value ? PyFloat_AsDouble(value) : -1.0;
    Py_XDECREF(value);
    return *hyper == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* hyper(group, places) gives the numbers at these places in a group, as floats. */
PyObject *fst_py_hyper(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    double hyper[FST_MAX_HYPER];
    (void)module;
    if (given != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a group, and a tuple of places");
        return NULL;
    }
    const Py_ssize_t count = PyTuple_Size(args[1]);
    if (count > FST_MAX_HYPER)
        return PyErr_Format(PyExc_ValueError, "more than %d hyper-parameters", FST_MAX_HYPER);
    for (Py_ssize_t i = 0; i < count; i++)
        if (parse_hyper(args[0], PyTuple_GetItem(args[1], i), &hyper[i]))
            return NULL;
    PyObject *numbers = PyTuple_New(count);
    for (Py_ssize_t i = 0; numbers && i < count; i++) {
        PyObject *number = PyFloat_FromDouble(hyper[i]);
        if (!number || PyTuple_SetItem(numbers, i, number))
            Py_CLEAR(numbers);
    }
    return numbers;
}

/* Keeps another object than before, which is dropped at the end of the step. Returns 0, or -1 with
 * a Python error. */
static int keep_instead(fst_step_plan *self, PyObject **kept, PyObject *object)
{
    PyObject *before = *kept;
    *kept = Py_NewRef(object);
    return before && !fst_bind_hold(self, before) ? -1 : 0;
}

/* Lets a group round states to the nearest, for None, or by the noise of a seed. Returns 0, or -1
 * with a Python error. */
static int set_noise(fst_step_plan *self, fst_group *group, PyObject *noise, int has_step)
{
    const int noisy = noise != Py_None;
    if (noisy && !has_step) {
        PyErr_SetString(PyExc_ValueError, "noise needs a step counter");
        return -1;
    }
    const uint64_t seed = noisy ? PyLong_AsUnsignedLongLong(noise) : 0;
    if (seed == UINT64_MAX && PyErr_Occurred())
        return -1;
    if (noisy != group->noisy || seed != group->seed)
        self->traced = 0;
    group->noisy = noisy;
    group->seed = seed;
    return 0;
}

static int check_names(PyObject *keys)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(keys); i++)
        if (!PyUnicode_CheckExact(PyTuple_GetItem(keys, i))) {
            PyErr_SetString(PyExc_TypeError, "the name of a state is not a str");
            return -1;
        }
    return 0;
}

/* Keeps which parameters are shards of whole ones, and drops the trace if that has changed. Returns
 * 0, or -1 with a Python error. */
static int set_shards(fst_step_plan *self, fst_group *group, PyObject *shards)
{
    if (shards == group->shards)
        return 0;
    if (shards != Py_None && !PyDict_Check(shards)) {
        PyErr_SetString(PyExc_TypeError, "expected shards by parameter, or None");
        return -1;
    }
    self->traced = 0;
    return keep_instead(self, &group->shards, shards);
}

int fst_groups_learn_types(fst_tensors *tensors, PyObject *of_devices)
{
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(of_devices, &at, &key, &value);) {
        if (!PyLong_CheckExact(key)) {
            PyErr_SetString(PyExc_TypeError, "the number of a device is not an int");
            return -1;
        }
        Py_INCREF(value);
        const Py_ssize_t count = PyTuple_Check(value) ? PyTuple_Size(value) : 0;
        for (Py_ssize_t i = 0; i < count; i++)
            fst_tensors_learn(tensors, PyTuple_GetItem(value, i));
        if (!PyTuple_Check(value))
            fst_tensors_learn(tensors, value);
        Py_DECREF(value);
    }
    return 0;
}

/* Keeps the tensors of a group's learning rate, whose types are learnt. Returns 0, or -1 with a
 * Python error. */
static int set_lr(fst_module *module, fst_step_plan *self, fst_group *group, PyObject *lr)
{
    if (lr != Py_None && !PyDict_Check(lr)) {
        PyErr_SetString(PyExc_TypeError, "expected lr per device, or None");
        return -1;
    }
    if (lr != Py_None && fst_groups_learn_types(&module->tensors, lr))
        return -1;
    return lr == group->lr ? 0 : keep_instead(self, &group->lr, lr);
}

/* Reads (rule, state keys, has a step counter, hyper-parameters, maximize, {device: lr} or None,
 * has masters, which are remainders, seed of the noise or None, has codes from so many elements on,
 * {id: shard} or None) into a group that has what was read last. */
static int parse_group(fst_module *module, fst_step_plan *self, PyObject *spec, fst_group *group)
{
    PyObject *keys, *hyper, *lr; /* borrowed from the tuple, which is held */
    PyObject *noise = Py_None, *shards = Py_None;
    int rule, has_step, maximize, has_master = 0, has_remainder = 0;
    long long codes_from = 0;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple per group");
        return -1;
    }
    if (!PyArg_ParseTuple(spec, "iO!pO!pO|ppOLO", &rule, &PyTuple_Type, &keys, &has_step,
                          &PyTuple_Type, &hyper, &maximize, &lr, &has_master, &has_remainder,
                          &noise, &codes_from, &shards))
        return -1;
    if (rule < 0 || rule > FST_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "no rule %d", rule);
        return -1;
    }
    const fst_rule_entry *known = &fst_rules[rule];
    const unsigned key_count = (unsigned)PyTuple_Size(keys), numbers = fst_numbers_count(rule);
    const unsigned states = known->states + numbers;
    if (key_count != states + (unsigned)(has_step + has_master + (codes_from != 0)) ||
        (numbers && !has_step) || codes_from < 0 || (codes_from && !known->states) ||
        (rule == FST_FACTORED && (!has_step || has_master || codes_from)) ||
        (size_t)PyTuple_Size(hyper) != known->hyper_count) {
        PyErr_Format(PyExc_ValueError, "rule %s takes %u states and %u hyper-parameters",
                     known->name, states, known->hyper_count);
        return -1;
    }
    if (keys != group->keys && check_names(keys))
        return -1;
    for (unsigned i = 0; i < known->hyper_count; i++) {
        group->hyper[i] = PyFloat_AsDouble(PyTuple_GetItem(hyper, (Py_ssize_t)i));
        if (group->hyper[i] == -1.0 && PyErr_Occurred())
            return -1;
    }
    if (set_lr(module, self, group, lr) || set_noise(self, group, noise, has_step) ||
        set_shards(self, group, shards))
        return -1;
    if (keys == group->keys && rule == (int)group->rule && has_step == group->has_step &&
        maximize == group->maximize && has_master == group->has_master &&
        has_remainder == group->has_remainder && codes_from == group->codes_from)
        return 0;
    self->traced = 0;
    group->rule = (fst_rule)rule;
    group->key_count = key_count;
    group->number_count = numbers;
    group->has_step = has_step;
    group->maximize = maximize;
    group->has_master = has_master;
    group->has_remainder = has_remainder;
    group->codes_from = codes_from;
    return keep_instead(self, &group->keys, keys);
}

void fst_groups_free(fst_step_plan *self)
{
    fst_group *groups = self->groups;
    const size_t count = self->group_count;
    self->traced = 0;
    self->groups = NULL;
    self->group_count = 0;
    for (size_t g = 0; g < count; g++) {
        Py_XDECREF(groups[g].keys);
        Py_XDECREF(groups[g].lr);
        Py_XDECREF(groups[g].shards);
    }
    PyMem_Free(groups);
}

int fst_groups_parse(fst_module *module, fst_step_plan *self, PyObject *specs)
{
    const size_t count = (size_t)PyList_Size(specs);
    if (!self->groups || count != self->group_count) {
        fst_groups_free(self);
        self->groups = PyMem_Calloc(count + 1, sizeof *self->groups);
        if (!self->groups) {
            PyErr_NoMemory();
            return -1;
        }
        self->group_count = count;
    }
    for (size_t g = 0; g < count; g++) {
        PyObject *spec = Py_XNewRef(PyList_GetItem(specs, (Py_ssize_t)g));
        const int failed = !spec || parse_group(module, self, spec, &self->groups[g]);
        Py_XDECREF(spec);
        if (failed) {
            self->traced = 0;
            return -1;
        }
    }
    return 0;
}
