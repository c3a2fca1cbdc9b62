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
        return *object ? 0 : -1;
    }
    PyObject *local = fst_dtensor_local(tensors, *object);
    *object = local ? fst_bind_hold(at->self, local) : NULL;
    if (*object && !fst_tensor_is_plain(tensors, *object))
        at->self->traceable = 0;
    return *object ? 0 : -1;
}

int fst_step_list_unsettled(fst_step_plan *self, Py_ssize_t group, Py_ssize_t index)
{
    if (!self->unsettled)
        self->unsettled = PyList_New(0);
    PyObject *pair = self->unsettled ? Py_BuildValue("nn", group, index) : NULL;
    const int failed = !pair || PyList_Append(self->unsettled, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* The specs of a parameter that settle() was told. */
static PyObject **settled_of(const fst_step_plan *self, size_t index)
{
    return self->settled + index * FST_SETTLED;
}

/* Whether a DTensor has a spec; -1 with a Python error. */
static int has_spec(const fst_tensors *tensors, PyObject *object, const PyObject *wanted)
{
    PyObject *spec = fst_dtensor_spec(tensors, object);
    Py_XDECREF(spec); /* the DTensor keeps it */
    return spec ? spec == wanted : -1;
}

int fst_step_is_settled(const fst_tensors *tensors, const fst_step_plan *self, size_t index,
                        PyObject *param, PyObject *tensor, size_t which)
{
    const int divided = fst_tensor_is_dtensor(tensors, param);
    if (divided != fst_tensor_is_dtensor(tensors, tensor))
        return 0;
    if (!divided)
        return 1;
    if (index >= self->settled_count)
        return 0;
    PyObject **specs = settled_of(self, index);
    const int same = has_spec(tensors, param, specs[0]);
    return same > 0 ? has_spec(tensors, tensor, specs[which]) : same;
}

/* Makes room for the specs of a parameter. Returns 0, or -1 with a Python error. */
static int reserve(fst_step_plan *self, size_t index)
{
    if (index < self->settled_count)
        return 0;
    const size_t count = self->param_count > index ? self->param_count : index + 1;
    const size_t before = self->settled_count * FST_SETTLED;
    PyObject **grown = PyMem_Realloc(self->settled, count * FST_SETTLED * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    memset(grown + before, 0, (count * FST_SETTLED - before) * sizeof *grown);
    self->settled = grown;
    self->settled_count = count;
    return 0;
}

PyObject *fst_step_settle(PyObject *object, PyObject *args)
{
    fst_step_plan *self = (fst_step_plan *)object;
    PyObject *of_param, *of_grad, *of_states = NULL, *before[FST_SETTLED];
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "nOO|O!", &index, &of_param, &of_grad, &PyTuple_Type, &of_states))
        return NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer is stepping");
        return NULL;
    }
    if (index < 0 || index >= INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "no parameter %zd", index);
        return NULL;
    }
    const Py_ssize_t states = of_states ? PyTuple_Size(of_states) : 0;
    if (states > FST_MAX_KEYS) {
        PyErr_Format(PyExc_ValueError, "a parameter has at most %d states", (int)FST_MAX_KEYS);
        return NULL;
    }
    if (reserve(self, (size_t)index))
        return NULL;
    PyObject **specs = settled_of(self, (size_t)index);
    memcpy(before, specs, sizeof before);
    memset(specs, 0, sizeof before);
    specs[0] = Py_NewRef(of_param);
    specs[FST_SETTLED_GRAD] = Py_NewRef(of_grad);
    for (Py_ssize_t k = 0; k < states; k++)
        specs[FST_SETTLED_STATE + k] = Py_NewRef(PyTuple_GetItem(of_states, k));
    for (size_t i = 0; i < FST_SETTLED; i++)
        Py_XDECREF(before[i]);
    return Py_NewRef(Py_None);
}

void fst_step_unsettle(fst_step_plan *self)
{
    PyObject **settled = self->settled;
    const size_t count = self->settled_count;
    self->settled = NULL;
    self->settled_count = 0;
    for (size_t i = 0; i < count * FST_SETTLED; i++)
        Py_XDECREF(settled[i]);
    PyMem_Free(settled);
}
