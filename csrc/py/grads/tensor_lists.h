/* tensor_lists.h - a list of tensors of one device as a plan of one operand per span. */
#ifndef FST_PY_GRADS_TENSOR_LISTS_H
#define FST_PY_GRADS_TENSOR_LISTS_H

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

/* Takes hold of a sequence of tensors; 0, or -1 with a Python error. To be freed in either case. */
int fst_list_start(fst_list *list, PyObject *sequence, int device);

/* Adds a tensor, whose layout, if it needs one, is kept under `index`, below the sequence's length;
 * 0, or -1 with `problem` filled. */
int fst_list_add(fst_list *list, Py_ssize_t index, const fst_view *view, int written,
                 fst_problem *problem);

/* Forgets what was added. */
void fst_list_restart(fst_list *list);

/* Binds a sequence of tensors that lie on `device`, for passes that write them or not; 0, or -1
 * with a TypeError that names the tensor's place in it. To be freed in either case. */
int fst_list_bind(fst_module *state, fst_list *list, PyObject *sequence, int device, int written);

/* The CUDA device of the first tensor and torch's current stream there; 0, or -1 with a TypeError.
 */
int fst_list_device(fst_module *state, PyObject *tensors, int *device, void **stream);

/* Raises what a driver said, and of which tensors; returns NULL. */
PyObject *fst_list_raise(const fst_list *list, const fst_status *status);

/* The tables of a list on a CUDA device, brought up to date; NULL with a Python error. All lists
 * share them, so nothing that may run Python code, and with it such a function, comes between this
 * and the launch. */
fst_gpu_tables *fst_list_upload(fst_module *state, const fst_list *list, void *stream);

void fst_list_free(fst_list *list);

#endif
