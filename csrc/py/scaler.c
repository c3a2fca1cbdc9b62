/* The loss scale's update on 0-d CPU tensors. */
#include "py/module.h"
#include "rules/loss_scale.h"

enum { FST_DL_INT = 0 };

/* The memory of a one-element CPU tensor of the given type, or NULL with a Python error. */
static void *scalar_of(PyObject *object, const char *name, uint8_t code)
{
    PyObject *capsule =
        PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__dlpack_c_exchange_api__");
    const fst_dl_api *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    fst_dl_tensor tensor;
    Py_XDECREF(capsule);
    if (!api) {
        PyErr_Format(PyExc_TypeError, "%s must be a tensor", name);
        return NULL;
    }
    if (api->tensor_from_py_object(object, &tensor))
        return NULL;
    int64_t count = 1;
    for (int d = 0; d < tensor.ndim; d++)
        count *= tensor.shape[d];
    if (count != 1 || tensor.dtype.code != code || tensor.dtype.bits != 32 ||
        tensor.device.device_type != FST_DL_CPU) {
        PyErr_Format(PyExc_TypeError, "%s must be a one-element %s tensor in CPU memory", name,
                     code == FST_DL_INT ? "int32" : "float32");
        return NULL;
    }
    return (char *)tensor.data + tensor.byte_offset;
}

PyObject *fst_py_update_scale(PyObject *module, PyObject *args)
{
    PyObject *scale, *growth_tracker, *hysteresis_tracker, *found_inf;
    fst_loss_scale_args a;
    int32_t once = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOddiidd", &scale, &growth_tracker, &hysteresis_tracker,
                          &found_inf, &a.growth_factor, &a.backoff_factor, &a.growth_interval,
                          &a.hysteresis, &a.min_scale, &a.max_scale))
        return NULL;
    float *scale_data = scalar_of(scale, "scale", FST_DL_FLOAT);
    int32_t *growth_data =
        scale_data ? scalar_of(growth_tracker, "growth_tracker", FST_DL_INT) : NULL;
    float *found_data = growth_data ? scalar_of(found_inf, "found_inf", FST_DL_FLOAT) : NULL;
    int32_t *left = &once;
    if (found_data && hysteresis_tracker != Py_None)
        left = scalar_of(hysteresis_tracker, "hysteresis_tracker", FST_DL_INT);
    if (!found_data || !left)
        return NULL;
    fst_loss_scale_update(scale_data, growth_data, left, *found_data, &a);
    return Py_NewRef(Py_None);
}
