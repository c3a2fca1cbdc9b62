/* Updates the loss scale, in CPU or CUDA memory. */
#include "gpu/launch.h"
#include "py/module.h"
#include "py/torch/quiet.h"
#include "rules/loss_scale.h"

/* Reads a tensor of one element of this type, on the device of `scale` unless that is NULL. Returns
 * 0, or -1 with a TypeError. */
static int read_one(fst_module *state, PyObject *object, const char *name, int dtype,
                    const fst_view *scale, fst_view *view)
{
    fst_problem problem;
    if (fst_tensor_counter(&state->tensors, object, view, &problem))
        PyErr_Format(PyExc_TypeError, "%s %s", name, problem.detail);
    else if (view->negated || fst_view_count(view) != 1 || (int)view->dtype != dtype)
        PyErr_Format(PyExc_TypeError, "%s must be a one-element %s tensor, not lazily negated",
                     name, dtype == FST_I32 ? "int32" : "float32");
    else if (scale && view->device != scale->device)
        PyErr_Format(PyExc_TypeError, "%s must be on the device of scale", name);
    else
        return 0;
    return -1;
}

static PyObject *update_on_device(fst_module *state, PyObject *scale, int device,
                                  const fst_loss_scale_launch *launch)
{
    fst_status status = {0};
    fst_problem problem;
    void *stream;
    if (fst_tensor_stream(&state->tensors, scale, device, &stream, &problem)) {
        PyErr_Format(PyExc_RuntimeError, "scale %s", problem.detail);
        return NULL;
    }
    if (fst_gpu_loss_scale(device, launch, stream, &status))
        return fst_raise(&status);
    return Py_NewRef(Py_None);
}

/* The tensors of a call. */
typedef struct {
    fst_view scale, growth, left, found;
} places;

/* Reads the tensors. Returns 0, or 1 with a Python error. */
static int find_places(fst_module *state, PyObject *scale, PyObject *growth_tracker,
                       PyObject *hysteresis_tracker, PyObject *found_inf, places *at)
{
    const fst_view *beside = &at->scale;
    state->tensors.ran_python = 0;
    at->left.data = NULL;
    return read_one(state, scale, "scale", FST_F32, NULL, &at->scale) ||
           read_one(state, growth_tracker, "growth_tracker", FST_I32, beside, &at->growth) ||
           read_one(state, found_inf, "found_inf", FST_F32, beside, &at->found) ||
           (hysteresis_tracker != Py_None &&
            read_one(state, hysteresis_tracker, "hysteresis_tracker", FST_I32, beside, &at->left));
}

PyObject *fst_py_update_scale(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *scale, *growth_tracker, *hysteresis_tracker, *found_inf;
    fst_loss_scale_args a;
    int32_t once = 1;
    places at;
    if (!PyArg_ParseTuple(args, "OOOOddiidd", &scale, &growth_tracker, &hysteresis_tracker,
                          &found_inf, &a.growth_factor, &a.backoff_factor, &a.growth_interval,
                          &a.hysteresis, &a.min_scale, &a.max_scale))
        return NULL;
    for (int i = 0; i == 0 || (state->tensors.ran_python && i < FST_ATTEMPTS); i++)
        if (find_places(state, scale, growth_tracker, hysteresis_tracker, found_inf, &at))
            return NULL;
    if (at.scale.device == FST_HOST) {
        fst_loss_scale_update(at.scale.data, at.growth.data, at.left.data ? at.left.data : &once,
                              *(const float *)at.found.data, &a);
        return Py_NewRef(Py_None);
    }
    const fst_loss_scale_launch launch = {
        .scale = (uint64_t)(uintptr_t)at.scale.data,
        .growth_tracker = (uint64_t)(uintptr_t)at.growth.data,
        .hysteresis_left = (uint64_t)(uintptr_t)at.left.data,
        .found_inf = {.data = (uint64_t)(uintptr_t)at.found.data},
        .growth_factor = a.growth_factor,
        .backoff_factor = a.backoff_factor,
        .min_scale = a.min_scale,
        .max_scale = a.max_scale,
        .growth_interval = a.growth_interval,
        .hysteresis = a.hysteresis,
    };
    return update_on_device(state, scale, at.scale.device, &launch);
}
