/* Reads torch tensors through DLPack's C exchange API, without libtorch. */
#include "py/torch/tensor.h"

#include <stdio.h>

#include "core/layout.h"
#include "py/torch/quiet.h"

static const fst_tensor_type *type_of(fst_tensors *tensors, PyObject *object, fst_problem *problem)
{
    PyTypeObject *type = Py_TYPE(object);
    for (unsigned i = 0; i < tensors->type_count; i++)
        if (tensors->types[i].type == type)
            return &tensors->types[i];
    return fst_tensor_type_learn(tensors, type, problem);
}

void fst_tensors_learn(fst_tensors *tensors, PyObject *object)
{
    fst_problem unused;
    if (object != Py_None)
        type_of(tensors, object, &unused);
}

/* The dtype, which of a counter may be one of the integers that torch adds to; -1 if it is none of
 * these. */
static int dtype_of(fst_dl_dtype type, int counter)
{
    static const struct {
        uint8_t code, bits;
        int dtype;
    } known[] = {
        {FST_DL_FLOAT, 32, FST_F32}, {FST_DL_BFLOAT, 16, FST_BF16}, {FST_DL_FLOAT, 16, FST_F16},
        {FST_DL_FLOAT, 64, FST_F64}, {FST_DL_INT, 64, FST_I64},     {FST_DL_INT, 32, FST_I32},
        {FST_DL_INT, 16, FST_I16},   {FST_DL_INT, 8, FST_I8},       {FST_DL_UINT, 8, FST_U8},
    };
    const size_t count = counter ? sizeof known / sizeof *known : FST_DTYPE_COUNT;
    for (size_t i = 0; type.lanes == 1 && i < count; i++)
        if (known[i].code == type.code && known[i].bits == type.bits)
            return known[i].dtype;
    return -1;
}

int64_t fst_view_count(const fst_view *view)
{
    return fst_layout_count(view->ndim, view->shape);
}

/* Reads a tensor of any dtype and device. Returns 0, or -1 with `problem` filled and no Python
 * error.
 */
static int read_tensor(fst_tensors *tensors, PyObject *object, fst_dl_tensor *tensor,
                       fst_problem *problem)
{
    const fst_tensor_type *known = type_of(tensors, object, problem);
    if (!known)
        return -1;
    if (known->api->tensor_from_py_object(object, tensor))
        return fst_problem_from_error(problem, "storage");
    return 0;
}

/* Whether a TorchFunctionMode may be active. */
static int may_have_modes(const fst_tensors *tensors)
{
    return !tensors->has_modes || tensors->has_modes();
}

/* Whether reading attributes of such a tensor runs Python code. */
static int runs_python(const fst_tensors *tensors, const fst_tensor_type *known)
{
    return !known || known->runs_python || may_have_modes(tensors);
}

/* Calls a method of torch.Tensor without arguments that returns a bool: 1, 0, or -1 with a
 * Python error. torch may release the GIL. A subclass's override is bypassed: it would run for
 * each tensor, each time after others were read. */
static int ask(fst_tensors *tensors, PyObject *method, PyObject *object)
{
    const int python = may_have_modes(tensors);
    const int paused = fst_quiet_pause(tensors);
    Py_INCREF(object);
    PyObject *answer =
        fst_tensor_is_plain(tensors, object)
            ? PyObject_CallFunctionObjArgs(method, object, NULL)
            : PyObject_CallFunction(tensors->without_overrides, "O()(O)", method, object);
    const int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_DECREF(object);
    (python ? fst_quiet_resume_after_python : fst_quiet_resume)(tensors, paused);
    return truth;
}

/* Whether a tensor is a lazily negated view: 1 or 0, or -1 with `problem` filled. Runs Python code
 * where the type is not learnt, and in a mode where torch's records are not known. */
static int is_negated(fst_tensors *tensors, PyObject *object, fst_problem *problem)
{
    if (!type_of(tensors, object, problem))
        return -1;
    if (tensors->negated) {
        const uint64_t *impl =
            (const uint64_t *)(uintptr_t)((const uint64_t *)object)[tensors->impl_in_object];
        return (impl[tensors->negated_in_impl] & tensors->negated) != 0;
    }
    const int negated = ask(tensors, tensors->is_neg, object);
    return negated < 0 ? fst_problem_from_error(problem, "type") : negated;
}

int fst_tensor_is_inference(fst_tensors *tensors, PyObject *object)
{
    return ask(tensors, tensors->is_inference, object);
}

