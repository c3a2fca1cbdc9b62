/* Arrays that double when they are full. */
#include "py/torch/arrays.h"

int fst_array_double(void *array, size_t *capacity, size_t size)
{
    const size_t wanted = *capacity ? 2 * *capacity : 64;
    void *moved = PyMem_Realloc(*(void **)array, wanted * size);
    if (!moved)
        return -1;
    *(void **)array = moved;
    *capacity = wanted;
    return 0;
}
