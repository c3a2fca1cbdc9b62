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

double fst_scalar_number(const fst_view *view)
{
    const double held = view->dtype == FST_F64    ? *(const double *)view->data
                        : view->dtype == FST_F32  ? (double)*(const float *)view->data
                        : view->dtype == FST_BF16 ? fst_bf16_to_f32(*(const uint16_t *)view->data)
                                                  : fst_f16_to_f32(*(const uint16_t *)view->data);
    return view->negated ? -held : held;
}

/* torch rounds the inverse of a fp32 scale to fp32. */
double fst_inverse_of(const fst_view *scale)
{
    const double inverse = scale->data ? 1.0 / fst_scalar_number(scale) : 1.0;
    return scale->dtype == FST_F64 ? inverse : (double)(float)inverse;
}
