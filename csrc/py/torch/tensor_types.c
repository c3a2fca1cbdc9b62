/* Types of tensors: what torch offers for each, learnt when a type is first seen. */
#include "py/torch/dtensor.h"
#include "py/torch/quiet.h"

/* The exchange APIs that a type offers, newest version first, or NULL. */
static const fst_dl_header *offered_api(PyObject *type)
{
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const fst_dl_header *header =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    return header;
}

static const fst_dl_api *exchange_api(PyObject *type)
{
    const fst_dl_header *header = offered_api(type);
    while (header && header->version.major != 1)
        header = header->previous;
    return (const fst_dl_api *)header;
}

/* Sets an ImportError where this torch's tensors cannot be read. */
static int need_exchange_api(PyObject *torch, fst_tensors *tensors)
{
    tensors->api = exchange_api(tensors->tensor_type);
    if (tensors->api)
        return 0;
    const fst_dl_header *offered = offered_api(tensors->tensor_type);
    PyObject *version = PyObject_GetAttrString(torch, "__version__");
    if (version && offered)
        PyErr_Format(PyExc_ImportError,
                     "faststep reads tensors by version 1 of DLPack's C exchange API; torch %S "
                     "offers version %u: it needs a newer faststep, or this one an older torch",
                     version, (unsigned)offered->version.major);
    else if (version)
        PyErr_Format(PyExc_ImportError,
                     "faststep reads tensors by DLPack's C exchange API, which torch has from 2.10 "
                     "on; this is torch %S: pip install 'torch>=2.10'",
                     version);
    Py_XDECREF(version);
    return -1;
}

/* Types with a __torch_dispatch__ of their own (DTensor, FakeTensor, wrappers) inherit the exchange
 * API but have no memory of their own behind it. */
static int has_own_dispatch(const fst_tensors *tensors, PyTypeObject *type)
{
    PyObject *dispatch = PyObject_GetAttrString((PyObject *)type, "__torch_dispatch__");
    const int own = dispatch != tensors->plain_dispatch;
    Py_XDECREF(dispatch);
    PyErr_Clear();
    return own;
}

static void forget_type(fst_tensor_type *known)
{
    Py_CLEAR(known->type);
    Py_CLEAR(known->grad);
    known->api = NULL;
}

const fst_tensor_type *fst_tensor_type_learn(fst_tensors *tensors, PyTypeObject *type,
                                             fst_problem *problem)
{
    const int paused = fst_quiet_pause(tensors);
    PyObject *name = PyObject_GetAttrString((PyObject *)type, "__name__");
    PyObject *bytes = name ? PyUnicode_AsUTF8String(name) : NULL;
    const char *text = bytes ? PyBytes_AsString(bytes) : "?";
    const fst_dl_api *api = exchange_api((PyObject *)type);
    PyObject *grad = NULL;
    fst_tensor_type *known = NULL;
    PyErr_Clear();
    if (!api || !PyType_IsSubtype(type, (PyTypeObject *)tensors->tensor_type))
        fst_problem_set(problem, "type", "is a %s, not a torch.Tensor", text);
    else if (has_own_dispatch(tensors, type))
        fst_problem_set(problem, "type",
                        "is a %s, a tensor subclass with its own __torch_dispatch__", text);
    else if (!(grad = PyObject_GetAttrString((PyObject *)type, "grad")))
        fst_problem_from_error(problem, "type");
    else {
        known = &tensors->types[tensors->next_type];
        tensors->next_type = (tensors->next_type + 1) % FST_KNOWN_TYPES;
        tensors->type_count += tensors->type_count < FST_KNOWN_TYPES;
        fst_tensor_type before = *known;
        Py_INCREF(type);
        known->type = type;
        known->api = api;
        known->grad = grad;
        known->read_grad = (descrgetfunc)PyType_GetSlot(Py_TYPE(grad), Py_tp_descr_get);
        known->runs_python =
            (PyObject *)type != tensors->tensor_type && (PyObject *)type != tensors->parameter_type;
        forget_type(&before);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(name);
    fst_quiet_resume_after_python(tensors, paused);
    return known;
}

int fst_tensors_init(fst_tensors *tensors)
{
    PyObject *nn = PyImport_ImportModule("torch.nn");
    PyObject *torch = nn ? PyImport_ImportModule("torch") : NULL;
    tensors->tensor_type = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    tensors->parameter_type = tensors->tensor_type ? PyObject_GetAttrString(nn, "Parameter") : NULL;
    const int failed = !tensors->parameter_type || need_exchange_api(torch, tensors);
    Py_XDECREF(torch);
    Py_XDECREF(nn);
    if (failed)
        return -1;
    tensors->plain_dispatch = PyObject_GetAttrString(tensors->tensor_type, "__torch_dispatch__");
    if (!tensors->plain_dispatch)
        return -1;
    tensors->is_neg = PyObject_GetAttrString(tensors->tensor_type, "is_neg");
    tensors->is_inference = PyObject_GetAttrString(tensors->tensor_type, "is_inference");
    tensors->is_leaf = PyUnicode_InternFromString("is_leaf");
    tensors->without_overrides =
        PyObject_GetAttrString(tensors->parameter_type, "__torch_function__");
    const int found =
        tensors->is_neg && tensors->is_inference && tensors->is_leaf && tensors->without_overrides;
    return found ? 0 : -1;
}

int fst_tensors_traverse(fst_tensors *tensors, visitproc visit, void *arg)
{
    for (unsigned i = 0; i < FST_KNOWN_TYPES; i++) {
        Py_VISIT(tensors->types[i].type);
        Py_VISIT(tensors->types[i].grad);
    }
    Py_VISIT(tensors->plain_dispatch);
    Py_VISIT(tensors->tensor_type);
    Py_VISIT(tensors->parameter_type);
    Py_VISIT(tensors->is_neg);
    Py_VISIT(tensors->is_inference);
    Py_VISIT(tensors->is_leaf);
    Py_VISIT(tensors->without_overrides);
    Py_VISIT(tensors->stream_lasts);
    return fst_dtensors_traverse(&tensors->dtensors, visit, arg);
}

void fst_tensors_clear(fst_tensors *tensors)
{
    for (unsigned i = 0; i < FST_KNOWN_TYPES; i++)
        forget_type(&tensors->types[i]);
    tensors->type_count = tensors->next_type = 0;
    fst_dtensors_clear(&tensors->dtensors);
    Py_CLEAR(tensors->plain_dispatch);
    Py_CLEAR(tensors->tensor_type);
    Py_CLEAR(tensors->parameter_type);
    Py_CLEAR(tensors->is_neg);
    Py_CLEAR(tensors->is_inference);
    Py_CLEAR(tensors->is_leaf);
    Py_CLEAR(tensors->without_overrides);
    Py_CLEAR(tensors->stream_lasts);
}
