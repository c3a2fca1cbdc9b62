/* arrays.h - arrays that grow by one element at a time. */
#ifndef FST_PY_TORCH_ARRAYS_H
#define FST_PY_TORCH_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Doubles an array, whose address is at `array`; 0, or -1 for lack of memory with no Python error.
 */
int fst_array_double(void *array, size_t *capacity, size_t size);

/* Makes room for one more element after `count`; 0, or -1 with a Python error. */
static inline int fst_reserve(void *array, size_t *capacity, size_t count, size_t size)
{
    if (count < *capacity || !fst_array_double(array, capacity, size))
        return 0;
    PyErr_NoMemory();
    return -1;
}

#endif
