/* arguments.h - what several functions of the loader take and return. */
#pragma once

#include "py/module.h"

/* Reads a torch.Tensor (no subclass) in CPU memory. Returns 0, or -1 with a Python error. */
int fst_read_tensor(const fst_module *state, PyObject *object, fst_dl_tensor *tensor);

/* The same, for one whose elements are read or written: TypeError if its storage was emptied. */
int fst_read_memory(const fst_module *state, PyObject *object, fst_dl_tensor *tensor);

/* The elements of a contiguous 1-d int64 tensor; NULL with a Python error, or if it is empty. */
int64_t *fst_read_indices(const fst_module *state, PyObject *object, Py_ssize_t *count);

/* The length of a list or tuple; -1 for anything else. */
Py_ssize_t fst_sequence_size(PyObject *sequence);

/* Copies the ints of a list or tuple; returns 0 if one of its items is anything else. */
int fst_copy_ints(PyObject *sequence, int64_t *out, Py_ssize_t count);

/* A tensor of the type, shape and strides of `form` over its memory; without strides it is
 * contiguous. `end` is called once, from any thread, with the GIL or without: when the last tensor
 * over the memory is gone, or at once if this fails. */
PyObject *fst_export_tensor(const fst_module *state, const fst_dl_tensor *form,
                            void (*end)(void *owner), void *owner);