/* 0, or -1 with `problem` filled for elements whose storage was resized to nothing. */
static int check_memory(const fst_dl_tensor *tensor, fst_problem *problem)
{
    int is_empty = 0;
    for (int d = 0; d < tensor->ndim; d++)
        is_empty |= tensor->shape[d] == 0;
    return tensor->data || is_empty
               ? 0
               : fst_problem_set(problem, "storage", "has no memory behind it");
}

int fst_tensor_read_as_is(fst_tensors *tensors, PyObject *object, fst_dl_tensor *tensor,
                          fst_problem *problem)
{
    const int negated = is_negated(tensors, object, problem);
    if (negated > 0)
        fst_problem_set(problem, "negated", "is a lazily negated view; call .resolve_neg() on it");
    return negated || read_tensor(tensors, object, tensor, problem) ? -1
                                                                    : check_memory(tensor, problem);
}

/* Reads all of a view but whether it is negated. Runs Python code only to learn a type. */
static int read_view(fst_tensors *tensors, PyObject *object, int counter, fst_view *view,
                     fst_problem *problem)
{
    fst_dl_tensor tensor;
    if (read_tensor(tensors, object, &tensor, problem))
        return -1;
    const int dtype = dtype_of(tensor.dtype, counter);
    if (dtype < 0)
        return fst_problem_set(problem, "dtype",
                               tensor.dtype.code == FST_DL_COMPLEX
                                   ? "is complex; expected float32, float64, bfloat16 or float16"
                                   : "is not of type float32, float64, bfloat16 or float16");
    if (tensor.device.device_type != FST_DL_CPU && tensor.device.device_type != FST_DL_CUDA)
        return fst_problem_set(problem, "device", "is neither in CPU nor in CUDA memory");
    if (tensor.ndim > FST_MAX_DIMS)
        return fst_problem_set(problem, "shape", "has %d dimensions; at most %d are supported",
                               (int)tensor.ndim, (int)FST_MAX_DIMS);
    view->dtype = (fst_dtype)dtype;
    view->data = (char *)tensor.data + tensor.byte_offset;
    view->shape = tensor.shape;
    view->strides = tensor.strides;
    view->ndim = tensor.ndim;
    view->device = tensor.device.device_type == FST_DL_CPU ? FST_HOST : tensor.device.device_id;
    return check_memory(&tensor, problem);
}

int fst_tensor_view(fst_tensors *tensors, PyObject *object, fst_view *view, fst_problem *problem)
{
    view->negated = is_negated(tensors, object, problem);
    return view->negated < 0 ? -1 : read_view(tensors, object, 0, view, problem);
}

int fst_tensor_counter(fst_tensors *tensors, PyObject *object, fst_view *view, fst_problem *problem)
{
    view->negated = is_negated(tensors, object, problem);
    return view->negated < 0 ? -1 : read_view(tensors, object, 1, view, problem);
}

int fst_tensor_views(fst_tensors *tensors, PyObject *const *objects, unsigned count,
                     fst_view *views, unsigned *which, fst_problem *problem)
{
    int ran_python = tensors->ran_python;
    for (int i = 0; i < FST_ATTEMPTS; i++) {
        for (*which = 0; *which < count; ++*which) {
            fst_view *view = &views[*which];
            view->negated = is_negated(tensors, objects[*which], problem);
            if (view->negated < 0)
                return -1;
        }
        ran_python |= tensors->ran_python;
        tensors->ran_python = 0;
        for (*which = 0; *which < count; ++*which)
            if (read_view(tensors, objects[*which], 0, &views[*which], problem))
                return -1;
        const int is_valid = !tensors->ran_python;
        tensors->ran_python |= ran_python;
        if (is_valid)
            return 0;
    }
    *which = 0;
    return fst_problem_set(problem, "storage", "may be moved by Python code each time it is read");
}

static const char *device_name(int device, char name[16])
{
    snprintf(name, 16, device == FST_HOST ? "cpu" : "cuda:%d", device);
    return name;
}

int fst_view_misplaced(const fst_view *view, int device, fst_problem *problem)
{
    char is[16], must[16];
    return fst_problem_set(problem, "device", "is on %s, not on %s", device_name(view->device, is),
                           device_name(device, must));
}

int fst_tensor_scalar(fst_tensors *tensors, PyObject *object, int device, fst_number_place *number,
                      fst_problem *problem)
{
    fst_view view;
    if (fst_tensor_view(tensors, object, &view, problem) || fst_view_is_on(&view, device, problem))
        return -1;
    if (fst_view_count(&view) != 1 || (view.dtype != FST_F32 && view.dtype != FST_F64))
        return fst_problem_set(problem, "dtype",
                               "is not a one-element tensor of type float32 or float64");
    *number = fst_view_number(&view);
    return 0;
}

