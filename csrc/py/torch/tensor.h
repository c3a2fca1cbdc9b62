/* tensor.h - reads torch tensors through DLPack's C exchange API, without libtorch. */
#pragma once

#include "base/device.h"
#include "py/torch/dlpack.h"
#include "py/torch/errors.h"

enum { FST_KNOWN_TYPES = 32 };

/* What is known of a tensor type (torch.Tensor, Parameter, a user's subclass). */
typedef struct {
    PyTypeObject *type;
    const fst_dl_api *api;
    PyObject *grad; /* the descriptor of the attribute `grad` */
    descrgetfunc read_grad;
    int runs_python; /* reading its attributes may run Python code: it is neither Tensor nor
                        Parameter */
} fst_tensor_type;

/* An attribute of a class, and the function that reads it of an object. */
typedef struct {
    PyObject *object;
    descrgetfunc read;
} fst_descriptor;

/* The class DTensor (dtensor.h). */
typedef struct {
    PyTypeObject *type; /* NULL: not known */
    fst_descriptor grad, local, spec;
} fst_dtensors;

typedef struct {
    fst_dtensors dtensors;
    fst_tensor_type types[FST_KNOWN_TYPES];
    unsigned type_count, next_type;
    PyObject *plain_dispatch; /* torch.Tensor.__torch_dispatch__: what a type without its own has */
    PyObject *tensor_type, *parameter_type;
    const fst_dl_api *api; /* of torch.Tensor */
    int ran_python; /* a function of this file may have run Python code; the caller clears it */
    int quiet, collects; /* of quiet.h: open sections; whether to turn the collector on again */
    _Bool (*has_modes)(void); /* libtorch's: whether a TorchFunctionMode is active, whose Python
                                 code runs when an attribute is read; NULL: not known */
    /* Where torch's record of a tensor (tensor_record.h) has the bit of a lazily negated view.
     * 0: torch is asked by is_neg(). */
    int impl_in_object, negated_in_impl;
    uint64_t negated;
    PyObject *is_neg, *is_inference; /* methods of torch.Tensor */
    PyObject *is_leaf;               /* the name of that attribute */
    PyObject *without_overrides; /* calls a method of torch.Tensor without a subclass's own code */
    PyObject *stream_lasts;      /* of use_streams(); NULL: not known */
} fst_tensors;

enum { FST_HOST = -1 }; /* the device of a tensor in CPU memory; others are CUDA ordinals */

/* A tensor's memory and geometry. Valid while the tensor lives and nobody changes it. */
typedef struct {
    void *data; /* an address of the device */
    const int64_t *shape, *strides;
    int ndim;
    int device;
    fst_dtype dtype;
    int negated; /* the memory holds the elements with their signs flipped */
} fst_view;

int64_t fst_view_count(const fst_view *view);

/* Learns the type of an object now, so that reading the object later runs no Python code. */
void fst_tensors_learn(fst_tensors *tensors, PyObject *object);

/* Learns a type (tensor_types.c). Runs Python code. NULL with `problem` filled if its tensors
 * cannot be read. */
const fst_tensor_type *fst_tensor_type_learn(fst_tensors *tensors, PyTypeObject *type,
                                             fst_problem *problem);

/* Whether a tensor was made in inference mode; -1 with a Python error. */
int fst_tensor_is_inference(fst_tensors *tensors, PyObject *object);

/* Reads a tensor of any dtype and device, for callers that cannot flip signs: a lazily negated view
 * is a problem. Returns 0, or -1 with `problem` filled and no Python error. Of a lazily conjugated
 * view the memory differs from the values. */
int fst_tensor_read_as_is(fst_tensors *tensors, PyObject *object, fst_dl_tensor *tensor,
                          fst_problem *problem);

/* Reads a tensor of a supported dtype in CPU or CUDA memory. Returns 0, or -1 with `problem`
 * filled and no Python error. */
int fst_tensor_view(fst_tensors *tensors, PyObject *object, fst_view *view, fst_problem *problem);

/* Does the same for a tensor that may be of an integer type: a counter, as torch counts steps in
 * them too, a state in codes, or a remainder. */
int fst_tensor_counter(fst_tensors *tensors, PyObject *object, fst_view *view,
                       fst_problem *problem);

/* fst_tensor_view for several tensors, all after the last Python code that reading them runs: it
 * may change those that were read before. *which is the one with a problem. */
