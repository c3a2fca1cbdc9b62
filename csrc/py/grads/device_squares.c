/* Sums of squares chunk by chunk on a CUDA device, for ranks that measure a part each, and their
 * fold. */
#include "core/passes.h"
#include "gpu/launch.h"
#include "py/grads/tensor_lists.h"

/* Finds the elements of a packed float64 tensor on a device. Returns 0, or -1 with a TypeError. */
static int sums_of(fst_module *state, PyObject *object, int device, uint64_t *data, int64_t *count)
{
    fst_view view;
    fst_problem problem;
    if (fst_tensor_view(&state->tensors, object, &view, &problem) ||
        fst_view_is_on(&view, device, &problem)) {
        PyErr_Format(PyExc_TypeError, "sums %s", problem.detail);
        return -1;
    }
    if (view.dtype != FST_F64 || view.negated || !fst_view_is_packed(&view)) {
        PyErr_SetString(PyExc_TypeError, "sums must be a contiguous float64 tensor");
        return -1;
    }
    if (state->tensors.ran_python) {
        PyErr_SetString(PyExc_TypeError, "sums runs Python code when it is looked at");
        return -1;
    }
    *data = (uint64_t)(uintptr_t)view.data;
    *count = fst_view_count(&view);
    return 0;
}

PyObject *fst_py_device_chunk_squares(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *scale, *sums, *found_inf;
    fst_norm_launch launch = {.kind = FST_NORM_SQUARES};
    fst_status status = {0};
    fst_device_list it;
    int64_t count = 0;
    if (!PyArg_ParseTuple(args, "OOOO", &tensors, &scale, &sums, &found_inf))
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {
        {scale, "grad_scale", &launch.scale}, {found_inf, "found_inf", &launch.found_inf}};
    int ready = !fst_device_list_bind(state, &it, tensors, 0, scalars) &&
                !sums_of(state, sums, it.list.device, &launch.tables.partial, &count);
    if (ready && (size_t)count != fst_plan_work(&it.list.plan).chunk_count) {
        PyErr_Format(PyExc_ValueError, "expected room for %zu sums, not for %lld",
                     fst_plan_work(&it.list.plan).chunk_count, (long long)count);
        ready = 0;
    }
    ready = ready && !fst_device_list_upload(state, &it, 1);
    if (ready)
        fst_gpu_norm(it.tables, &launch, &status);
    return fst_device_list_finish(&it, ready, &status);
}

PyObject *fst_py_device_fold_squares(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *sums, *norm;
    fst_norm_launch launch = {.kind = FST_NORM_SQUARES, .only_fold = 1};
    fst_status status = {0};
    fst_device_list it;
    int64_t count = 0;
    if (!PyArg_ParseTuple(args, "OO", &sums, &norm))
        return NULL;
    PyObject *tensors = PyTuple_Pack(1, sums);
    if (!tensors)
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {{norm, "norm", &launch.norm}, {0}};
    int ready = !fst_device_list_bind(state, &it, tensors, 0, scalars) &&
                !sums_of(state, sums, it.list.device, &launch.tables.partial, &count);
    Py_DECREF(tensors);
    if (ready && (count < 1 || count > UINT32_MAX)) {
        PyErr_Format(PyExc_ValueError, "expected from 1 to %u sums, not %lld", UINT32_MAX,
                     (long long)count);
        ready = 0;
    }
    launch.tables.chunk_count = (uint32_t)count;
    ready = ready && !fst_device_list_upload(state, &it, 1);
    if (ready)
        fst_gpu_norm(it.tables, &launch, &status);
    return fst_device_list_finish(&it, ready, &status);
}
