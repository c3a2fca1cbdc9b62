/* Functions on lists of tensors on a CUDA device. They launch on torch's current stream and do
 * not wait for the device. */
#include "core/passes.h"
#include "gpu/launch.h"
#include "py/grads/tensor_lists.h"
#include "py/torch/quiet.h"

/* Reads a scalar on the list's device; absent for None. Returns 0, or -1 with a TypeError. */
static int scalar_of(fst_module *state, PyObject *object, int device, const char *name,
                     fst_device_scalar *scalar)
{
    fst_number_place number;
    fst_problem problem;
    *scalar = (fst_device_scalar){0};
    if (object == Py_None)
        return 0;
    if (fst_tensor_scalar(&state->tensors, object, device, &number, &problem)) {
        PyErr_Format(PyExc_TypeError, "%s %s", name, problem.detail);
        return -1;
    }
    *scalar = fst_device_scalar_of(&number);
    return 0;
}

int fst_list_device(fst_module *state, PyObject *tensors, int *device, void **stream)
{
    fst_view view = {.device = FST_HOST};
    fst_problem problem;
    PyObject *first = PySequence_GetItem(tensors, 0);
    if (!first)
        return -1;
    int failed = fst_tensor_view(&state->tensors, first, &view, &problem);
    if (!failed && (view.device < 0 || view.device >= FST_GPU_DEVICES))
        failed = fst_problem_set(&problem, "device", "is not on a CUDA device");
    *device = view.device;
    if (!failed)
        failed = fst_tensor_stream(&state->tensors, first, view.device, stream, &problem) ||
                 fst_stream_note(&state->tensors, view.device, *stream, &problem);
    Py_DECREF(first);
    if (failed)
        PyErr_Format(PyExc_TypeError, "tensor 0 %s", problem.detail);
    return failed ? -1 : 0;
}

static int bind_once(fst_module *state, fst_device_list *it, PyObject *tensors, int written,
                     const fst_wanted_scalar *scalars)
{
    int device;
    if (fst_list_device(state, tensors, &device, &it->stream) ||
        fst_list_bind(state, &it->list, tensors, device, written))
        return -1;
    state->tensors.ran_python = 0;
    for (int i = 0; i < FST_MOST_SCALARS && scalars[i].object; i++)
        if (scalar_of(state, scalars[i].object, device, scalars[i].name, scalars[i].out))
            return -1;
    return 0;
}

int fst_device_list_bind(fst_module *state, fst_device_list *it, PyObject *tensors, int written,
                         const fst_wanted_scalar *scalars)
{
    PyObject *items = PySequence_Tuple(tensors); /* consumes a generator only once */
    int failed = !items;
    *it = (fst_device_list){.tables = NULL};
    for (int i = 0; !failed && (i == 0 || (state->tensors.ran_python && i < FST_ATTEMPTS)); i++) {
        fst_list_free(&it->list);
        *it = (fst_device_list){.tables = NULL};
        failed = bind_once(state, it, items, written, scalars);
    }
    Py_XDECREF(items);
    return failed;
}

PyObject *fst_list_raise(const fst_list *list, const fst_status *status)
{
    PyObject *type = fst_error_type(status);
    if (!type || status->code == FST_DEVICE_LOST)
        return type ? fst_raise(status) : NULL;
    PyObject *size = PyObject_GetAttrString(PyTuple_GetItem(list->items, 0), "shape");
    PyObject *shape = size ? PySequence_Tuple(size) : NULL;
    if (shape)
        PyErr_Format(type, "%s; for %zd tensors, of which the first has the shape %R",
                     status->message, list->count, shape);
    Py_XDECREF(size);
    Py_XDECREF(shape);
    return NULL;
}

/* The module's tables for a list on a device, uploaded as fst_list_upload says, or NULL. */
static fst_gpu_tables *upload(fst_gpu_tables **tables, const fst_list *list, void *stream,
                              int leaves_results, fst_status *status)
{
    const fst_work work = fst_plan_work(&list->plan);
    if (!*tables && !(*tables = fst_gpu_tables_new(list->device, status)))
        return NULL;
    if (leaves_results)
        fst_gpu_tables_set(*tables, &work, NULL, stream, status);
    else
        fst_gpu_tables_set_brief(*tables, &work, stream, status);
    return status->code ? NULL : *tables;
}

