/* Gathers the tensors of a step of Adafactor, and finds those that share memory. */
#include <stdlib.h>

#include "py/step/factored_bind.h"

void fst_factored_free(fst_factored_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        fst_factored_entry *entry = &list->entries[i];
        for (int k = 0; k < FST_OF_COUNT; k++)
            Py_CLEAR(entry->objects[k]);
        for (int k = 0; k < 2; k++)
            PyMem_Free(entry->layouts[k]);
    }
    PyMem_Free(list->entries);
    PyMem_Free(list->params);
    *list = (fst_factored_list){.entries = NULL};
}

static int reserve(fst_factored_list *list)
{
    if (list->count < list->capacity)
        return 0;
    const size_t capacity = list->capacity ? 2 * list->capacity : 64;
    fst_factored_entry *entries = PyMem_Realloc(list->entries, capacity * sizeof *entries);
    if (entries)
        list->entries = entries;
    fst_factored *params = PyMem_Realloc(list->params, capacity * sizeof *params);
    if (params)
        list->params = params;
    if (!entries || !params) {
        PyErr_NoMemory();
        return -1;
    }
    list->capacity = capacity;
    return 0;
}

/* The state of a parameter, where the walk through the dictionary has come to it; borrowed. */
static PyObject *walk(fst_factored_list *list, PyObject *states, PyObject *param)
{
    PyObject *key, *value;
    Py_ssize_t next = list->position;
    if (!PyDict_Next(states, &next, &key, &value) || key != param)
        return NULL;
    list->position = next;
    return value;
}

/* The state of a parameter, a new reference: by the walk, as usual, or by torch's hash, which is
 * Python code. NULL if there is none or with a Python error. */
static PyObject *state_of(fst_factored_list *list, PyObject *states, PyObject *param)
{
    PyObject *value = walk(list, states, param);
    if (!value)
        value = PyDict_GetItemWithError(states, param);
    return value ? Py_NewRef(value) : NULL;
}

static int get(PyObject *state, PyObject *name, PyObject **value)
{
    *value = PyDict_GetItemWithError(state, name);
    Py_XINCREF(*value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Takes the entries of a state. Returns 1; 0 if it is missing; -1 with a Python error. */
static int take_state(const fst_names *names, fst_factored_entry *entry, PyObject *state)
{
    PyObject **objects = entry->objects;
    if (!PyDict_Check(state) || PyDict_Size(state) == 0)
        return 0;
    if (get(state, names->step, &objects[FST_OF_STEP]) ||
        get(state, names->row_var, &objects[FST_OF_ROW]))
        return -1;
    entry->has_rows = objects[FST_OF_ROW] != NULL;
    if (entry->has_rows ? get(state, names->col_var, &objects[FST_OF_COL])
                        : get(state, names->variance, &objects[FST_OF_ROW]))
        return -1;
    return 1;
}

/* Adds a parameter with its gradient, which the list takes over. Returns 0, or -1 with a Python
 * error. */
static int add(fst_module *module, fst_factored_list *list, fst_factored_entry found,
               PyObject *states, int *missing)
{
    PyObject *state = state_of(list, states, found.objects[FST_OF_PARAM]);
    const int failed = PyErr_Occurred() || reserve(list);
    int taken = 0;
    if (!failed) {
        fst_factored_entry *entry = &list->entries[list->count++];
        *entry = found;
        taken = state ? take_state(&module->names, entry, state) : 0;
        *missing |= taken == 0;
    }
    for (int k = 0; failed && k < FST_OF_COUNT; k++)
        Py_XDECREF(found.objects[k]);
    Py_XDECREF(state);
    return failed || taken < 0 ? -1 : 0;
}

int fst_factored_gather(fst_module *module, fst_factored_list *list, Py_ssize_t group,
                        PyObject *params, PyObject *states, int *missing)
{
    for (Py_ssize_t i = 0; i < PyList_Size(params); i++) {
        PyObject *param = Py_NewRef(PyList_GetItem(params, i));
        PyObject *grad = fst_tensor_grad(&module->tensors, param);
        if (grad && grad != Py_None) {
            const fst_factored_entry found = {{param, grad}, .group = group, .index = i};
            if (add(module, list, found, states, missing))
                return -1;
            continue;
        }
        if (grad)
            walk(list, states, param); /* it may have a state of an earlier step */
        Py_DECREF(param);
        Py_XDECREF(grad);
        if (!grad)
            return -1;
    }
    return 0;
}

int fst_factored_share(const fst_operand *one, const fst_operand *other, int64_t count)
{
    const fst_extent a = fst_overlap_extent(one, count), b = fst_overlap_extent(other, count);
    return a.begin < b.end && b.begin < a.end;
}

/* The memory of an entry, once sorted. */
typedef struct {
    fst_extent extent;
    size_t entry;
} range;

static int by_begin(const void *left, const void *right)
{
    const range *a = left, *b = right;
    return (a->extent.begin > b->extent.begin) - (a->extent.begin < b->extent.begin);
}

/* Marks the entries whose memory overlaps. Returns whether there are any. */
static int mark(fst_factored_list *list, range *ranges, size_t count)
{
    int marked = 0;
    size_t widest = 0; /* the range before that reaches furthest */
    qsort(ranges, count, sizeof *ranges, by_begin);
    for (size_t i = 1; i < count; i++) {
        if (ranges[i].extent.begin < ranges[widest].extent.end) {
            list->entries[ranges[i].entry].is_left = 1;
            list->entries[ranges[widest].entry].is_left = 1;
            marked = 1;
        }
        if (ranges[i].extent.end > ranges[widest].extent.end)
            widest = i;
    }
    return marked;
}

/* Lists what is written. Returns whether it is what was written last. */
static int list_written(fst_apart *apart, const fst_factored_list *list, range *ranges,
                        size_t *count)
{
    int same = 1;
    *count = 0;
    for (size_t i = 0; i < list->count; i++) {
        const fst_factored *f = &list->params[i];
        const int is_vector = f->kind == FST_FACTORED_VECTOR;
        const fst_operand *ops[] = {&f->param, &f->row, &f->col};
        const int64_t counts[] = {f->count, is_vector ? f->count : f->batch * f->rows,
                                  f->batch * f->cols};
        for (int k = 0; !list->entries[i].is_left && k < 3 - is_vector; k++) {
            const fst_extent extent = fst_overlap_extent(ops[k], counts[k]);
            same = same && *count < apart->count && apart->extents[*count].begin == extent.begin &&
                   apart->extents[*count].end == extent.end;
            ranges[(*count)++] = (range){extent, i};
        }
    }
    return same && *count == apart->count;
}

static int keep(fst_apart *apart, const range *ranges, size_t count)
{
    if (count > apart->capacity) {
        fst_extent *extents = PyMem_Realloc(apart->extents, count * sizeof *extents);
        if (!extents)
            return -1;
        apart->extents = extents;
        apart->capacity = count;
    }
    for (size_t i = 0; i < count; i++)
        apart->extents[i] = ranges[i].extent;
    apart->count = count;
    return 0;
}

int fst_factored_part(fst_module *module, fst_factored_list *list)
{
    fst_apart *apart = &module->apart;
    size_t count;
    range *ranges = PyMem_Malloc((3 * list->count + 1) * sizeof *ranges);
    int failed = !ranges;
    if (ranges && !list_written(apart, list, ranges, &count)) {
        failed = keep(apart, ranges, count);
        if (!failed && mark(list, ranges, count))
            apart->count = 0;
    }
    PyMem_Free(ranges);
    if (failed)
        PyErr_NoMemory();
    return failed ? -1 : 0;
}
