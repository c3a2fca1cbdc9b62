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

/* An exception of torch; borrowed from the module, which keeps it. NULL with another error if there
 * is none. */
static PyObject *of_torch(const char *name)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch ? PyObject_GetAttrString(torch, name) : NULL;
    Py_XDECREF(torch);
    Py_XDECREF(type);
    return type;
}

PyObject *fst_error_type(const fst_status *status)
{
    switch (status->code) {
    case FST_NO_MEMORY:
        return status->device_error ? of_torch("OutOfMemoryError") : PyExc_MemoryError;
    case FST_DEVICE_LOST:
        return of_torch("AcceleratorError");
    case FST_BAD_VALUE:
        return PyExc_ValueError;
    default:
        return PyExc_RuntimeError;
    }
}

/* Raises torch's error with the driver's number, as torch does. */
static void raise_lost(PyObject *type, const fst_status *status)
{
    PyObject *error = PyObject_CallFunction(type, "s", status->message);
    PyObject *number = error ? PyLong_FromLong(status->device_error) : NULL;
    if (number && !PyObject_SetAttrString(error, "error_code", number))
        PyErr_SetObject(type, error);
    Py_XDECREF(number);
    Py_XDECREF(error);
}

PyObject *fst_raise(const fst_status *status)
{
    PyObject *type = fst_error_type(status);
    if (type && status->code == FST_DEVICE_LOST)
        raise_lost(type, status);
    else if (type)
        PyErr_Format(type, "%s", status->message); /* which may not be UTF-8 */
    return NULL;
}

int fst_raise_int(const fst_status *status)
{
    fst_raise(status);
    return -1;
}

int fst_is_out_of_memory(void)
{
    PyObject *type, *value, *trace;
    if (PyErr_ExceptionMatches(PyExc_MemoryError))
        return 1;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *full = of_torch("OutOfMemoryError");
    const int matches = full && PyErr_GivenExceptionMatches(type, full);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return matches;
}

int fst_empty_cache(void)
{
    PyObject *helper = PyImport_ImportModule("faststep._torch.optim");
    PyObject *answer = helper ? PyObject_CallMethod(helper, "is_capturing", NULL) : NULL;
    const int captures = answer ? PyObject_IsTrue(answer) : -1;
    PyObject *cuda = captures ? NULL : PyImport_ImportModule("torch.cuda");
    PyObject *done = cuda ? PyObject_CallMethod(cuda, "empty_cache", NULL) : NULL;
    const int emptied = done ? 1 : captures > 0 ? 0 : -1;
    Py_XDECREF(done);
    Py_XDECREF(cuda);
    Py_XDECREF(answer);
    Py_XDECREF(helper);
    return emptied;
}
