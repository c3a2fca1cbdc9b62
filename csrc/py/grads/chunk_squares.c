/* Sums of squares chunk by chunk, for ranks that measure a part each and fold all of them: in CPU
 * memory, and on a CUDA device. */
#include <string.h>

#include "core/passes.h"
#include "gpu/launch.h"
#include "py/grads/tensor_lists.h"

/* Finds the elements of a packed float64 tensor on a device, where looking at it must run no Python
 * code, or in CPU memory. Returns 0, or -1 with a TypeError. */
static int sums_of(fst_module *state, PyObject *object, int device, void **data, int64_t *count)
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
    if (device != FST_HOST && state->tensors.ran_python) {
        PyErr_SetString(PyExc_TypeError, "sums runs Python code when it is looked at");
        return -1;
    }
    *data = view.data;
    *count = fst_view_count(&view);
    return 0;
}

/* Whether there is a sum for each chunk of the list: 0, or -1 with a ValueError. */
static int check_room(int64_t count, const fst_list *list)
{
    const size_t chunks = fst_plan_work(&list->plan).chunk_count;
    if ((size_t)count == chunks)
        return 0;
    PyErr_Format(PyExc_ValueError, "expected room for %zu sums, not for %lld", chunks,
                 (long long)count);
    return -1;
}

/* Measures the list and copies the chunks' sums to `sums`. */
static PyObject *measure_chunks(fst_module *state, fst_list *list, double inv_scale, PyObject *sums)
{
    fst_measurement out = {0};
    fst_status status = {0};
    void *data;
    int64_t count;
    Py_BEGIN_ALLOW_THREADS
    fst_measure(&list->plan, 0, inv_scale, &out, &status);
    Py_END_ALLOW_THREADS
    if (status.code)
        return fst_raise(&status);
    if (sums_of(state, sums, FST_HOST, &data, &count) || check_room(count, list))
        return NULL;
    if (count)
        memcpy(data, list->plan.partial, (size_t)count * sizeof(double));
    return PyBool_FromLong(out.nonfinite);
}

PyObject *fst_py_chunk_squares(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *sums, *result = NULL;
    double inv_scale;
    fst_list list;
    if (!PyArg_ParseTuple(args, "OdO", &tensors, &inv_scale, &sums))
        return NULL;
    if (!fst_list_bind(state, &list, tensors, FST_HOST, 0))
        result = measure_chunks(state, &list, inv_scale, sums);
    fst_list_free(&list);
    return result;
}

PyObject *fst_py_fold_squares(PyObject *module, PyObject *sums)
{
    void *data;
    int64_t count;
    if (sums_of(fst_module_state(module), sums, FST_HOST, &data, &count))
        return NULL;
    return PyFloat_FromDouble(fst_fold_squares(data, (size_t)count));
}

PyObject *fst_py_device_chunk_squares(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors, *scale, *sums, *found_inf;
    fst_norm_launch launch = {.kind = FST_NORM_SQUARES};
    fst_status status = {0};
    fst_device_list it;
    int64_t count = 0;
    void *data = NULL;
    if (!PyArg_ParseTuple(args, "OOOO", &tensors, &scale, &sums, &found_inf))
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {
        {scale, "grad_scale", &launch.scale}, {found_inf, "found_inf", &launch.found_inf}};
    const int ready = !fst_device_list_bind(state, &it, tensors, 0, scalars) &&
                      !sums_of(state, sums, it.list.device, &data, &count) &&
                      !check_room(count, &it.list) && !fst_device_list_upload(state, &it, 1);
    launch.tables.partial = (uint64_t)(uintptr_t)data;
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
    void *data = NULL;
    if (!PyArg_ParseTuple(args, "OO", &sums, &norm))
        return NULL;
    PyObject *tensors = PyTuple_Pack(1, sums);
    if (!tensors)
        return NULL;
    const fst_wanted_scalar scalars[FST_MOST_SCALARS] = {{norm, "norm", &launch.norm}, {0}};
    int ready = !fst_device_list_bind(state, &it, tensors, 0, scalars) &&
                !sums_of(state, sums, it.list.device, &data, &count);
    Py_DECREF(tensors);
    if (ready && (count < 1 || count > UINT32_MAX)) {
        PyErr_Format(PyExc_ValueError, "expected from 1 to %u sums, not %lld", UINT32_MAX,
                     (long long)count);
        ready = 0;
    }
    launch.tables.partial = (uint64_t)(uintptr_t)data;
    launch.tables.chunk_count = (uint32_t)count;
    ready = ready && !fst_device_list_upload(state, &it, 1);
    if (ready)
        fst_gpu_norm(it.tables, &launch, &status);
    return fst_device_list_finish(&it, ready, &status);
}
