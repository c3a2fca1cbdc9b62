/* cross_entropy: reads the tensors and runs the pass. */
#include "core/loss_pass.h"

#include "py/module.h"

/* A tensor in CPU memory of this type (also FST_I64), with these dimensions. 0: it is not, or it
 * cannot be read. */
static int is_read(fst_module *state, PyObject *object, int dtype, int ndim, fst_view *view)
{
    fst_problem problem;
    return fst_tensor_is_plain(&state->tensors, object) &&
           !fst_tensor_counter(&state->tensors, object, view, &problem) && !view->negated &&
           view->device == FST_HOST && (int)view->dtype == dtype && view->ndim == ndim;
}

static int read_logits(fst_module *state, PyObject *object, fst_loss_batch *batch)
{
    fst_view view;
    const int dtypes[] = {FST_F32, FST_BF16, FST_F16};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (is_read(state, object, dtypes[i], 2, &view)) {
            batch->logits = view.data;
            batch->dtype = view.dtype;
            batch->rows = view.shape[0];
            batch->classes = view.shape[1];
            batch->stride = view.strides[0];
            return batch->classes > 0 && (batch->classes == 1 || view.strides[1] == 1);
        }
    return 0;
}

/* A contiguous fp32 tensor of this shape. */
static float *floats_of(fst_module *state, PyObject *object, int ndim, const int64_t *shape)
{
    fst_view view;
    if (!is_read(state, object, FST_F32, ndim, &view) || !fst_view_is_packed(&view))
        return NULL;
    for (int d = 0; d < ndim; d++)
        if (view.shape[d] != shape[d])
            return NULL;
    return view.data;
}

/* 0: torch's own function has to do it. */
static int read_batch(fst_module *state, PyObject *const *tensors, fst_loss_batch *batch)
{
    fst_view target, slope;
    if (!read_logits(state, tensors[0], batch) ||
        !is_read(state, tensors[1], FST_I64, 1, &target) || target.shape[0] != batch->rows)
        return 0;
    batch->target = target.data;
    batch->target_stride = target.strides[0];
    if (tensors[2] != Py_None) {
        batch->weight = floats_of(state, tensors[2], 1, &batch->classes);
        if (!batch->weight)
            return 0;
    }
    if (tensors[5] != Py_None) {
        if (!is_read(state, tensors[5], (int)batch->dtype, 2, &slope) ||
            !fst_view_is_packed(&slope) || slope.shape[0] != batch->rows ||
            slope.shape[1] != batch->classes)
            return 0;
        batch->slope = slope.data;
    }
    batch->losses = floats_of(state, tensors[3], 1, &batch->rows);
    batch->likelihoods = floats_of(state, tensors[4], 1, &batch->rows);
    return ((batch->losses && batch->likelihoods) || !batch->rows) && fst_loss_has_classes(batch);
}

/* cross_entropy(logits, target, weight, losses, likelihoods, slope, ignored, smoothing, mean): see
 * _C.pyi. */
PyObject *fst_py_cross_entropy(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *tensors[6];
    fst_loss_batch batch = {0};
    fst_status status = {0};
    double total = 0.0, weights = 0.0;
    long long ignored;
    int mean;
    if (!PyArg_ParseTuple(args, "OOOOOOLdp", &tensors[0], &tensors[1], &tensors[2], &tensors[3],
                          &tensors[4], &tensors[5], &ignored, &batch.smoothing, &mean))
        return NULL;
    batch.ignored = ignored;
    if (!read_batch(state, tensors, &batch))
        return Py_NewRef(Py_None);
    Py_BEGIN_ALLOW_THREADS
    fst_loss_run(&batch, mean, &total, &weights, &status);
    Py_END_ALLOW_THREADS
    return status.code ? fst_raise(&status) : Py_BuildValue("dd", total, weights);
}
