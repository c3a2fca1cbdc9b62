/* module.h - the state of the extension module, and the functions and types that it offers. */
#ifndef FST_PY_MODULE_H
#define FST_PY_MODULE_H

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

typedef struct {
    fst_tensors tensors;
    fst_names names;
    PyTypeObject *plan_type;
    PyObject *tensor_error; /* the exception _C.TensorError */
    fst_record_layout records;
    fst_owner_places owners;
    fst_forms forms;
    fst_unscaled unscaled;
    _Bool (*has_callbacks)(void);                 /* libtorch's; NULL: not known */
    int has_kernels;                              /* use_kernels_of() was called */
    fst_gpu_tables *list_tables[FST_GPU_DEVICES]; /* for functions on lists; made when needed */
    PyTypeObject *slots_type, *gather_type, *arena_type, *release_hook_type;
} fst_module;

/* The state of the module. Functions get the module as their first argument. */
static inline fst_module *fst_module_state(PyObject *module)
{
    return PyModule_GetState(module);
}

/* What the extension runs on (environment.c). */
PyObject *fst_py_use_threads_of(PyObject *module, PyObject *path);
PyObject *fst_py_cpu_info(PyObject *module, PyObject *unused);
PyObject *fst_py_rules(PyObject *module, PyObject *unused);
PyObject *fst_py_use_kernels_of(PyObject *module, PyObject *path);
PyObject *fst_py_has_kernels(PyObject *module, PyObject *unused);
PyObject *fst_py_use_records(PyObject *module, PyObject *args);
PyObject *fst_py_use_callbacks(PyObject *module, PyObject *address);
PyObject *fst_py_use_modes(PyObject *module, PyObject *address);
PyObject *fst_py_use_dtensors(PyObject *module, PyObject *args);
PyObject *fst_py_use_streams(PyObject *module, PyObject *function);
PyObject *fst_py_is_recorded(PyObject *module, PyObject *unused);
PyObject *fst_py_device_info(PyObject *module, PyObject *ordinal);
PyObject *fst_py_device_counts(PyObject *module, PyObject *unused);

/* The names of the instruction sets that are compiled in, or of those that this CPU also runs.
 * Returns a tuple, or NULL with a Python error. */
PyObject *fst_level_names(int supported_only);

/* Functions on lists of tensors (tensor_lists.c, grads.c, accumulate.c) and on the loss scale
 * (scaler.c). */
PyObject *fst_py_collect_grads(PyObject *module, PyObject *params);
PyObject *fst_py_unscale_grads(PyObject *module, PyObject *args);
PyObject *fst_py_clip_grads(PyObject *module, PyObject *args);
PyObject *fst_py_fusable(PyObject *module, PyObject *args);
PyObject *fst_py_chunk_squares(PyObject *module, PyObject *args); /* chunk_squares.c */
PyObject *fst_py_fold_squares(PyObject *module, PyObject *sums);
PyObject *fst_py_measure(PyObject *module, PyObject *args);
PyObject *fst_py_norm(PyObject *module, PyObject *args);
PyObject *fst_py_scale(PyObject *module, PyObject *args);
PyObject *fst_py_clamp(PyObject *module, PyObject *args);
PyObject *fst_py_accumulate(PyObject *module, PyObject *args);
PyObject *fst_py_update_scale(PyObject *module, PyObject *args);

/* The same on a CUDA device (device_lists.c). They launch kernels and do not wait for the
 * device. */
PyObject *fst_py_device_accumulate(PyObject *module, PyObject *args); /* accumulate.c */
PyObject *fst_py_device_norm(PyObject *module, PyObject *args);
PyObject *fst_py_device_chunk_squares(PyObject *module, PyObject *args); /* device_squares.c */
PyObject *fst_py_device_fold_squares(PyObject *module, PyObject *args);
PyObject *fst_py_device_unscale(PyObject *module, PyObject *args);
PyObject *fst_py_device_clip(PyObject *module, PyObject *args);
PyObject *fst_py_device_clamp(PyObject *module, PyObject *args);

/* The hyper-parameters of a group (groups.c). */
PyObject *fst_py_hyper(PyObject *module, PyObject *const *args, Py_ssize_t given);

/* The types Plan (step_plan.c) and ReleaseHook (release.c). */
extern PyType_Spec fst_step_plan_spec, fst_release_hook_spec;

/* Batches from arrays (slots_object.c, gather.c) and from worker processes (arena_object.c), and
 * functions on indices. */
PyObject *fst_py_copy_indices(PyObject *module, PyObject *args);
PyObject *fst_py_permute(PyObject *module, PyObject *args);
PyObject *fst_py_keep_freed_memory(PyObject *module, PyObject *unused);
PyObject *fst_py_keep_locked_memory(PyObject *module, PyObject *whether); /* arena_locked.c */
PyObject *fst_py_hold(PyObject *module, PyObject *args);                  /* hold.c */
PyObject *fst_py_holds(PyObject *module, PyObject *unused);
PyObject *fst_py_use_owners(PyObject *module, PyObject *args);
PyObject *fst_py_is_built_in(PyObject *module, PyObject *object); /* built_in.c */
extern PyType_Spec fst_slots_spec, fst_gather_spec, fst_arena_spec;

/* Memory that stays with the process (retaining.c). */
PyObject *fst_py_retain_memory(PyObject *module, PyObject *args);
PyObject *fst_py_release_memory(PyObject *module, PyObject *unused);
PyObject *fst_py_end_retaining(PyObject *module, PyObject *unused);
PyObject *fst_py_retained_memory(PyObject *module, PyObject *unused);
PyObject *fst_py_foreign_allocator(PyObject *module, PyObject *unused);

/* TFRecord files (tfrecord_scan.c). */
PyObject *fst_py_crc32c(PyObject *module, PyObject *bytes);
PyObject *fst_py_scan_tfrecords(PyObject *module, PyObject *args);
/* Batches of images (image_batch.c). */
PyObject *fst_py_transform_images(PyObject *module, PyObject *args);
PyObject *fst_py_split_channels(PyObject *module, PyObject *args);

#endif