fst_gpu_tables *fst_list_upload(fst_module *state, const fst_list *list, void *stream,
                                int leaves_results)
{
    fst_gpu_tables **tables = &state->list_tables[list->device], *ready;
    fst_status status = {0};
    int emptied = 0;
    ready = upload(tables, list, stream, leaves_results, &status);
    if (!ready && status.code == FST_NO_MEMORY && (emptied = fst_empty_cache()) > 0) {
        status = (fst_status){0};
        ready = upload(tables, list, stream, leaves_results, &status);
    }
    if (!ready && emptied >= 0)
        fst_list_raise(list, &status);
    return ready;
}

int fst_device_list_upload(fst_module *state, fst_device_list *it, int leaves_results)
{
    it->tables = fst_list_upload(state, &it->list, it->stream, leaves_results);
    return it->tables ? 0 : -1;
}

PyObject *fst_device_list_finish(fst_device_list *it, int launched, const fst_status *status)
{
    PyObject *done = !launched      ? NULL
                     : status->code ? fst_list_raise(&it->list, status)
                                    : Py_NewRef(Py_None);
    fst_list_free(&it->list);
    return done;
}

PyObject *fst_py_device_norm(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *out;
    fst_norm_launch launch = {0};
    fst_status status = {0};
    fst_device_list it;
    if (!PyArg_ParseTuple(args, "OdO", &tensors, &launch.power, &out))
        return NULL;
    if (launch.power == 0.0) {
        PyErr_SetString(PyExc_TypeError, "a norm of order 0 is not for the device");
        return NULL;
    }
    launch.kind = (int32_t)fst_norm_kind_of(launch.power);
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {{out, "out", &launch.norm}};
    const int ready = !fst_device_list_bind(state, &it, tensors, 0, scalars) &&
                      !fst_device_list_upload(state, &it, 1);
    if (ready)
        fst_gpu_norm(it.tables, &launch, &status);
    PyObject *done = fst_device_list_finish(&it, ready, &status);
    if (!done)
        return NULL;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(it.list.dtypes);
}

PyObject *fst_py_device_unscale(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *inv_scale, *found_inf;
    fst_unscale_launch launch = {.inverse = 1};
    fst_status status = {0};
    fst_device_list it;
    int allow_fp16;
    if (!PyArg_ParseTuple(args, "OOOp", &tensors, &inv_scale, &found_inf, &allow_fp16))
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {
        {inv_scale, "inv_scale", &launch.scale}, {found_inf, "found_inf", &launch.found_inf}};
    int ready = !fst_device_list_bind(state, &it, tensors, 1, scalars);
    if (ready && !allow_fp16 && it.list.dtypes >> FST_F16 & 1u) {
        PyErr_SetString(PyExc_ValueError, "Attempting to unscale FP16 gradients.");
        ready = 0;
    }
    ready = ready && !fst_device_list_upload(state, &it, 1);
    if (ready)
        fst_gpu_unscale(it.tables, &launch, &status);
    return fst_device_list_finish(&it, ready, &status);
}

PyObject *fst_py_device_clip(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *norm;
    fst_scale_launch launch = {0};
    fst_status status = {0};
    fst_device_list it;
    if (!PyArg_ParseTuple(args, "OdO", &tensors, &launch.max_norm, &norm))
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {{norm, "norm", &launch.norm}};
    const int ready = !fst_device_list_bind(state, &it, tensors, 1, scalars) &&
                      !fst_device_list_upload(state, &it, 0);
    if (ready)
        fst_gpu_scale(it.tables, &launch, 0, &status);
    return fst_device_list_finish(&it, ready, &status);
}

PyObject *fst_py_device_clamp(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors;
    fst_clamp_launch launch = {0};
    fst_status status = {0};
    fst_device_list it;
    if (!PyArg_ParseTuple(args, "Od", &tensors, &launch.limit))
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {{NULL, NULL, NULL}};
    const int ready = !fst_device_list_bind(state, &it, tensors, 1, scalars) &&
                      !fst_device_list_upload(state, &it, 0);
    if (ready)
        fst_gpu_clamp(it.tables, &launch, &status);
    return fst_device_list_finish(&it, ready, &status);
}
