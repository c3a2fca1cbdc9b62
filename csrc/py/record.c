#include "py/record.h"

static uint64_t word(const void *base, int index)
{
    return ((const uint64_t *)base)[index];
}

static const void *pointer(const void *base, int index)
{
    return (const void *)(uintptr_t)word(base, index);
}

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

/* Products with odd factors add up in any order: no chain of waits, as in a usual hash. */
static uint64_t describe(const fst_record_layout *layout, const void *impl)
{
    const fst_record_places *at = &layout->at;
    const uint64_t *factors = layout->factors;
    const uint64_t ndim = word(impl, at->ndim);
    uint64_t sum = ndim * factors[0] + word(impl, at->offset) * factors[1] +
                   word(impl, at->numel) * factors[2] +
                   (word(impl, at->kind) & layout->masks[0]) * factors[3] +
                   (word(impl, at->kind + 1) & layout->masks[1]) * factors[4];
    for (int d = 0; d < FST_RECORD_DIMS && (uint64_t)d < ndim; d++)
        sum += word(impl, at->sizes + d) * factors[5 + 2 * d] +
               word(impl, at->strides + d) * factors[6 + 2 * d];
    return sum;
}

static int same_memory(const fst_record_layout *layout, const fst_record *record)
{
    const uint64_t *now = (const uint64_t *)record->storage + layout->at.data_in_storage;
    return now[0] == record->memory[0] && now[1] == record->memory[1] &&
           now[2] == record->memory[2];
}

int fst_record_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_record *record)
{
    const char *impl = pointer(object, layout->at.impl_in_object);
    if (view->ndim > FST_RECORD_DIMS ||
        (view->ndim > 0 && (const char *)view->shape != impl + 8 * layout->at.sizes))
        return 0;
    const void *storage = pointer(impl, layout->at.storage_in_impl);
    if (!storage || !word(storage, layout->at.data_in_storage))
        return 0;
    *record = (fst_record){
        .object = object,
        .impl = impl,
        .storage = storage,
        .description = describe(layout, impl),
        .data = (uint64_t)(uintptr_t)view->data,
    };
    memcpy(record->memory, (const uint64_t *)storage + layout->at.data_in_storage,
           sizeof record->memory);
    return 1;
}

int fst_record_of(const fst_record_layout *layout, PyObject *object, fst_record *record)
{
    *record = (fst_record){.object = object, .impl = pointer(object, layout->at.impl_in_object)};
    return record->impl != NULL;
}

int fst_record_is_of(const fst_record_layout *layout, const fst_record *record, PyObject *object)
{
    return pointer(object, layout->at.impl_in_object) == record->impl;
}

int fst_record_is_same(const fst_record_layout *layout, const fst_record *record)
{
    return pointer(record->impl, layout->at.storage_in_impl) == record->storage &&
           describe(layout, record->impl) == record->description && same_memory(layout, record);
}

int fst_record_holds(const fst_record_layout *layout, const fst_record *record)
{
    return pointer(record->object, layout->at.impl_in_object) == record->impl &&
           fst_record_is_same(layout, record);
}

static const void *grad_of(const fst_record_layout *layout, const void *impl)
{
    const void *meta = pointer(impl, layout->at.meta_in_impl);
    return meta ? pointer(meta, layout->at.grad_in_meta) : NULL;
}

const void *fst_record_grad(const fst_record_layout *layout, const fst_record *param)
{
    return grad_of(layout, param->impl);
}

/* Whether an owner is what it was, or moved with the memory. */
static int same_owner(uint64_t before, uint64_t now, uint64_t data_before, uint64_t data_now)
{
    return now == before || (before == data_before && now == data_now);
}

/* Whether the tensor is in memory that is owned in the same way. */
static int same_owners(const uint64_t *before, const uint64_t *now)
{
    return now[0] && same_owner(before[1], now[1], before[0], now[0]) &&
           same_owner(before[2], now[2], before[0], now[0]);
}

int fst_record_follow(const fst_record_layout *layout, fst_record *record, const void *impl)
{
    if (describe(layout, impl) != record->description)
        return 0;
    const void *storage = pointer(impl, layout->at.storage_in_impl);
    if (!storage)
        return 0;
    const uint64_t *now = (const uint64_t *)storage + layout->at.data_in_storage;
    if (!same_owners(record->memory, now))
        return 0;
    record->data += now[0] - record->memory[0]; /* the offset in the storage is the same */
    record->impl = impl;
    record->storage = storage;
    memcpy(record->memory, now, sizeof record->memory);
    return 1;
}

