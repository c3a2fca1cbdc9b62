/* Functions on lists of tensors in CPU memory. Each binds the list to a plan with one operand
 * per span and runs a pass. */
#include "py/grads/tensor_lists.h"

#include "core/layout.h"
#include "core/passes.h"
#include "py/torch/quiet.h"

void fst_list_free(fst_list *list)
{
    for (Py_ssize_t i = 0; list->layouts && i < list->count; i++)
        PyMem_Free(list->layouts[i]);
    PyMem_Free(list->layouts);
    Py_XDECREF(list->items);
    fst_plan_free(&list->plan);
}

void fst_list_restart(fst_list *list)
{
    for (Py_ssize_t i = 0; i < list->count; i++) {
        PyMem_Free(list->layouts[i]);
        list->layouts[i] = NULL;
    }
    list->dtypes = 0;
    fst_plan_begin(&list->plan);
}

/* Iterates each tensor in its own order of memory, as no other operand shares the span. */
int fst_list_add(fst_list *list, Py_ssize_t index, const fst_view *view, int written,
                 fst_problem *problem)
{
    fst_status status = {0};
    int order[FST_MAX_DIMS];
    if (fst_view_is_on(view, list->device, problem))
        return -1;
    const int64_t count = fst_view_count(view);
    list->dtypes |= 1u << view->dtype;
    if (count == 0)
        return 0;
    if (!fst_view_is_packed(view)) {
        const int kept = fst_layout_order(view->ndim, view->shape, view->strides, order);
        if (fst_view_layout(view, kept, order, written, &list->layouts[index], problem) ||
            (list->layouts[index] &&
             fst_layout_is_for(list->layouts[index], list->device, problem)))
            return -1;
    }
    fst_operand *op = fst_plan_add(&list->plan, count, 0, &status);
    if (!op)
        return fst_problem_set(problem, "storage", "%s", status.message);
    *op = (fst_operand){.data = view->data, .layout = list->layouts[index], .dtype = view->dtype};
    return 0;
}

static int add_item(fst_module *state, fst_list *list, Py_ssize_t index, int written,
                    fst_problem *problem)
{
    fst_view view;
    PyObject *object = PyTuple_GetItem(list->items, index);
    return fst_tensor_view(&state->tensors, object, &view, problem) ||
                   fst_list_add(list, index, &view, written, problem)
               ? -1
               : 0;
}

int fst_list_start(fst_list *list, PyObject *sequence, int device)
{
    *list = (fst_list){.items = PySequence_Tuple(sequence), .device = device};
    fst_plan_init(&list->plan, 1);
    if (!list->items)
        return -1;
    list->count = PyTuple_Size(list->items);
    list->layouts = PyMem_Calloc((size_t)list->count + 1, sizeof *list->layouts);
    if (list->layouts)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int add_items(fst_module *state, fst_list *list, int written)
{
    state->tensors.ran_python = 0;
    for (Py_ssize_t i = 0; i < list->count; i++) {
        fst_problem problem;
        if (add_item(state, list, i, written, &problem)) {
            PyErr_Format(PyExc_TypeError, "tensor %zd %s", i, problem.detail);
            return -1;
        }
    }
    return 0;
}

int fst_list_bind(fst_module *state, fst_list *list, PyObject *sequence, int device, int written)
{
    fst_status status = {0};
    if (fst_list_start(list, sequence, device) || add_items(state, list, written))
        return -1;
    for (int i = 1; state->tensors.ran_python && i < FST_ATTEMPTS; i++) {
        fst_list_restart(list);
        if (add_items(state, list, written))
            return -1;
    }
    if (fst_plan_seal(&list->plan, 0, (unsigned)written, &status))
        return fst_raise_int(&status);
    return 0;
}

PyObject *fst_py_any_dtensor(PyObject *module, PyObject *tensors)
{
    const fst_module *state = fst_module_state(module);
    PyObject *items = PySequence_Tuple(tensors);
    int found = 0;
    if (!items)
        return NULL;
    for (Py_ssize_t i = 0, count = PyTuple_Size(items); i < count && !found; i++)
        found = fst_tensor_is_dtensor(&state->tensors, PyTuple_GetItem(items, i));
    Py_DECREF(items);
    return PyBool_FromLong(found);
}

PyObject *fst_py_collect_grads(PyObject *module, PyObject *params)
{
    fst_module *state = fst_module_state(module);
    PyObject *items = PySequence_Tuple(params), *grads = PyList_New(0);
    if (!items || !grads)
        goto error;
    const Py_ssize_t count = PyTuple_Size(items);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *grad = fst_tensor_grad(&state->tensors, PyTuple_GetItem(items, i));
        if (!grad)
            goto error;
        const int failed = grad != Py_None && PyList_Append(grads, grad);
        Py_DECREF(grad);
        if (failed)
            goto error;
    }
    Py_DECREF(items);
    return grads;
error:
    Py_XDECREF(items);
    Py_XDECREF(grads);
    return NULL;
}

