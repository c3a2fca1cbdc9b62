/* cross_entropy: reads the tensors and runs the pass. */
#include "core/loss_pass.h"
#include "gpu/launch.h"

#include "py/module.h"

/* A tensor of this type (also FST_I64) and device, with these dimensions. 0: it is not, or it
 * cannot be read. */
static int is_read(fst_module *state, PyObject *object, int dtype, int device, int ndim,
                   fst_view *view)
{
    fst_problem problem;
    return !fst_tensor_counter(&state->tensors, object, view, &problem) && !view->negated &&
           view->device == device && (int)view->dtype == dtype && view->ndim == ndim;
}

/* What the tensors of a call have in common with the logits. */
typedef struct {
    fst_module *state;
    int device;
    fst_loss_batch batch;
    fst_loss_result result;
} call;

static int read_logits(call *it, PyObject *object)
{
    fst_view view;
    fst_problem problem;
    fst_loss_batch *batch = &it->batch;
    if (fst_tensor_view(&it->state->tensors, object, &view, &problem) || view.negated ||
        view.dtype == FST_F64 || view.ndim != 2)
        return 0;
    it->device = view.device;
    batch->logits = view.data;
    batch->dtype = view.dtype;
    batch->rows = view.shape[0];
    batch->classes = view.shape[1];
    batch->stride = view.strides[0];
    return batch->classes > 0 && (batch->classes == 1 || view.strides[1] == 1);
}

/* A packed tensor of this type and shape. */
static void *packed(const call *it, PyObject *object, int dtype, int ndim, const int64_t *shape)
{
    fst_view view;
    if (!is_read(it->state, object, dtype, it->device, ndim, &view) || !fst_view_is_packed(&view))
        return NULL;
    for (int d = 0; d < ndim; d++)
        if (view.shape[d] != shape[d])
            return NULL;
    return view.data;
}

/* Of logits, target, weight, losses, likelihoods, slope, loss and factors. 0: torch's own function
 * has to do it. */
static int read_call(call *it, PyObject *const *tensors)
{
    fst_view target;
    fst_loss_batch *batch = &it->batch;
    if (!read_logits(it, tensors[0]) ||
        !is_read(it->state, tensors[1], FST_I64, it->device, 1, &target) ||
        target.shape[0] != batch->rows)
        return 0;
    const int64_t shape[] = {batch->rows, batch->classes}, two = 2;
    batch->target = target.data;
    batch->target_stride = target.strides[0];
    batch->losses = packed(it, tensors[3], FST_F32, 1, shape);
    batch->likelihoods = packed(it, tensors[4], FST_F32, 1, shape);
    it->result.loss = packed(it, tensors[6], FST_F32, 0, NULL);
    it->result.factors = packed(it, tensors[7], FST_F32, 1, &two);
    if (!it->result.loss || !it->result.factors ||
        (batch->rows && (!batch->losses || !batch->likelihoods)))
        return 0;
    if (tensors[2] != Py_None) {
        batch->weight = packed(it, tensors[2], FST_F32, 1, &batch->classes);
        if (!batch->weight)
            return 0;
    }
    if (tensors[5] != Py_None) {
        batch->slope = packed(it, tensors[5], (int)batch->dtype, 2, shape);
        if (!batch->slope && batch->rows)
            return 0;
    }
    return it->device == FST_HOST ? fst_loss_has_classes(batch) : batch->rows <= INT32_MAX;
}

static uint64_t address(const void *memory)
{
    return (uint64_t)(uintptr_t)memory;
}

/* On torch's current stream. A device's targets cannot be checked without waiting for it. */
static PyObject *on_device(const call *it, PyObject *logits, int mean)
{
    const fst_loss_batch *batch = &it->batch;
    const fst_cross_entropy_launch launch = {.logits = address(batch->logits),
                                             .target = address(batch->target),
                                             .weight = address(batch->weight),
                                             .losses = address(batch->losses),
                                             .likelihoods = address(batch->likelihoods),
                                             .slope = address(batch->slope),
                                             .loss = address(it->result.loss),
                                             .factors = address(it->result.factors),
                                             .rows = batch->rows,
                                             .classes = batch->classes,
                                             .stride = batch->stride,
                                             .target_stride = batch->target_stride,
                                             .ignored = batch->ignored,
                                             .smoothing = batch->smoothing,
                                             .dtype = (int32_t)batch->dtype,
                                             .mean = mean};
    fst_status status = {0};
    fst_problem problem;
    void *stream;
    if (fst_tensor_stream(&it->state->tensors, logits, it->device, &stream, &problem)) {
        PyErr_Format(PyExc_RuntimeError, "logits %s", problem.detail);
        return NULL;
    }
    if (fst_gpu_cross_entropy(it->device, &launch, stream, &status))
        return fst_raise(&status);
    return Py_NewRef(Py_True);
}

/* cross_entropy(logits, target, weight, losses, likelihoods, slope, loss, factors, ignored,
 * smoothing, mean): see _C.pyi. */
PyObject *fst_py_cross_entropy(PyObject *module, PyObject *args)
{
    call it = {.state = fst_module_state(module)};
    PyObject *tensors[8];
    fst_status status = {0};
    long long ignored;
    int mean;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLdp", &tensors[0], &tensors[1], &tensors[2], &tensors[3],
                          &tensors[4], &tensors[5], &tensors[6], &tensors[7], &ignored,
                          &it.batch.smoothing, &mean))
        return NULL;
    it.batch.ignored = ignored;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        fst_tensors_learn(&it.state->tensors, tensors[i]);
    if (!read_call(&it, tensors))
        return Py_NewRef(Py_False);
    if (it.device != FST_HOST)
        return on_device(&it, tensors[0], mean);
    Py_BEGIN_ALLOW_THREADS
    fst_loss_run(&it.batch, mean, it.result, &status);
    Py_END_ALLOW_THREADS
    return status.code ? fst_raise(&status) : Py_NewRef(Py_True);
}
