/* errors.h - errors as values, and as Python exceptions. */
#pragma once

#include <Python.h>

#include "base/status.h"

/* Why a tensor cannot be used: a kind that programs compare, and a clause for people. */
typedef struct {
    const char *kind; /* "type", "storage", "dtype", "device", "shape" or "overlap" */
    char detail[200];
} fst_problem;

/* Fills `problem` and returns -1. */
int fst_problem_set(fst_problem *problem, const char *kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Turns the Python error that is set into the detail of a problem, and clears it. Returns -1. */
int fst_problem_from_error(fst_problem *problem, const char *kind);

/* The Python exception that a status means; borrowed. torch.OutOfMemoryError where a device has no
 * memory, torch.AcceleratorError where its context is lost. NULL with another error if torch cannot
 * be asked. */
PyObject *fst_error_type(const fst_status *status);

/* Raises the status as that exception. Returns NULL. */
PyObject *fst_raise(const fst_status *status);

/* Does the same for functions that return -1. */
int fst_raise_int(const fst_status *status);

/* Whether the Python error that is set says that the host, or a device, has no memory. */
int fst_is_out_of_memory(void);

/* Has torch give back device memory that nobody uses. Returns 1; 0 during a capture, which forbids
 * it; or -1 with a Python error. */
int fst_empty_cache(void);