PyObject *fst_py_fusable(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors;
    int device = FST_HOST, fusable = 1;
    fst_list list;
    if (!PyArg_ParseTuple(args, "O|i", &tensors, &device))
        return NULL;
    const int failed = fst_list_start(&list, tensors, device);
    for (Py_ssize_t i = 0; !failed && fusable && i < list.count; i++) {
        fst_problem problem;
        fusable = !add_item(state, &list, i, 1, &problem);
    }
    fst_list_free(&list);
    return failed ? NULL : PyBool_FromLong(fusable);
}

PyObject *fst_py_measure(PyObject *module, PyObject *args)
{
    PyObject *tensors, *result = NULL;
    double inv_scale;
    fst_list list;
    fst_measurement out = {0};
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Od", &tensors, &inv_scale))
        return NULL;
    if (!fst_list_bind(fst_module_state(module), &list, tensors, FST_HOST, 0)) {
        Py_BEGIN_ALLOW_THREADS
        fst_measure(&list.plan, 0, inv_scale, &out, &status);
        Py_END_ALLOW_THREADS
        result = status.code ? fst_raise(&status)
                             : Py_BuildValue("dN", out.square_sum, PyBool_FromLong(out.nonfinite));
    }
    fst_list_free(&list);
    return result;
}

PyObject *fst_py_norm(PyObject *module, PyObject *args)
{
    PyObject *tensors, *result = NULL;
    double p, norm = 0.0;
    fst_list list;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Od", &tensors, &p))
        return NULL;
    if (!fst_list_bind(fst_module_state(module), &list, tensors, FST_HOST, 0)) {
        Py_BEGIN_ALLOW_THREADS
        fst_total_norm(&list.plan, 0, p, &norm, &status);
        Py_END_ALLOW_THREADS
        result = status.code ? fst_raise(&status) : Py_BuildValue("dI", norm, list.dtypes);
    }
    fst_list_free(&list);
    return result;
}

typedef fst_code (*change_fn)(fst_plan *, unsigned, double, fst_status *);

static PyObject *changed(PyObject *module, PyObject *args, change_fn pass)
{
    PyObject *tensors, *result = NULL;
    double number;
    fst_list list;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Od", &tensors, &number))
        return NULL;
    if (!fst_list_bind(fst_module_state(module), &list, tensors, FST_HOST, 1)) {
        Py_BEGIN_ALLOW_THREADS
        pass(&list.plan, 0, number, &status);
        Py_END_ALLOW_THREADS
        result = status.code ? fst_raise(&status) : Py_NewRef(Py_None);
    }
    fst_list_free(&list);
    return result;
}

PyObject *fst_py_scale(PyObject *module, PyObject *args)
{
    return changed(module, args, fst_scale);
}

PyObject *fst_py_clamp(PyObject *module, PyObject *args)
{
    return changed(module, args, fst_clamp);
}
