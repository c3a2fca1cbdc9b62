/* tensor_lists.h - a list of tensors on one device, as a plan with one operand per span. */
#pragma once

#include "core/plan.h"
#include "py/module.h"

typedef struct {
    fst_plan plan;
    fst_layout **layouts; /* one per tensor of the list, mostly NULL */
    PyObject *items;      /* a tuple that keeps the tensors alive */
    Py_ssize_t count;
    int device;
    unsigned dtypes; /* those that occur: bit 1 << fst_dtype */
} fst_list;

/* Starts a list with a sequence of tensors, which it keeps alive. Returns 0, or -1 with a Python
 * error. It must be freed in either case. */
int fst_list_start(fst_list *list, PyObject *sequence, int device);

/* Adds a tensor. Its layout, if it needs one, is stored at `index`, which is below the
 * sequence's length. Returns 0, or -1 with `problem` filled. */
int fst_list_add(fst_list *list, Py_ssize_t index, const fst_view *view, int written,
                 fst_problem *problem);

/* Removes all tensors that were added. */
void fst_list_restart(fst_list *list);

/* Binds a sequence of tensors on `device`, for a pass that writes them or does not. Returns 0,
 * or -1 with a TypeError that names the tensor's index. It must be freed in either case. */
int fst_list_bind(fst_module *state, fst_list *list, PyObject *sequence, int device, int written);

/* Finds the CUDA device of the first tensor and torch's current stream there. Returns 0, or -1
 * with a TypeError. */
int fst_list_device(fst_module *state, PyObject *tensors, int *device, void **stream);

/* Raises an error of the driver, with the number of tensors and the first one's shape. Returns
 * NULL. */
PyObject *fst_list_raise(const fst_list *list, const fst_status *status);

/* Uploads the tables of a list to its CUDA device, where they are too long to go with the launch.
 * `leaves_results`: the pass writes a norm or found inf into the tables. Returns NULL with a Python
 * error. All lists of a device share the tables, so no Python code may run between this call and
 * the launch. */
fst_gpu_tables *fst_list_upload(fst_module *state, const fst_list *list, void *stream,
                                int leaves_results);

/* A scalar argument of a function, and where a launch takes it. */
typedef struct {
    PyObject *object; /* None: absent */
    const char *name;
    fst_device_scalar *out;
} fst_wanted_scalar;

enum { FST_MOST_SCALARS = 2 };

/* A list on a CUDA device. */
typedef struct {
    fst_list list;
    void *stream;
    fst_gpu_tables *tables; /* NULL until they were uploaded */
} fst_device_list;

/* Binds a list on a CUDA device and scalars beside it, again where Python code has run in between.
 * Returns 0, or -1 with a Python error; the list must be freed in either case. */
int fst_device_list_bind(fst_module *state, fst_device_list *it, PyObject *tensors, int written,
                         const fst_wanted_scalar *scalars);

/* Uploads its tables. Returns 0, or -1 with a Python error. */
int fst_device_list_upload(fst_module *state, fst_device_list *it, int leaves_results);

/* Ends a call and frees the list. Returns None, or NULL where `status` has an error or a Python
 * error is set. */
PyObject *fst_device_list_finish(fst_device_list *it, int launched, const fst_status *status);

void fst_list_free(fst_list *list);
