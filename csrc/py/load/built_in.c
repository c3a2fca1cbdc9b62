/* is_built_in: looks whether a batch has nothing but Python's own numbers and texts. */
#include "py/module.h"

enum { DEEPEST = 4 }; /* containers within each other; one may hold itself */

static int is_built_in(PyObject *object, int depth)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (object == Py_None || PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
        PyFloat_CheckExact(object) || PyBool_Check(object) || PyBytes_CheckExact(object))
        return 1;
    const int is_list = PyList_CheckExact(object), is_dict = PyDict_CheckExact(object);
    if (depth == DEEPEST || !(is_list || is_dict || PyTuple_CheckExact(object)))
        return 0;
    if (is_dict) {
        while (PyDict_Next(object, &at, &key, &value))
            if (!is_built_in(key, depth + 1) || !is_built_in(value, depth + 1))
                return 0;
        return 1;
    }
    const Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
    for (; at < size; at++)
        if (!is_built_in(is_list ? PyList_GetItem(object, at) : PyTuple_GetItem(object, at),
                         depth + 1))
            return 0;
    return 1;
}

PyObject *fst_py_is_built_in(PyObject *module, PyObject *object)
{
    (void)module;
    return PyBool_FromLong(is_built_in(object, 0));
}
