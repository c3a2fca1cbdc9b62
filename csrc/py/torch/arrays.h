/* arrays.h - arrays that double when they are full. */
#pragma once

#include <Python.h>

/* Doubles the capacity of the array at *array. Returns 0, or -1 without memory; no Python error
 * is set. */
static inline int fst_array_double(void *array, size_t *capacity, size_t size)
{
    const size_t wanted = *capacity ? 2 * *capacity : 64;
    void *moved = PyMem_Realloc(*(void **)array, wanted * size);
    if (!moved)
        return -1;
    *(void **)array = moved;
    *capacity = wanted;
    return 0;
}

/* Makes room for element number `count`. Returns 0, or -1 with a Python error. */
static inline int fst_reserve(void *array, size_t *capacity, size_t count, size_t size)
{
    if (count < *capacity || !fst_array_double(array, capacity, size))
        return 0;
    PyErr_NoMemory();
    return -1;
}
