/* factored_step(groups, state) makes a step of Adafactor. */
#include <math.h>

#include "core/factored_step.h"
#include "py/step/factored_bind.h"
#include "py/step/step_plan.h"
#include "py/torch/quiet.h"

/* What a group computes with. */
typedef struct {
    double lr, beta2_decay, eps1, eps2, d, weight_decay;
    int maximize;
} hyper;

/* A call of the function. */
typedef struct {
    fst_factored_list list;
    hyper *groups;
    Py_ssize_t group_count;
    PyObject *missing, *left, *written; /* the answer */
    const void **counted;               /* records whose version counters are moved here */
    size_t counted_count;
    int64_t elements;
} call;

static void call_free(call *c)
{
    fst_factored_free(&c->list);
    PyMem_Free(c->groups);
    PyMem_Free(c->counted);
    Py_XDECREF(c->missing);
    Py_XDECREF(c->left);
    Py_XDECREF(c->written);
}

static int append(PyObject *list, PyObject *item)
{
    const int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

/* Reads a group and gathers its parameters. Returns 0, or -1 with a Python error. */
static int add_group(fst_module *module, call *c, PyObject *groups, Py_ssize_t index,
                     PyObject *state)
{
    hyper *h = &c->groups[index];
    PyObject *params;
    int missing = 0;
    PyObject *group = PyTuple_GetItem(groups, index);
    if (!PyTuple_Check(group)) {
        PyErr_Format(PyExc_TypeError, "expected a tuple, not %R, as group %zd", Py_TYPE(group),
                     index);
        return -1;
    }
    if (!PyArg_ParseTuple(group,
                          "O!ddddddp;expected (params, lr, beta2_decay, eps1, eps2, d, "
                          "weight_decay, maximize)",
                          &PyList_Type, &params, &h->lr, &h->beta2_decay, &h->eps1, &h->eps2, &h->d,
                          &h->weight_decay, &h->maximize))
        return -1;
    if (fst_factored_gather(module, &c->list, index, params, state, &missing))
        return -1;
    return missing ? append(c->missing, PyLong_FromSsize_t(index)) : 0;
}

static int call_start(fst_module *module, call *c, PyObject *groups, PyObject *state)
{
    c->missing = PyList_New(0);
    c->left = PyList_New(0);
    c->written = PyList_New(0);
    c->group_count = PyTuple_Size(groups);
    c->groups = PyMem_Calloc((size_t)c->group_count + 1, sizeof *c->groups);
    if (!c->missing || !c->left || !c->written)
        return -1;
    if (!c->groups) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < c->group_count; i++)
        if (add_group(module, c, groups, i, state))
            return -1;
    return 0;
}

/* Lists what is for torch. Returns 0, or -1 with a Python error. */
static int list_left(call *c)
{
    for (size_t i = 0; i < c->list.count; i++) {
        const fst_factored_entry *entry = &c->list.entries[i];
        if (entry->is_left && append(c->left, Py_BuildValue("nn", entry->group, entry->index)))
            return -1;
        c->elements += entry->is_left ? 0 : c->list.params[i].count;
    }
    return 0;
}

/* Finds the version counters of what is written. Returns 0, or -1 with a Python error. */
static int list_written(const fst_module *module, call *c)
{
    c->counted = PyMem_Malloc((3 * c->list.count + 1) * sizeof *c->counted);
    if (!c->counted) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < c->list.count; i++)
        for (int k = 0; k < FST_OF_COUNT; k++) {
            PyObject *object = c->list.entries[i].objects[k];
            if (!object || k == FST_OF_GRAD || k == FST_OF_STEP)
                continue;
            const void *record = fst_record_counted(&module->records, object);
            if (record)
                c->counted[c->counted_count++] = record;
            else if (PyList_Append(c->written, object))
                return -1;
        }
    return 0;
}

static double read_step(const fst_view *step)
{
    const double count =
        step->dtype == FST_F64 ? *(const double *)step->data : (double)*(const float *)step->data;
    return step->negated ? -count : count;
}

/* The step count after this step, rounded as the tensor is. */
static double next_step(const fst_view *step)
{
    const double next = read_step(step) + 1.0;
    return step->dtype == FST_F64 ? next : (double)(float)next;
}

static void write_step(const fst_view *step)
{
    const double next = next_step(step), stored = step->negated ? -next : next;
    if (step->dtype == FST_F64)
        *(double *)step->data = stored;
    else
        *(float *)step->data = (float)stored;
}

/* Computes the numbers of the step. Comparisons treat NaN as Python's min() does. */
static int set_numbers(const fst_module *module, call *c)
{
    const hyper *last = NULL;
    double last_step = 0.0, weight = 0.0, rho = 0.0;
    for (size_t i = 0; i < c->list.count; i++) {
        const fst_factored_entry *entry = &c->list.entries[i];
        const hyper *h = &c->groups[entry->group];
        fst_factored *f = &c->list.params[i];
        const double step = next_step(&entry->step);
        if (step <= 0.0)
            return fst_step_raise(module, entry->group, entry->index, "state 'step'", "value",
                                  "is negative");
        if (h != last || step != last_step) {
            const double slow = 1.0 / sqrt(step);
            weight = fst_pow(step, h->beta2_decay);
            rho = slow < h->lr ? slow : h->lr;
            last = h;
            last_step = step;
        }
        f->weight = weight;
        f->rho = h->maximize ? rho : -rho;
        f->decay = h->weight_decay != 0.0 ? 1.0 - h->lr * h->weight_decay : 1.0;
        f->floor = h->eps1;
        f->least_scale = h->eps2;
        f->threshold = h->d;
    }
    return 0;
}

/* Computes. A long step releases the GIL. Returns 0, or -1 with a Python error. */
static int run(fst_module *module, call *c)
{
    fst_tensors *tensors = &module->tensors;
    const int is_long = c->elements > FST_SHORT_STEP;
    fst_released_gil released = {.thread = NULL};
    fst_status status = {0};
    if (is_long)
        released = fst_quiet_release_gil(tensors);
    fst_factored_step(c->list.params, c->list.count, &status);
    if (is_long)
        fst_quiet_acquire_gil(tensors, released);
    if (status.code)
        return fst_raise_int(&status);
    for (size_t i = 0; i < c->list.count; i++)
        write_step(&c->list.entries[i].step);
    if (c->counted_count)
        fst_record_move_versions(&module->records, c->counted, c->counted_count);
    return 0;
}

/* Binds and computes, without Python code in between. Returns 0, or -1 with a Python error. */
static int bind_and_run(fst_module *module, call *c)
{
    if (fst_factored_bind(module, &c->list) || fst_factored_part(module, &c->list) || list_left(c))
        return -1;
    if (PyList_Size(c->left))
        return 0;
    return list_written(module, c) || set_numbers(module, c) || run(module, c) ? -1 : 0;
}

PyObject *fst_py_factored_step(PyObject *module, PyObject *args)
{
    fst_module *known = fst_module_state(module);
    PyObject *groups, *state, *answer = NULL;
    call c = {.groups = NULL};
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &groups, &PyDict_Type, &state))
        return NULL;
    int failed = call_start(known, &c, groups, state);
    if (!failed && PyList_Size(c.missing) == 0) {
        fst_quiet_begin(&known->tensors);
        failed = bind_and_run(known, &c);
        fst_quiet_end(&known->tensors);
    }
    if (!failed)
        answer = Py_BuildValue("OOO", c.missing, c.left, c.written);
    call_free(&c);
    return answer;
}
