/* Parameters, gradients and states that are DTensors: the step works on their local tensors. */
#include "py/step/bind.h"
#include "py/torch/dtensor.h"

int fst_bind_local(fst_binding *at, fst_param *param, unsigned which, PyObject **object)
{
    const fst_tensors *tensors = &at->module->tensors;
    const unsigned bit = 1u << which;
    /* A later attempt binds the objects that the first has found, even if one has changed its class
     * meanwhile. */
    if (!at->again && fst_tensor_is_dtensor(tensors, *object))
        param->dtensors |= bit;
    else if (!at->again)
        param->dtensors &= ~bit;
    if (!(param->dtensors & bit))
        return 0;
    if (at->again) {
        *object = fst_bind_found(at);
        return 0;
    }
    PyObject *local = fst_dtensor_local(tensors, *object);
    *object = local ? fst_bind_hold(at->self, local) : NULL;
    if (*object && !fst_tensor_is_plain(tensors, *object))
        at->self->traceable = 0;
    return *object ? 0 : -1;
}

int fst_bind_unsettled(fst_binding *at)
{
    fst_step_plan *self = at->self;
    if (!self->unsettled)
        self->unsettled = PyList_New(0);
    PyObject *pair = self->unsettled ? Py_BuildValue("nn", at->group, at->index) : NULL;
    const int failed = !pair || PyList_Append(self->unsettled, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

int fst_step_is_settled(const fst_tensors *tensors, const fst_step_plan *self, size_t index,
                        PyObject *param, PyObject *grad)
{
    if (!fst_tensor_is_dtensor(tensors, param))
        return 1;
    if (!fst_tensor_is_dtensor(tensors, grad) || index >= self->settled_count)
        return 0;
    PyObject *of_param = fst_dtensor_spec(tensors, param);
    PyObject *of_grad = of_param ? fst_dtensor_spec(tensors, grad) : NULL;
    const int same =
        self->settled[2 * index] == of_param && self->settled[2 * index + 1] == of_grad;
    const int failed = !of_grad;
    Py_XDECREF(of_param);
    Py_XDECREF(of_grad);
    return failed ? -1 : same;
}

/* Makes room for the specs of a parameter. Returns 0, or -1 with a Python error. */
static int reserve(fst_step_plan *self, size_t index)
{
    if (index < self->settled_count)
        return 0;
    const size_t count = self->param_count > index ? self->param_count : index + 1;
    PyObject **grown = PyMem_Realloc(self->settled, 2 * count * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    memset(grown + 2 * self->settled_count, 0, 2 * (count - self->settled_count) * sizeof *grown);
    self->settled = grown;
    self->settled_count = count;
    return 0;
}

PyObject *fst_step_settle(PyObject *object, PyObject *args)
{
    fst_step_plan *self = (fst_step_plan *)object;
    PyObject *of_param, *of_grad;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "nOO", &index, &of_param, &of_grad))
        return NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer is stepping");
        return NULL;
    }
    if (index < 0 || index >= INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "no parameter %zd", index);
        return NULL;
    }
    if (reserve(self, (size_t)index))
        return NULL;
    PyObject **pair = self->settled + 2 * index, *before[2] = {pair[0], pair[1]};
    pair[0] = Py_NewRef(of_param);
    pair[1] = Py_NewRef(of_grad);
    Py_XDECREF(before[0]);
    Py_XDECREF(before[1]);
    return Py_NewRef(Py_None);
}

void fst_step_unsettle(fst_step_plan *self)
{
    PyObject **settled = self->settled;
    const size_t count = self->settled_count;
    self->settled = NULL;
    self->settled_count = 0;
    for (size_t i = 0; i < 2 * count; i++)
        Py_XDECREF(settled[i]);
    PyMem_Free(settled);
}