static int has_counter(const fst_record_layout *layout, const void *impl)
{
    return (word(impl, layout->at.kind + 1) & layout->countable) == layout->countable;
}

void fst_forms_learn(const fst_record_layout *layout, fst_forms *forms, PyObject *object,
                     const fst_view *view)
{
    fst_record record;
    const int64_t count = fst_view_count(view);
    if (!layout->known || !layout->move || view->device != FST_HOST || count == 0 ||
        !fst_view_is_packed(view) || !fst_record_take(layout, object, view, &record) ||
        !has_counter(layout, record.impl))
        return;
    fst_form *form = &forms->table[record.description % FST_FORMS];
    *form = (fst_form){
        .description = record.description,
        .offset = (int64_t)(record.data - record.memory[0]),
        .count = count,
        .dtype = view->dtype,
    };
    memcpy(form->memory, record.memory, sizeof form->memory);
}

const fst_form *fst_forms_find(const fst_record_layout *layout, const fst_forms *forms,
                               const void *impl, void **data)
{
    const uint64_t description = describe(layout, impl);
    const fst_form *form = &forms->table[description % FST_FORMS];
    const void *storage = pointer(impl, layout->at.storage_in_impl);
    if (form->description != description || form->count == 0 || !storage)
        return NULL;
    const uint64_t *now = (const uint64_t *)storage + layout->at.data_in_storage;
    if (!same_owners(form->memory, now))
        return NULL;
    *data = (char *)(uintptr_t)now[0] + form->offset;
    return form;
}

const void *fst_record_grad_of(const fst_record_layout *layout, PyObject *object)
{
    return grad_of(layout, pointer(object, layout->at.impl_in_object));
}

/* The lines of words `first` to `last`. */
static void fetch_words(const void *base, int first, int last)
{
    for (int index = first; index < last; index += 8)
        __builtin_prefetch((const uint64_t *)base + index);
    __builtin_prefetch((const uint64_t *)base + last);
}

static void fetch_impl(const fst_record_places *at, const void *impl)
{
    fetch_words(impl, at->storage_in_impl, at->kind + 1);
}

static void fetch_storage(const fst_record_places *at, const void *storage)
{
    fetch_words(storage, at->data_in_storage, at->data_in_storage + 2);
}

void fst_record_fetch_grad(const fst_record_layout *layout, PyObject *object, int step)
{
    const void *impl = pointer(object, layout->at.impl_in_object);
    if (step == 0) {
        __builtin_prefetch(impl);
        return;
    }
    const void *meta = pointer(impl, layout->at.meta_in_impl);
    if (!meta)
        return;
    const char *grad_in_meta = (const char *)meta + 8 * layout->at.grad_in_meta;
    if (step == 1) {
        __builtin_prefetch(grad_in_meta);
        return;
    }
    const void *grad = pointer(meta, layout->at.grad_in_meta);
    if (step == 2)
        fetch_impl(&layout->at, grad);
    else
        fetch_storage(&layout->at, pointer(grad, layout->at.storage_in_impl));
}

const void *fst_record_counted(const fst_record_layout *layout, PyObject *object)
{
    if (!layout->known || !layout->move)
        return NULL;
    const void *impl = pointer(object, layout->at.impl_in_object);
    return has_counter(layout, impl) ? impl : NULL;
}

enum { STEP_AHEAD = 8 };

/* The way to a version counter has two steps, each asked for when the one before should have come.
 */
static void fetch_counter(const fst_record_places *at, const void *const *impls, size_t count)
{
    if (count > 2 * STEP_AHEAD)
        __builtin_prefetch((const uint64_t *)impls[2 * STEP_AHEAD] + at->counter_in_impl);
    if (count > STEP_AHEAD)
        __builtin_prefetch(pointer(impls[STEP_AHEAD], at->counter_in_impl));
}

void fst_record_move_versions(const fst_record_layout *layout, const void *const *impls,
                              size_t count)
{
    for (size_t i = 0; i < count; i++) {
        fetch_counter(&layout->at, impls + i, count - i);
        layout->move(impls + i);
    }
}

void fst_record_fetch(const fst_record_layout *layout, const fst_record *record)
{
    __builtin_prefetch(record->object);
    fetch_impl(&layout->at, record->impl);
    fetch_storage(&layout->at, record->storage);
}
