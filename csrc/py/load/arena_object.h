/* arena_object.h - what the files of the type Arena share. */
#ifndef FST_PY_LOAD_ARENA_OBJECT_H
#define FST_PY_LOAD_ARENA_OBJECT_H

#include "io/arena.h"
#include "py/load/gather.h"

typedef struct {
    PyObject_HEAD
    fst_arena *arena;
    const fst_dl_api *api;
} fst_arena_object;

/* The bytes of a block, at an address of it, as a tensor. Takes the block over, in any case: `end`
 * is called for it when the last tensor over the same memory is gone. */
PyObject *fst_arena_tensor(const fst_arena_object *self, size_t block, void *data, size_t size,
                           void (*end)(fst_arena *, size_t));

/* Methods; see _C.pyi. */
PyObject *fst_py_arena_prepare_locks(PyObject *object, PyObject *device);
PyObject *fst_py_arena_locked(PyObject *object, PyObject *args);

#endif
