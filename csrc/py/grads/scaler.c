/* Updates the loss scale, in CPU or CUDA memory. */
#include "core/layout.h"
#include "gpu/launch.h"
#include "py/module.h"
#include "py/torch/quiet.h"
#include "rules/loss_scale.h"

/* The memory of a one-element tensor. */
typedef struct {
    void *data;
    fst_dl_device device;
} place;

static const char *type_name(uint8_t code)
{
    return code == FST_DL_INT ? "int32" : "float32";
}

/* Reads a one-element tensor of the given type; 0, or -1 with a Python error. */
static int place_of(fst_module *state, PyObject *object, const char *name, uint8_t code, place *out)
{
    fst_dl_tensor tensor;
    fst_problem problem;
    if (fst_tensor_read_as_is(&state->tensors, object, &tensor, &problem)) {
        PyErr_Format(PyExc_TypeError, "%s %s", name, problem.detail);
        return -1;
    }
    if (fst_layout_count(tensor.ndim, tensor.shape) != 1 || tensor.dtype.code != code ||
        tensor.dtype.bits != 32 ||
        (tensor.device.device_type != FST_DL_CPU && tensor.device.device_type != FST_DL_CUDA)) {
        PyErr_Format(PyExc_TypeError, "%s must be a one-element %s tensor in CPU or CUDA memory",
                     name, type_name(code));
        return -1;
    }
    *out = (place){(char *)tensor.data + tensor.byte_offset, tensor.device};
    return 0;
}

/* Does the same for a tensor that must be on the device of `scale`. */
static int place_beside(fst_module *state, const place *scale, PyObject *object, const char *name,
                        uint8_t code, place *out)
{
    if (place_of(state, object, name, code, out))
        return -1;
    if (out->device.device_type == scale->device.device_type &&
        (out->device.device_type == FST_DL_CPU || out->device.device_id == scale->device.device_id))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s must be on the device of scale", name);
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
    place scale, growth, left, found;
} places;

/* Reads the tensors. Returns 0, or -1 with a Python error. */
static int find_places(fst_module *state, PyObject *scale, PyObject *growth_tracker,
                       PyObject *hysteresis_tracker, PyObject *found_inf, places *at)
{
    state->tensors.ran_python = 0;
    *at = (places){.left.data = NULL};
    return place_of(state, scale, "scale", FST_DL_FLOAT, &at->scale) ||
                   place_beside(state, &at->scale, growth_tracker, "growth_tracker", FST_DL_INT,
                                &at->growth) ||
                   place_beside(state, &at->scale, found_inf, "found_inf", FST_DL_FLOAT,
                                &at->found) ||
                   (hysteresis_tracker != Py_None &&
                    place_beside(state, &at->scale, hysteresis_tracker, "hysteresis_tracker",
                                 FST_DL_INT, &at->left))
               ? -1
               : 0;
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
    if (at.scale.device.device_type == FST_DL_CPU) {
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
    return update_on_device(state, scale, at.scale.device.device_id, &launch);
}
