/* DTensors: tensors that are divided among ranks, with this rank's part in a tensor of its own. */
#include "py/torch/dtensor.h"

/* Only a descriptor of one of these two types is sure to run no Python code. */
static int learn_descriptor(fst_descriptor *known, PyTypeObject *kind, PyObject *descriptor)
{
    if (Py_TYPE(descriptor) != kind) {
        PyErr_Format(PyExc_TypeError, "%R is no descriptor of the expected kind", descriptor);
        return -1;
    }
    known->object = Py_NewRef(descriptor);
    known->read = (descrgetfunc)PyType_GetSlot(kind, Py_tp_descr_get);
    return known->read ? 0 : -1;
}

int fst_dtensors_learn(fst_tensors *tensors, PyTypeObject *type, PyObject *local, PyObject *spec)
{
    fst_dtensors made = {.type = NULL}, before = tensors->dtensors;
    PyObject *grad = PyObject_GetAttrString((PyObject *)type, "grad");
    const int failed = !grad || learn_descriptor(&made.grad, &PyGetSetDescr_Type, grad) ||
                       learn_descriptor(&made.local, &PyMemberDescr_Type, local) ||
                       learn_descriptor(&made.spec, &PyMemberDescr_Type, spec);
    Py_XDECREF(grad);
    if (failed) {
        fst_dtensors_clear(&made);
        return -1;
    }
    Py_INCREF(type);
    made.type = type;
    tensors->dtensors = made;
    fst_dtensors_clear(&before);
    return 0;
}

int fst_dtensors_traverse(fst_dtensors *dtensors, visitproc visit, void *arg)
{
    Py_VISIT(dtensors->type);
    Py_VISIT(dtensors->grad.object);
    Py_VISIT(dtensors->local.object);
    Py_VISIT(dtensors->spec.object);
    return 0;
}

void fst_dtensors_clear(fst_dtensors *dtensors)
{
    Py_CLEAR(dtensors->type);
    Py_CLEAR(dtensors->grad.object);
    Py_CLEAR(dtensors->local.object);
    Py_CLEAR(dtensors->spec.object);
}

static PyObject *attribute(const fst_tensors *tensors, const fst_descriptor *of, PyObject *object)
{
    return of->read(of->object, object, (PyObject *)tensors->dtensors.type);
}

PyObject *fst_dtensor_local(const fst_tensors *tensors, PyObject *object)
{
    return attribute(tensors, &tensors->dtensors.local, object);
}

PyObject *fst_dtensor_spec(const fst_tensors *tensors, PyObject *object)
{
    return attribute(tensors, &tensors->dtensors.spec, object);
}
