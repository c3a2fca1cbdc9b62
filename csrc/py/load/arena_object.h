/* arena_object.h - the type Arena, for the files that implement it. */
#ifndef FST_PY_LOAD_ARENA_OBJECT_H
#define FST_PY_LOAD_ARENA_OBJECT_H

#include "io/arena.h"
#include "py/load/gather.h"

typedef struct {
    PyObject_HEAD
    fst_arena *arena;
    const fst_dl_api *api;
} fst_arena_object;

/* A tensor over the bytes of a block at one of its addresses. `end` is called for the block when
 * the last tensor over the memory is gone, or at once if this fails. */
PyObject *fst_arena_tensor(const fst_arena_object *self, size_t block, void *data, size_t size,
                           void (*end)(fst_arena *, size_t));

/* Methods; see _C.pyi. */
PyObject *fst_py_arena_prepare_locks(PyObject *object, PyObject *device);
PyObject *fst_py_arena_locked(PyObject *object, PyObject *args);

#endif
