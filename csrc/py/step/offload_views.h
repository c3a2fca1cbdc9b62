/* offload_views.h - the tensors that threads of an OffloadPipe read and write, by way of views that
 * nobody else has. */
#pragma once

#include "core/offload.h"
#include "py/module.h"

/* A tensor over the same memory, which `.data = ...` and `set_` of the other one do not change. May
 * run Python code of a subclass. NULL with a Python error. */
PyObject *fst_offload_view(PyObject *tensor);

/* A tuple of tuples of views, of a sequence of tuples of tensors. NULL with a Python error. */
PyObject *fst_offload_views(PyObject *sequence);

/* Whether the elements lie one after another in some order, as they are. */
int fst_offload_has_no_gaps(const fst_view *view);

/* Reads tensors 0 to 3 of a tuple: a parameter on `device`, its copy, that of its gradient, and the
 * sums. Returns 0, or -1 with a TypeError. */
int fst_offload_read(fst_module *module, PyObject *tuple, int device, fst_offload_param *param);
