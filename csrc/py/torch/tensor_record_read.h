/* tensor_record_read.h - reads torch's records, inline: a step does so for thousands of tensors. */
#pragma once

#include "py/torch/tensor_record.h"

static inline uint64_t fst_word(const void *base, int index)
{
    return ((const uint64_t *)base)[index];
}

static inline const void *fst_word_pointer(const void *base, int index)
{
    return (const void *)(uintptr_t)fst_word(base, index);
}

/* The record of an object; NULL if that cannot be said. */
static inline const void *fst_record_of(const fst_record_layout *layout, PyObject *object)
{
    return fst_word_pointer(object, layout->at.impl_in_object);
}

/* A hash of the words that describe a tensor. Products with odd factors can be added in any
 * order, so the CPU does not wait for one before the next. */
static inline uint64_t fst_record_describe(const fst_record_layout *layout, const void *impl)
{
    const fst_record_places *at = &layout->at;
    const uint64_t *factors = layout->factors;
    const uint64_t ndim = fst_word(impl, at->ndim);
    uint64_t sum = ndim * factors[0] + fst_word(impl, at->offset) * factors[1] +
                   fst_word(impl, at->numel) * factors[2] +
                   (fst_word(impl, at->kind) & layout->masks[0]) * factors[3] +
                   (fst_word(impl, at->kind + 1) & layout->masks[1]) * factors[4];
    for (int d = 0; d < FST_RECORD_DIMS && (uint64_t)d < ndim; d++)
        sum += fst_word(impl, at->sizes + d) * factors[5 + 2 * d] +
               fst_word(impl, at->strides + d) * factors[6 + 2 * d];
    return sum;
}

static inline const uint64_t *fst_record_memory(const fst_record_layout *layout,
                                                const void *storage)
{
    return (const uint64_t *)storage + layout->at.data_in_storage;
}

/* Adds the words of a live tensor's records to a hash. */
static inline void fst_record_add(const fst_record_layout *layout, const void *impl, uint64_t *hash)
{
    const uint64_t *factors = layout->factors + FST_RECORD_WORDS - 5;
    const void *storage = fst_word_pointer(impl, layout->at.storage_in_impl);
    uint64_t sum = fst_record_describe(layout, impl) + (uint64_t)(uintptr_t)storage * factors[0];
    for (int i = 0; storage && i < 3; i++)
        sum += fst_record_memory(layout, storage)[i] * factors[1 + i];
    *hash = (*hash + sum) * factors[4]; /* tensors do not change places */
}

/* Autograd's record of the tensor with this record, or NULL. */
static inline const void *fst_record_meta(const fst_record_layout *layout, const void *impl)
{
    return fst_word_pointer(impl, layout->at.meta_in_impl);
}

static inline const void *fst_record_grad(const fst_record_layout *layout, const void *impl)
{
    const void *meta = fst_record_meta(layout, impl);
    return meta ? fst_word_pointer(meta, layout->at.grad_in_meta) : NULL;
}

/* Whether two storages own their memory in the same way: a word that names an owner is unchanged,
 * or equals the memory's address before and after. */
static inline int fst_same_owners(const uint64_t *before, const uint64_t *now)
{
    int same = (now[0] == 0) == (before[0] == 0);
    for (int i = 1; i < 3; i++)
        same = same && (now[i] == before[i] || (before[i] == before[0] && now[i] == now[0]));
    return same;
}

/* Whether a tensor matches `moving` in all but its memory's address. If so, `moving` follows it
 * and *by becomes the distance in bytes. If not, nothing changes. */
static inline int fst_moving_follow(const fst_record_layout *layout, fst_moving *moving,
                                    const void *impl, uint64_t *by)
{
    const void *storage = fst_word_pointer(impl, layout->at.storage_in_impl);
    if (!storage || fst_record_describe(layout, impl) != moving->description)
        return 0;
    const uint64_t *now = fst_record_memory(layout, storage);
    if (!fst_same_owners(moving->memory, now))
        return 0;
    *by = now[0] - moving->memory[0]; /* the offset in the storage is the same */
    moving->impl = impl;
    moving->storage = storage;
    memcpy(moving->memory, now, sizeof moving->memory);
    return 1;
}

/* The lines of words `first` to `last`. */
static inline void fst_fetch_words(const void *base, int first, int last)
{
    for (int index = first; index < last; index += 8)
        __builtin_prefetch((const uint64_t *)base + index);
    __builtin_prefetch((const uint64_t *)base + last);
}

static inline void fst_fetch_impl(const fst_record_places *at, const void *impl)
{
    fst_fetch_words(impl, at->storage_in_impl, at->kind + 1);
}

static inline void fst_fetch_storage(const fst_record_places *at, const void *storage)
{
    fst_fetch_words(storage, at->data_in_storage, at->data_in_storage + 2);
}

/* Prefetches the words that tell whether a tensor has changed. */
static inline void fst_record_fetch(const fst_record_layout *layout, const void *impl,
                                    const void *storage)
{
    fst_fetch_impl(&layout->at, impl);
    fst_fetch_storage(&layout->at, storage);
}
