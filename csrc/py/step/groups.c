/* Parses the parameter groups of a step. */
#include "py/step/step_plan.h"

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

/* Reads (rule, state keys, has a step counter, hyper-parameters, maximize, {device: lr} or None,
 * has masters). */
static int parse_group(PyObject *spec, fst_group *group)
{
    PyObject *keys, *hyper, *lr; /* borrowed from the tuple, which the caller holds */
    int rule, has_step, maximize, has_master = 0;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple per group");
        return -1;
    }
    if (!PyArg_ParseTuple(spec, "iO!pO!pO|p", &rule, &PyTuple_Type, &keys, &has_step, &PyTuple_Type,
                          &hyper, &maximize, &lr, &has_master))
        return -1;
    if (rule < 0 || rule > FST_RULE_COUNT) {
        PyErr_Format(PyExc_ValueError, "no rule %d", rule);
        return -1;
    }
    if (lr != Py_None && !PyDict_Check(lr)) {
        PyErr_SetString(PyExc_TypeError, "expected lr per device, or None");
        return -1;
    }
    *group = (fst_group){.rule = (fst_rule)rule,
                         .keys = keys,
                         .has_step = has_step,
                         .maximize = maximize,
                         .has_master = has_master,
                         .lr = lr};
    group->key_count = (unsigned)PyTuple_Size(keys);
    const fst_rule_entry *known = &fst_rules[rule];
    group->number_count = fst_numbers_count(rule);
    const unsigned states = known->states + group->number_count;
    if (group->key_count != states + (unsigned)(has_step + has_master) ||
        (group->number_count && !has_step) || (rule == FST_FACTORED && (!has_step || has_master)) ||
        (size_t)PyTuple_Size(hyper) != known->hyper_count) {
        PyErr_Format(PyExc_ValueError, "rule %s takes %u states and %u hyper-parameters",
                     known->name, states, known->hyper_count);
        return -1;
    }
    for (unsigned i = 0; i < group->key_count; i++)
        if (!PyUnicode_CheckExact(PyTuple_GetItem(keys, (Py_ssize_t)i))) {
            PyErr_SetString(PyExc_TypeError, "the name of a state is not a str");
            return -1;
        }
    for (unsigned i = 0; i < known->hyper_count; i++) {
        group->hyper[i] = PyFloat_AsDouble(PyTuple_GetItem(hyper, (Py_ssize_t)i));
        if (group->hyper[i] == -1.0 && PyErr_Occurred())
            return -1;
    }
    Py_INCREF(keys);
    Py_INCREF(lr);
    return 0;
}

int fst_groups_parse(fst_step_plan *self, PyObject *specs)
{
    const Py_ssize_t count = PyList_Size(specs);
    self->groups = PyMem_Calloc((size_t)count + 1, sizeof *self->groups);
    if (!self->groups) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++, self->group_count++) {
        PyObject *spec = PyList_GetItem(specs, i);
        if (!spec)
            return -1;
        Py_INCREF(spec);
        const int failed = parse_group(spec, &self->groups[i]);
        Py_DECREF(spec);
        if (failed)
            return -1;
    }
    return 0;
}

/* Learns the types of the tensors in a dictionary {device: tensors}. That may run Python code,
 * so that reading them later does not. Returns 0, or -1 with a Python error. */
static int learn_types(fst_tensors *tensors, PyObject *of_devices)
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

int fst_groups_learn_types(fst_module *module, const fst_step_plan *self, PyObject *scalars)
{
    if (learn_types(&module->tensors, scalars))
        return -1;
    for (size_t g = 0; g < self->group_count; g++)
        if (self->groups[g].lr != Py_None && learn_types(&module->tensors, self->groups[g].lr))
            return -1;
    return 0;
}
