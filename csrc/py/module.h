/* module.h - the state of the extension module, and the functions and types that it offers. */
#pragma once

#include "gpu/tables.h"
#include "py/torch/tensor_record.h"

/* Names of attributes, as Python has them. */
typedef struct {
    PyObject *grad, *state, *max_grad_norm;
} fst_names;

/* The sums of squares that the last unscale_ measured (unscaled.c). */
typedef struct fst_unscaled {
    struct fst_unscaled_grad *grads; /* by address */
    double *partial;
    size_t count;
} fst_unscaled;

/* The words of a storage's record that hold its memory's address, the owner of the memory, and
 * the function that frees it (hold.c). */
typedef struct {
    int known;
    int data, free, owner; /* words */
} fst_owner_places;

/* The types of the module, in the order of their specs in module.c. */
enum { FST_SLOTS, FST_GATHER, FST_BATCH, FST_ARENA, FST_OFFLOAD, FST_PLAN, FST_HOOK, FST_TYPES };

typedef struct {
    fst_tensors tensors;
    fst_names names;
    PyTypeObject *types[FST_TYPES];
    PyObject *tensor_error; /* the exception _C.TensorError */
    fst_record_layout records;
    fst_owner_places owners;
    fst_forms forms;
    fst_unscaled unscaled;
    _Bool (*has_callbacks)(void);                 /* libtorch's; NULL: not known */
    int has_kernels;                              /* use_kernels_of() was called */
    fst_gpu_tables *list_tables[FST_GPU_DEVICES]; /* for functions on lists; made when needed */
} fst_module;

/* The state of the module. Functions get the module as their first argument. */
static inline fst_module *fst_module_state(PyObject *module)
{
    return PyModule_GetState(module);
}

/* A new object of a type of the module, all zeros; or NULL with a Python error, also where its
 * maker was called with keywords, which none takes. */
static inline void *fst_object_new(PyTypeObject *type, PyObject *keywords)
{
    if (!keywords || PyDict_Size(keywords) == 0)
        return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    PyErr_SetString(PyExc_TypeError, "this type takes no keyword arguments");
    return NULL;
}

/* Frees the memory of an object, at the end of its tp_dealloc. */
static inline void fst_object_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* The functions of the module. */
#define FUNCTION(name, how, params, text) PyObject *fst_py_##name(PyObject *module, PyObject *args);
#include "py/functions.def"
#undef FUNCTION

/* The hyper-parameters of a group (groups.c). */
PyObject *fst_py_hyper(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* A docstring whose first line inspect.signature() reads. */
#define FST_DOC(signature, text) signature "\n--\n\n" text

/* The names of the instruction sets that are compiled in, or of those that this CPU also runs.
 * Returns a tuple, or NULL with a Python error. */
PyObject *fst_level_names(int supported_only);

/* The types Plan (step_plan.c), ReleaseHook (release.c) and OffloadPipe (offload_object.c). */
extern PyType_Spec fst_step_plan_spec, fst_release_hook_spec, fst_offload_spec;

/* The types Slots (slots_object.c), Gather and Batch (gather.c), and Arena (arena_object.c). */
extern PyType_Spec fst_slots_spec, fst_gather_spec, fst_batch_spec, fst_arena_spec;
