/* Sums of squares chunk by chunk, for ranks that measure a part each and fold all of them. */
#include <string.h>

#include "core/passes.h"
#include "py/grads/tensor_lists.h"

/* Finds the elements of a packed float64 tensor in CPU memory. Returns 0, or -1 with a TypeError.
 */
static int doubles_of(fst_module *state, PyObject *object, double **data, int64_t *count)
{
    fst_view view;
    fst_problem problem;
    if (fst_tensor_view(&state->tensors, object, &view, &problem) ||
        fst_view_is_on(&view, FST_HOST, &problem)) {
        PyErr_Format(PyExc_TypeError, "sums %s", problem.detail);
        return -1;
    }
    if (view.dtype != FST_F64 || view.negated || !fst_view_is_packed(&view)) {
        PyErr_SetString(PyExc_TypeError, "sums must be a contiguous float64 tensor");
        return -1;
    }
    *data = view.data;
    *count = fst_view_count(&view);
    return 0;
}

/* Measures the list and copies the chunks' sums to `sums`. */
static PyObject *measure_chunks(fst_module *state, fst_list *list, double inv_scale, PyObject *sums)
{
    fst_measurement out = {0};
    fst_status status = {0};
    double *data;
    int64_t count;
    Py_BEGIN_ALLOW_THREADS
    fst_measure(&list->plan, 0, inv_scale, &out, &status);
    Py_END_ALLOW_THREADS
    if (status.code)
        return fst_raise(&status);
    if (doubles_of(state, sums, &data, &count))
        return NULL;
    const size_t chunks = fst_plan_work(&list->plan).chunk_count;
    if ((size_t)count != chunks)
        return PyErr_Format(PyExc_ValueError, "expected room for %zu sums, not for %lld", chunks,
                            (long long)count);
    if (chunks)
        memcpy(data, list->plan.partial, chunks * sizeof *data);
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
    double *data;
    int64_t count;
    if (doubles_of(fst_module_state(module), sums, &data, &count))
        return NULL;
    return PyFloat_FromDouble(fst_fold_squares(data, (size_t)count));
}
