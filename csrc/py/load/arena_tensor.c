/* Tensors over the blocks of an arena. */
#include <stdlib.h>
#include <unistd.h>

#include "py/load/arena_object.h"

/* The export of a block, which ends when the last tensor over the memory is gone. */
typedef struct {
    fst_dl_managed managed;
    fst_arena *arena;
    size_t block;
    void (*end)(fst_arena *arena, size_t block);
    pid_t process;
    int64_t size, stride;
} block_export;

/* Called from any thread, with the GIL or without. A forked child has a copy of the export but
 * does not own the block. */
static void end_export(fst_dl_managed *managed)
{
    block_export *export = (block_export *)managed;
    if (export->process == getpid())
        export->end(export->arena, export->block);
    fst_arena_drop(export->arena);
    free(export);
}

PyObject *fst_arena_tensor(const fst_arena_object *self, size_t block, void *data, size_t size,
                           void (*end)(fst_arena *, size_t))
{
    int (*to_object)(fst_dl_managed *, void **) =
        (int (*)(fst_dl_managed *, void **))self->api->managed_tensor_to_py_object;
    block_export *export = malloc(sizeof *export);
    void *tensor = NULL;
    if (!export) {
        end(self->arena, block);
        return PyErr_NoMemory();
    }
    *export = (block_export){
        .arena = self->arena,
        .block = block,
        .end = end,
        .process = getpid(),
        .size = (int64_t)size,
        .stride = 1,
        .managed = {.version = {1, 0},
                    .deleter = end_export,
                    .tensor = {.data = data,
                               .device = {FST_DL_CPU, 0},
                               .ndim = 1,
                               .dtype = {FST_DL_UINT, 8, 1},
                               .shape = &export->size,
                               .strides = &export->stride}},
    };
    fst_arena_keep(self->arena);
    /* if it fails, torch may still have the export, so it is not freed */
    return to_object(&export->managed, &tensor) ? NULL : tensor;
}
