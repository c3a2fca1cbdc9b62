/* errors.h - errors as values, and as Python exceptions. */
#ifndef FST_PY_TORCH_ERRORS_H
#define FST_PY_TORCH_ERRORS_H

#define PY_SSIZE_T_CLEAN
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

/* The Python exception that a status means; borrowed. */
PyObject *fst_error_type(const fst_status *status);

/* Raises the status as that exception. Returns NULL. */
PyObject *fst_raise(const fst_status *status);

/* Does the same for functions that return -1. */
int fst_raise_int(const fst_status *status);

#endif
