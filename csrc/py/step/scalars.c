/* The scalar tensors of a step: gradient scale, found inf and norm. */
#include "py/step/step_plan.h"

int fst_step_scalar(fst_module *module, const fst_step_options *options, int device,
                    Py_ssize_t which, const char *name, fst_view *view)
{
    fst_problem problem;
    *view = (fst_view){.device = device};
    if (!options->scalars)
        return 0;
    PyObject *key = PyLong_FromLong(device);
    PyObject *row = key ? PyDict_GetItemWithError(options->scalars, key) : NULL;
    PyObject *object = row && PyTuple_Check(row) ? PyTuple_GetItem(row, which) : NULL;
    Py_XDECREF(key);
    if (!object) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "expected (grad_scale, found_inf, norm) per device");
        return -1;
    }
    if (object == Py_None)
        return 0;
    if (fst_tensor_scalar(&module->tensors, object, device, view, &problem)) {
        PyErr_Format(PyExc_TypeError, "optimizer.%s %s", name, problem.detail);
        return -1;
    }
    return 0;
}

static double read_number(int dtype, const void *data)
{
    switch (dtype) {
    case FST_F64:
        return *(const double *)data;
    case FST_F32:
        return (double)*(const float *)data;
    case FST_BF16:
        return fst_bf16_to_f32(*(const uint16_t *)data);
    case FST_F16:
        return fst_f16_to_f32(*(const uint16_t *)data);
    case FST_U8:
        return *(const uint8_t *)data;
    case FST_I8:
        return *(const int8_t *)data;
    case FST_I16:
        return *(const int16_t *)data;
    case FST_I32:
        return *(const int32_t *)data;
    default:
        return (double)*(const int64_t *)data;
    }
}

/* An integer that its type cannot hold wraps around, as torch's does. */
static void write_number(int dtype, void *data, double value)
{
    const int64_t whole = dtype >= FST_DTYPE_COUNT ? (int64_t)value : 0;
    switch (dtype) {
    case FST_F64:
        *(double *)data = value;
        break;
    case FST_F32:
        *(float *)data = (float)value;
        break;
    case FST_BF16:
        *(uint16_t *)data = fst_f32_to_bf16((float)value);
        break;
    case FST_F16:
        *(uint16_t *)data = fst_f32_to_f16((float)value);
        break;
    case FST_U8:
    case FST_I8:
        *(uint8_t *)data = (uint8_t)whole;
        break;
    case FST_I16:
        *(uint16_t *)data = (uint16_t)whole;
        break;
    case FST_I32:
        *(uint32_t *)data = (uint32_t)whole;
        break;
    default:
        *(int64_t *)data = whole;
    }
}

double fst_scalar_number(const fst_view *view)
{
    const double held = read_number((int)view->dtype, view->data);
    return view->negated ? -held : held;
}

void fst_scalar_write(const fst_view *view, double value)
{
    write_number((int)view->dtype, view->data, view->negated ? -value : value);
}

double fst_counter_next(fst_counter *counter)
{
    const int dtype = (int)counter->dtype;
    uint64_t room;
    if (!counter->data)
        return counter->value;
    const double held = read_number(dtype, counter->data);
    counter->before = counter->negated ? -held : held;
    const double next = counter->before + 1.0;
    if (dtype == FST_F32 || dtype == FST_F64)
        return next;
    write_number(dtype, &room, next);
    return read_number(dtype, &room);
}

void fst_counter_write(const fst_counter *counter, double value)
{
    if (counter->data)
        write_number((int)counter->dtype, counter->data, counter->negated ? -value : value);
}

/* torch rounds the inverse of a fp32 scale to fp32. */
double fst_inverse_of(const fst_view *scale)
{
    const double inverse = scale->data ? 1.0 / fst_scalar_number(scale) : 1.0;
    return scale->dtype == FST_F64 ? inverse : (double)(float)inverse;
}
