/* Reads arguments that several functions of the loader take. */
#include "py/load/arguments.h"

#include "core/layout.h"

int fst_read_tensor(const fst_module *state, PyObject *object, fst_dl_tensor *tensor)
{
    if ((PyObject *)Py_TYPE(object) != state->tensors.tensor_type) {
        PyErr_SetString(PyExc_TypeError, "expected a torch.Tensor");
        return -1;
    }
    if (state->tensors.api->tensor_from_py_object(object, tensor))
        return -1;
    if (tensor->device.device_type != FST_DL_CPU) {
        PyErr_SetString(PyExc_TypeError, "expected a tensor in CPU memory");
        return -1;
    }
    return 0;
}

int fst_read_memory(const fst_module *state, PyObject *object, fst_dl_tensor *tensor)
{
    if (fst_read_tensor(state, object, tensor))
        return -1;
    if (!tensor->data && fst_layout_count(tensor->ndim, tensor->shape)) {
        PyErr_SetString(PyExc_TypeError, "the tensor has no memory behind it");
        return -1;
    }
    return 0;
}

int64_t *fst_read_indices(const fst_module *state, PyObject *object, Py_ssize_t *count)
{
    fst_dl_tensor tensor;
    if (fst_read_memory(state, object, &tensor))
        return NULL;
    if (tensor.dtype.code != FST_DL_INT || tensor.dtype.bits != 64 || tensor.ndim != 1 ||
        (tensor.shape[0] > 1 && tensor.strides && tensor.strides[0] != 1)) {
        PyErr_SetString(PyExc_TypeError, "expected a packed 1-d tensor of int64");
        return NULL;
    }
    *count = (Py_ssize_t)tensor.shape[0];
    return (int64_t *)(void *)((char *)tensor.data + tensor.byte_offset);
}

int fst_copy_ints(PyObject *sequence, int64_t *out, Py_ssize_t count)
{
    const int is_list = PyList_Check(sequence);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = is_list ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
        int overflow = 0;
        if (!item || !PyLong_CheckExact(item))
            return 0;
        out[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow)
            return 0;
    }
    return 1;
}

Py_ssize_t fst_sequence_size(PyObject *sequence)
{
    return PyList_Check(sequence)    ? PyList_Size(sequence)
           : PyTuple_Check(sequence) ? PyTuple_Size(sequence)
                                     : -1;
}
