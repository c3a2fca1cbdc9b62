/* Scans TFRecord files in memory for records and checks them. */
#include "io/tfrecord.h"

#include "py/load/gather.h"

/* Fills `places` with pairs (start of the data, length). Stops at the first fault. */
static fst_tfrecord_fault scan(const char *file, size_t size, size_t *at, int check,
                               int64_t *places, Py_ssize_t room, Py_ssize_t *found)
{
    fst_tfrecord_fault fault = FST_TFRECORD_OK;
    for (*found = 0; *at < size && *found < room; ++*found) {
        size_t data, length;
        fault = fst_tfrecord_at(file, size, *at, check, &data, &length);
        if (fault)
            break;
        places[2 * *found] = (int64_t)data;
        places[2 * *found + 1] = (int64_t)length;
        *at = data + length + FST_TFRECORD_TAIL;
    }
    return fault;
}

/* scan_tfrecords(address, size, at, check, places) -> (found, at, fault) */
PyObject *fst_py_scan_tfrecords(PyObject *module, PyObject *args)
{
    unsigned long long address, size, start;
    PyObject *tensor;
    Py_ssize_t room = 0, found = 0;
    int check;
    if (!PyArg_ParseTuple(args, "KKKpO", &address, &size, &start, &check, &tensor))
        return NULL;
    int64_t *places = fst_read_indices(fst_module_state(module), tensor, &room);
    if (!places && PyErr_Occurred())
        return NULL;
    size_t at = (size_t)start;
    fst_tfrecord_fault fault;
    Py_BEGIN_ALLOW_THREADS
    fault =
        scan((const char *)(uintptr_t)address, (size_t)size, &at, check, places, room / 2, &found);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("nni", found, (Py_ssize_t)at, (int)fault);
}

PyObject *fst_py_crc32c(PyObject *module, PyObject *bytes)
{
    char *data;
    Py_ssize_t size;
    (void)module;
    if (PyBytes_AsStringAndSize(bytes, &data, &size))
        return NULL;
    return PyLong_FromUnsignedLong(fst_crc32c(data, (size_t)size));
}
