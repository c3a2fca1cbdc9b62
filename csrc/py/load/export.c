/* Tensors over memory that is not torch's. */
#include <stdlib.h>

#include "py/load/arguments.h"

typedef struct {
    fst_dl_managed managed;
    void (*end)(void *owner);
    void *owner;
    int64_t sizes[]; /* shape, then strides */
} tensor_export;

static void end_export(fst_dl_managed *managed)
{
    tensor_export *export = (tensor_export *)managed;
    export->end(export->owner);
    free(export);
}

PyObject *fst_export_tensor(const fst_module *state, const fst_dl_tensor *form,
                            void (*end)(void *owner), void *owner)
{
    const size_t dims = (size_t)form->ndim;
    tensor_export *export = malloc(sizeof *export + 2 * dims * sizeof(int64_t));
    void *tensor = NULL;
    if (!export) {
        end(owner);
        return PyErr_NoMemory();
    }
    int64_t *sizes = export->sizes, stride = 1;
    for (size_t d = dims; d-- > 0;) {
        sizes[d] = form->shape[d];
        sizes[dims + d] = form->strides ? form->strides[d] : stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    export->end = end;
    export->owner = owner;
    export->managed = (fst_dl_managed){.version = {1, 0}, .deleter = end_export, .tensor = *form};
    export->managed.tensor.shape = sizes;
    export->managed.tensor.strides = sizes + dims;
    /* if it fails, torch may still have the export, so it is not freed */
    return state->tensors.api->managed_tensor_to_py_object(&export->managed, &tensor) ? NULL
                                                                                      : tensor;
}
