/* Whether the tensors of a Gather still are where they were, and have the form that they had. */
#include "py/gather.h"

enum { FEW_LEAVES = 8 }; /* all are looked at, rather than finding out which a batch is of */

struct fst_watch {
    PyObject *object;
    fst_dl_tensor form;
    int64_t sizes[]; /* shape, then strides */
};

fst_watch *fst_watch_new(const fst_module *state, const fst_dl_api *api, PyObject *object)
{
    fst_dl_tensor form;
    if (fst_read_tensor(state, api, object, &form))
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

static int is_same(const fst_module *state, const fst_dl_api *api, const fst_watch *watch)
{
    const fst_dl_tensor *then = &watch->form;
    const size_t dims = (size_t)then->ndim;
    fst_dl_tensor now;
    if (fst_read_tensor(state, api, watch->object, &now)) {
        PyErr_Clear(); /* it is no tensor that can be gathered from: who asks next says why */
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
        if (watch && !is_same(state, self->api, watch))
            return 0;
    }
    return 1;
}

static size_t count_leaves(const fst_table *table)
{
    size_t leaves = 0;
    for (size_t n = 0; n < table->node_count; n++)
        leaves += table->nodes[n].kind == FST_ROWS;
    return leaves;
}

/* The number of the last call that looked at a leaf is beside its watches. */
int fst_gather_is_same(const fst_module *state, fst_gather_object *self, const int64_t *indices,
                       size_t count)
{
    const fst_table *table = &self->table;
    fst_place place;
    if (count_leaves(table) <= FEW_LEAVES) {
        for (size_t n = 0; n < table->node_count; n++)
            if (table->nodes[n].kind == FST_ROWS && !leaf_is_same(state, self, n))
                return 0;
        return 1;
    }
    self->looks++;
    for (size_t i = 0; i < count; i++) {
        if (fst_table_find(table, indices[i], &place))
            continue;
        const size_t node = (size_t)(place.leaf - table->nodes);
        if (self->looked[node] == self->looks)
            continue;
        self->looked[node] = self->looks;
        if (!leaf_is_same(state, self, node))
            return 0;
    }
    return 1;
}
