/* The scalar tensors of a step: gradient scale, found inf and norm; and numbers in CPU memory. */
#include "py/step/step_plan.h"

int fst_step_scalars(fst_module *module, const fst_step_options *options, int device,
                     fst_step_scalar_set *scalars)
{
    const char *names[] = {"grad_scale", "found_inf",
                           device == FST_HOST ? "norm" : "last_grad_norm"};
    fst_number_place *const places[] = {&scalars->grad_scale, &scalars->found_inf, &scalars->norm};
    fst_problem problem;
    *scalars = (fst_step_scalar_set){.norm = {.data = NULL}};
    if (!options->scalars)
        return 0;
    PyObject *key = PyLong_FromLong(device);
    PyObject *row = key ? PyDict_GetItemWithError(options->scalars, key) : NULL;
    Py_XINCREF(row);
    Py_XDECREF(key);
    int failed = !row || !PyTuple_Check(row);
    if (failed && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected (grad_scale, found_inf, norm) per device");
    for (int i = 0; !failed && i < 3; i++) {
        PyObject *object = PyTuple_GetItem(row, i);
        failed = !object || (object != Py_None && fst_tensor_scalar(&module->tensors, object,
                                                                    device, places[i], &problem));
        if (failed && object)
            PyErr_Format(PyExc_TypeError, "optimizer.%s %s", names[i], problem.detail);
    }
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

/* The types that C has: name, type, and what is written of a value and of its whole number. */
#define PLAIN_TYPES(X)         \
    X(FST_F64, double, value)  \
    X(FST_F32, float, value)   \
    X(FST_U8, uint8_t, whole)  \
    X(FST_I8, int8_t, whole)   \
    X(FST_I16, int16_t, whole) \
    X(FST_I32, int32_t, whole) \
    X(FST_I64, int64_t, whole)

static double read_number(int dtype, const void *data)
{
    switch (dtype) {
#define READ(name, type, from) \
    case name:                 \
        return (double)*(const type *)data;
        PLAIN_TYPES(READ)
#undef READ
    case FST_BF16:
        return fst_bf16_to_f32(*(const uint16_t *)data);
    default:
        return fst_f16_to_f32(*(const uint16_t *)data);
    }
}

/* An integer that its type cannot hold wraps around, as torch's does. */
static void write_number(int dtype, void *data, double value)
{
    const int64_t whole = dtype >= FST_DTYPE_COUNT ? (int64_t)value : 0;
    switch (dtype) {
#define WRITE(name, type, from)     \
    case name:                      \
        *(type *)data = (type)from; \
        break;
        PLAIN_TYPES(WRITE)
#undef WRITE
    default:
        *(uint16_t *)data =
            dtype == FST_BF16 ? fst_f32_to_bf16((float)value) : fst_f32_to_f16((float)value);
    }
}

double fst_number_read(const fst_number_place *number)
{
    const double held = read_number((int)number->dtype, number->data);
    return number->negated ? -held : held;
}

void fst_number_write(const fst_number_place *number, double value)
{
    write_number((int)number->dtype, number->data, number->negated ? -value : value);
}

double fst_counter_next(fst_counter *counter)
{
    const int dtype = (int)counter->at.dtype;
    uint64_t room;
    if (!counter->at.data)
        return counter->value;
    counter->before = fst_number_read(&counter->at);
    const double next = counter->before + 1.0;
    if (dtype == FST_F32 || dtype == FST_F64)
        return next;
    write_number(dtype, &room, next);
    return read_number(dtype, &room);
}

void fst_counter_write(const fst_counter *counter, double value)
{
    if (counter->at.data)
        fst_number_write(&counter->at, value);
}