int fst_tensor_stream(fst_tensors *tensors, PyObject *object, int device, void **stream,
                      fst_problem *problem)
{
    const fst_tensor_type *known = type_of(tensors, object, problem);
    if (!known)
        return -1;
    if (known->api->current_work_stream(FST_DL_CUDA, device, stream))
        return fst_problem_from_error(problem, "device");
    return 0;
}

int fst_view_is_packed(const fst_view *view)
{
    int64_t stride = 1;
    for (int d = view->ndim; d-- > 0;) {
        if (view->strides[d] != stride)
            return 0;
        stride *= view->shape[d];
    }
    return !view->negated;
}

/* Another attribute, likewise. */
static PyObject *attribute(fst_tensors *tensors, PyObject *object, const char *name)
{
    fst_problem unused;
    if (!runs_python(tensors, type_of(tensors, object, &unused)))
        return PyObject_GetAttrString(object, name);
    const int paused = fst_quiet_pause(tensors);
    Py_INCREF(object);
    PyObject *value = PyObject_GetAttrString(object, name);
    Py_DECREF(object);
    fst_quiet_resume_after_python(tensors, paused);
    return value;
}

/* torch warns when `.grad` of a non-leaf tensor is read, and showing the warning runs Python
 * code. Sets `ran_python` in that case. Returns 0, or -1 with a Python error. */
static int note_warning(fst_tensors *tensors, PyObject *object)
{
    PyObject *answer = PyObject_GetAttr(object, tensors->is_leaf);
    const int leaf = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    tensors->ran_python |= leaf == 0;
    return leaf < 0 ? -1 : 0;
}

PyObject *fst_tensor_grad(fst_tensors *tensors, PyObject *object)
{
    fst_problem unused;
    PyObject *grad;
    if (fst_tensor_is_dtensor(tensors, object) && !may_have_modes(tensors)) {
        const fst_dtensors *known = &tensors->dtensors;
        grad = known->grad.read(known->grad.object, object, (PyObject *)known->type);
    } else {
        const fst_tensor_type *known = type_of(tensors, object, &unused);
        if (!known || !known->read_grad || runs_python(tensors, known))
            return attribute(tensors, object, "grad");
        grad = known->read_grad(known->grad, object, (PyObject *)known->type);
    }
    if (grad == Py_None && note_warning(tensors, object))
        Py_CLEAR(grad);
    return grad;
}

fst_dl_managed *fst_tensor_pin(fst_tensors *tensors, PyObject *object)
{
    fst_problem unused;
    fst_dl_managed *pin = NULL;
    const fst_tensor_type *known = type_of(tensors, object, &unused);
    if (known && known->api->managed_tensor_from_py_object(object, &pin)) {
        PyErr_Clear();
        return NULL;
    }
    return pin;
}

void fst_tensor_unpin(fst_dl_managed *pin)
{
    if (pin && pin->deleter)
        pin->deleter(pin);
}

int fst_view_layout(const fst_view *view, int order_count, const int *order, int written,
                    fst_layout **layout, fst_problem *problem)
{
    fst_layout described;
    *layout = NULL;
    const int packed =
        fst_layout_describe(order_count, order, view->shape, view->strides, &described);
    if (packed && !view->negated)
        return 0;
    if (written && fst_layout_overlaps(&described))
        return fst_problem_set(problem, "overlap",
                               "has several elements in one memory location and is written to; "
                               "call .clone() on it");
    *layout = PyMem_Malloc(sizeof **layout);
    if (!*layout)
        return fst_problem_set(problem, "storage", "cannot be described for lack of memory");
    **layout = described;
    (*layout)->negated = view->negated;
    return 0;
}

int fst_layout_is_for(const fst_layout *layout, int device, fst_problem *problem)
{
    if (device == FST_HOST || layout->ndim <= FST_DEVICE_MAX_DIMS)
        return 0;
    return fst_problem_set(problem, "shape",
                           "needs %d strides to be described, of which kernels take %d; "
                           "call .contiguous() on it",
                           layout->ndim, (int)FST_DEVICE_MAX_DIMS);
}

int fst_tensor_version(fst_tensors *tensors, PyObject *tensor, int64_t *version)
{
    PyObject *number = attribute(tensors, tensor, "_version");
    *version = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}
