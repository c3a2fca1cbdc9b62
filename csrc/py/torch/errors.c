/* Errors as values, and as Python exceptions. */
#include "py/torch/errors.h"

#include <stdarg.h>
#include <stdio.h>

int fst_problem_set(fst_problem *problem, const char *kind, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->detail, sizeof problem->detail, format, arguments);
    va_end(arguments);
    problem->kind = kind;
    return -1;
}

int fst_problem_from_error(fst_problem *problem, const char *kind)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    PyObject *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    const char *message = bytes ? PyBytes_AsString(bytes) : "unknown error";
    const char *end = strchr(message, '\n'); /* torch adds a stack trace */
    fst_problem_set(problem, kind, "%.*s", end ? (int)(end - message) : 150, message);
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
    return -1;
}

PyObject *fst_error_type(const fst_status *status)
{
    return status->code == FST_NO_MEMORY   ? PyExc_MemoryError
           : status->code == FST_BAD_VALUE ? PyExc_ValueError
                                           : PyExc_RuntimeError;
}

PyObject *fst_raise(const fst_status *status)
{
    PyErr_SetString(fst_error_type(status), status->message);
    return NULL;
}

int fst_raise_int(const fst_status *status)
{
    fst_raise(status);
    return -1;
}
