/* What is known of the parameters of a step of Adafactor, by torch's records. */
#include "py/step/factored_bind.h"
#include "py/torch/tensor_record_read.h"

int fst_factored_follow(const fst_module *module, fst_factored_entry *entry,
                        fst_factored_known *known, fst_factored *f)
{
    const fst_record_layout *layout = &module->records;
    uint64_t hash = 0, by;
    if (!layout->known || known->hash == 0 || known->has_rows != entry->has_rows)
        return 0;
    for (int k = 0; k < FST_OF_COUNT; k++) {
        PyObject *object = entry->objects[k];
        if (!object)
            continue;
        if (!fst_tensor_is_plain(&module->tensors, object))
            return 0;
        if (k == FST_OF_GRAD)
            continue;
        if (!fst_record_counter(layout, object)) /* it may be of inference mode */
            return 0;
        fst_record_add(layout, fst_record_of(layout, object), &hash);
    }
    const void *grad = fst_record_of(layout, entry->objects[FST_OF_GRAD]);
    if (hash != known->hash || !fst_moving_follow(layout, &known->grad, grad, &by))
        return 0;
    known->bound.grad.data = (char *)known->bound.grad.data + (int64_t)by;
    *f = known->bound;
    entry->step = known->step;
    entry->is_left = fst_factored_share(&f->param, &f->grad, f->count);
    return 1;
}

void fst_factored_remember(const fst_module *module, const fst_factored_entry *entry,
                           fst_factored_known *known, const fst_view *views, const fst_factored *f)
{
    const fst_record_layout *layout = &module->records;
    fst_tensor_record unused;
    uint64_t hash = 0;
    known->hash = 0;
    if (!layout->known || entry->layouts[0] || entry->layouts[1])
        return;
    for (int k = 0; k < FST_OF_COUNT; k++) {
        PyObject *object = entry->objects[k];
        if (!object)
            continue;
        if (k == FST_OF_GRAD ? !fst_moving_take(layout, object, &views[k], &known->grad)
                             : !fst_record_take(layout, object, &views[k], &unused, &hash))
            return;
    }
    known->hash = hash;
    known->bound = *f;
    known->step = views[FST_OF_STEP];
    known->has_rows = entry->has_rows;
}

void fst_factored_fetch(const fst_module *module, const fst_factored_entry *entry, int step)
{
    const fst_record_layout *layout = &module->records;
    for (int k = 0; layout->known && k < FST_OF_COUNT; k++) {
        PyObject *object = entry->objects[k];
        if (!object || !fst_tensor_is_plain(&module->tensors, object))
            continue;
        const void *impl = fst_record_of(layout, object);
        if (step == 0)
            fst_fetch_impl(&layout->at, impl);
        else
            fst_fetch_storage(&layout->at, fst_word_pointer(impl, layout->at.storage_in_impl));
    }
}

void fst_factored_take_known(fst_module *module, fst_factored_list *list)
{
    fst_factored_cache known = module->factored;
    module->factored = (fst_factored_cache){.all = NULL};
    if (known.count < list->count) {
        fst_factored_known *grown = PyMem_Realloc(known.all, list->count * sizeof *grown);
        if (grown) {
            memset(grown + known.count, 0, (list->count - known.count) * sizeof *grown);
            known = (fst_factored_cache){grown, list->count};
        }
    }
    list->known = known;
}

void fst_factored_give_known(fst_module *module, fst_factored_list *list)
{
    PyMem_Free(module->factored.all); /* of another thread */
    module->factored = list->known;
    list->known = (fst_factored_cache){.all = NULL};
}

void fst_factored_forget(fst_module *module)
{
    PyMem_Free(module->factored.all);
    PyMem_Free(module->apart.extents);
    module->factored = (fst_factored_cache){.all = NULL};
    module->apart = (fst_apart){.extents = NULL};
}