int fst_tensor_views(fst_tensors *tensors, PyObject *const *objects, unsigned count,
                     fst_view *views, unsigned *which, fst_problem *problem);

/* Fills `problem`: the tensor is on one device and must be on another. Returns -1. */
int fst_view_misplaced(const fst_view *view, int device, fst_problem *problem);

static inline int fst_view_is_on(const fst_view *view, int device, fst_problem *problem)
{
    return view->device == device ? 0 : fst_view_misplaced(view, device, problem);
}

/* The number of a tensor of one element. */
typedef struct {
    void *data; /* an address of the device; NULL: there is none */
    fst_dtype dtype;
    int negated;
} fst_number_place;

static inline fst_number_place fst_view_number(const fst_view *view)
{
    return (fst_number_place){view->data, view->dtype, view->negated};
}

/* The same scalar as a kernel reads it. */
static inline fst_device_scalar fst_device_scalar_of(const fst_number_place *number)
{
    return (fst_device_scalar){.data = (uint64_t)(uintptr_t)number->data,
                               .is_double = number->dtype == FST_F64,
                               .negated = number->negated};
}

/* Reads a tensor that must be one fp32 or fp64 number on `device`. Returns 0, or -1 with `problem`
 * filled. */
int fst_tensor_scalar(fst_tensors *tensors, PyObject *object, int device, fst_number_place *number,
                      fst_problem *problem);

/* Torch's current stream, a CUstream, on the CUDA device that the tensor lies on. Returns 0, or -1
 * with `problem` filled. */
int fst_tensor_stream(fst_tensors *tensors, PyObject *object, int device, void **stream,
                      fst_problem *problem);

/* For work that another stream may have to wait for: whether nothing is known of torch's current
 * stream on a device, and a call that asks Python code then and notes the answer. It returns 0, or
 * -1 with `problem` filled. */
int fst_stream_is_new(const fst_tensors *tensors, const void *stream);
int fst_stream_note(fst_tensors *tensors, int device, const void *stream, fst_problem *problem);

/* Whether the view is contiguous in the order of its shape, and not negated. */
int fst_view_is_packed(const fst_view *view);

/* Whether it is a torch.Tensor or Parameter itself, so that no subclass's code can run. */
static inline int fst_tensor_is_plain(const fst_tensors *tensors, const PyObject *object)
{
    const PyObject *type = (const PyObject *)Py_TYPE(object);
    return type == tensors->parameter_type || type == tensors->tensor_type;
}

/* Whether it is a DTensor itself, not of a subclass. */
static inline int fst_tensor_is_dtensor(const fst_tensors *tensors, const PyObject *object)
{
    return Py_TYPE(object) == tensors->dtensors.type;
}

/* object.grad: a new reference, or NULL with a Python error. */
PyObject *fst_tensor_grad(fst_tensors *tensors, PyObject *object);

/* tensor._version; 0, or -1 with a Python error. */
int fst_tensor_version(fst_tensors *tensors, PyObject *tensor, int64_t *version);

/* Keeps a tensor alive by a reference in C++. torch reads such a tensor in half the time: where
 * only the Python object owns it, most of the time goes into two reference counts. Returns NULL,
 * with no Python error, where that fails; a pin is never necessary. The garbage collector cannot
 * see pins, so a pinned tensor must refer to no other object. */
fst_dl_managed *fst_tensor_pin(fst_tensors *tensors, PyObject *object);
void fst_tensor_unpin(fst_dl_managed *pin);

/* Describes a view in the given order of dimensions. *layout is NULL if none is needed, else the
 * caller frees it. Returns 0, or -1 with `problem` filled. */
int fst_view_layout(const fst_view *view, int order_count, const int *order, int written,
                    fst_layout **layout, fst_problem *problem);

/* Whether the tables of a device can hold the layout; 0, or -1 with `problem` filled. */
int fst_layout_is_for(const fst_layout *layout, int device, fst_problem *problem);

/* Finds torch's types and methods when the module is imported (tensor_types.c). Returns 0, or -1
 * with a Python error. */
int fst_tensors_init(fst_tensors *tensors);
int fst_tensors_traverse(fst_tensors *tensors, visitproc visit, void *arg);
void fst_tensors_clear(fst_tensors *tensors);
