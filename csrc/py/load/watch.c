/* Checks whether the source tensors of a Gather are unchanged. */
#include "py/load/gather.h"

enum { LEAVES_AT_ONCE = 8 }; /* leaves checked per batch where no held memory has moved */

struct fst_watch {
    PyObject *object;
    fst_dl_tensor form;
    int64_t sizes[]; /* shape, then strides */
};

fst_watch *fst_watch_new(const fst_module *state, PyObject *object)
{
    fst_dl_tensor form;
    if (fst_read_tensor(state, object, &form))
        return NULL;
    const size_t dims = (size_t)form.ndim;
    fst_watch *watch = PyMem_Malloc(sizeof *watch + 2 * dims * sizeof(int64_t));
    if (!watch) {
        PyErr_NoMemory();
        return NULL;
    }
    watch->object = Py_NewRef(object);
    watch->form = form;
    memcpy(watch->sizes, form.shape, dims * sizeof(int64_t));
    memcpy(watch->sizes + dims, form.strides, dims * sizeof(int64_t));
    return watch;
}

void fst_watch_free(fst_watch *watch)
{
    if (watch)
        Py_DECREF(watch->object);
    PyMem_Free(watch);
}

static int is_same(const fst_module *state, const fst_watch *watch)
{
    const fst_dl_tensor *then = &watch->form;
    const size_t dims = (size_t)then->ndim;
    fst_dl_tensor now;
    if (fst_read_tensor(state, watch->object, &now)) {
        PyErr_Clear(); /* no tensor to gather from: the next call that reads it raises */
        return 0;
    }
    return now.data == then->data && now.byte_offset == then->byte_offset &&
           now.ndim == then->ndim && !memcmp(&now.dtype, &then->dtype, sizeof now.dtype) &&
           !memcmp(now.shape, watch->sizes, dims * sizeof(int64_t)) &&
           !memcmp(now.strides, watch->sizes + dims, dims * sizeof(int64_t));
}

static int leaf_is_same(const fst_module *state, const fst_gather_object *self, size_t node)
{
    const size_t fields = self->table.field_count;
    for (size_t f = 0; f < fields; f++) {
        const fst_watch *watch = self->watches[node * fields + f];
        if (watch && !is_same(state, watch))
            return 0;
    }
    return 1;
}

int fst_gather_is_same(const fst_module *state, fst_gather_object *self)
{
    const size_t moves = fst_hold_moves(), nodes = self->table.node_count;
    size_t leaves = moves == self->moves ? LEAVES_AT_ONCE : nodes;
    for (size_t seen = 0; seen < nodes && leaves; seen++) {
        self->next_look = (self->next_look + 1) % nodes;
        if (self->table.nodes[self->next_look].kind != FST_ROWS)
            continue;
        leaves--;
        if (!leaf_is_same(state, self, self->next_look))
            return 0;
    }
    self->moves = moves;
    return 1;
}
