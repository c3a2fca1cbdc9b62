/* Tells by torch's record of a tensor that it has not changed, without calling torch. */
#include "py/torch/tensor_record_read.h"

void fst_record_init(fst_record_layout *layout)
{
    uint64_t state = 0; /* splitmix64 (Steele, Lea & Flood 2014) */
    for (int i = 0; i < FST_RECORD_WORDS; i++) {
        uint64_t z = (state += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        layout->factors[i] = (z ^ (z >> 31)) | 1u;
    }
    layout->known = 1;
}

/* Whether `view` is torch's answer on the tensor with this record, with its shape inside the
 * record. Only a tensor without elements may have no memory. */
static int is_described(const fst_record_layout *layout, const void *impl, const fst_view *view)
{
    if (view->ndim > FST_RECORD_DIMS ||
        (view->ndim > 0 && (const char *)view->shape != (const char *)impl + 8 * layout->at.sizes))
        return 0;
    const void *storage = fst_word_pointer(impl, layout->at.storage_in_impl);
    return storage && (fst_word(storage, layout->at.data_in_storage) || fst_view_count(view) == 0);
}

int fst_record_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_tensor_record *record, uint64_t *hash)
{
    const void *impl = fst_record_of(layout, object);
    if (!is_described(layout, impl, view))
        return 0;
    *record = (fst_tensor_record){object, impl, fst_word_pointer(impl, layout->at.storage_in_impl)};
    fst_record_add(layout, impl, hash);
    return 1;
}

int fst_moving_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_moving *moving)
{
    const void *impl = fst_record_of(layout, object);
    if (!is_described(layout, impl, view))
        return 0;
    const void *storage = fst_word_pointer(impl, layout->at.storage_in_impl);
    *moving = (fst_moving){
        .impl = impl, .storage = storage, .description = fst_record_describe(layout, impl)};
    memcpy(moving->memory, fst_record_memory(layout, storage), sizeof moving->memory);
    return 1;
}

static int has_counter(const fst_record_layout *layout, const void *impl)
{
    return (fst_word(impl, layout->at.kind + 1) & layout->countable) == layout->countable;
}

void fst_forms_learn(const fst_record_layout *layout, fst_forms *forms, PyObject *object,
                     const fst_view *view)
{
    fst_moving moving;
    const int64_t count = fst_view_count(view);
    if (!layout->known || !layout->move || view->device != FST_HOST || count == 0 ||
        !fst_view_is_packed(view) || !fst_moving_take(layout, object, view, &moving) ||
        !has_counter(layout, moving.impl))
        return;
    fst_form *form = &forms->table[moving.description % FST_FORMS];
    *form = (fst_form){
        .description = moving.description,
        .offset = (int64_t)((uint64_t)(uintptr_t)view->data - moving.memory[0]),
        .count = count,
        .dtype = view->dtype,
    };
    memcpy(form->memory, moving.memory, sizeof form->memory);
}

const fst_form *fst_forms_find(const fst_record_layout *layout, const fst_forms *forms,
                               const void *impl, void **data)
{
    const uint64_t description = fst_record_describe(layout, impl);
    const fst_form *form = &forms->table[description % FST_FORMS];
    const void *storage = fst_word_pointer(impl, layout->at.storage_in_impl);
    if (form->description != description || form->count == 0 || !storage)
        return NULL;
    const uint64_t *now = fst_record_memory(layout, storage);
    if (!fst_same_owners(form->memory, now))
        return NULL;
    *data = (char *)(uintptr_t)now[0] + form->offset;
    return form;
}

void fst_record_fetch_grad(const fst_record_layout *layout, PyObject *object, int step)
{
    const void *impl = fst_record_of(layout, object);
    if (step == 0) {
        __builtin_prefetch(impl);
        return;
    }
    const void *meta = fst_record_meta(layout, impl);
    if (!meta)
        return;
    const char *grad_in_meta = (const char *)meta + 8 * layout->at.grad_in_meta;
    if (step == 1) {
        __builtin_prefetch(grad_in_meta);
        return;
    }
    const void *grad = fst_word_pointer(meta, layout->at.grad_in_meta);
    if (step == 2)
        fst_fetch_impl(&layout->at, grad);
    else
        fst_fetch_storage(&layout->at, fst_word_pointer(grad, layout->at.storage_in_impl));
}

const void *fst_record_counter(const fst_record_layout *layout, PyObject *object)
{
    const void *impl = layout->known ? fst_record_of(layout, object) : NULL;
    return impl && has_counter(layout, impl) ? fst_word_pointer(impl, layout->at.counter_in_impl)
                                             : NULL;
}

const void *fst_record_counted(const fst_record_layout *layout, PyObject *object)
{
    const void *impl = layout->known ? fst_record_of(layout, object) : NULL;
    return impl && fst_record_counts(layout, impl) ? impl : NULL;
}

int fst_record_counts(const fst_record_layout *layout, const void *impl)
{
    return layout->move && has_counter(layout, impl);
}

enum { STEP_AHEAD = 8 };

/* Prefetches version counters, in two steps: the pointer, and then the counter. */
static void fetch_counter(const fst_record_places *at, const void *const *impls, size_t count)
{
    if (count > 2 * STEP_AHEAD)
        __builtin_prefetch((const uint64_t *)impls[2 * STEP_AHEAD] + at->counter_in_impl);
    if (count > STEP_AHEAD)
        __builtin_prefetch(fst_word_pointer(impls[STEP_AHEAD], at->counter_in_impl));
}

void fst_record_move_versions(const fst_record_layout *layout, const void *const *impls,
                              size_t count)
{
    for (size_t i = 0; i < count; i++) {
        fetch_counter(&layout->at, impls + i, count - i);
        layout->move(impls + i);
    }
}
