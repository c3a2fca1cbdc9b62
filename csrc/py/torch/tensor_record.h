/* tensor_record.h - tells that a tensor has not changed without calling torch.
 *
 * Torch keeps a record of each tensor (its TensorImpl): storage, shape, strides, dtype, device
 * and so on. The storage has a record too, with the memory's address. As long as both records
 * hold the same words, torch's last answer about the tensor is still right.
 * faststep/_torch/records.py finds by experiment where the records are and which words count;
 * where the experiment fails, torch is asked every time. Only hold.c writes to a record. */
#pragma once

#include "py/torch/tensor.h"

/* Torch's function that increments a tensor's version counter. Takes the address of a pointer to
 * the record. */
typedef void (*fst_move_version)(const void *tensor);

enum {
    FST_RECORD_WORDS = 32,
    FST_RECORD_DIMS = 5, /* sizes of more dimensions are not in the record itself */
};

/* Offsets in words of 8 bytes. */
typedef struct {
    int impl_in_object;  /* the tensor's record, in the Python object */
    int storage_in_impl; /* the storage's record */
    int data_in_storage; /* the memory's address; two words that own the memory follow */
    int meta_in_impl;    /* what autograd knows */
    int grad_in_meta;    /* the record of the gradient */
    int counter_in_impl; /* the version counter */
    int ndim, sizes, strides, offset, numel;
    int kind; /* type, device and kind of tensor: this word and the next one, under masks */
} fst_record_places;

typedef struct {
    int known;
    fst_record_places at;
    uint64_t masks[2];
    uint64_t countable;    /* bits of the word after `kind` of a tensor with a version counter */
    fst_move_version move; /* NULL: Python has to do it */
    uint64_t factors[FST_RECORD_WORDS]; /* of the hash */
} fst_record_layout;

/* Makes the layout ready for use; places and masks are set. */
void fst_record_init(fst_record_layout *layout);

/* A tensor whose records must not change. */
typedef struct {
    const void *object, *impl, *storage; /* compared and prefetched, never followed */
} fst_tensor_record;

/* Remembers a tensor's records, and adds their words to a hash that covers several tensors and
 * begins at 0. `view` is torch's answer on the object. Returns 0 where the tensor has no usable
 * record. This function and those below need a known layout. */
int fst_record_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_tensor_record *record, uint64_t *hash);

/* A tensor whose memory may change, or that may be replaced by one like it, as a gradient is. */
typedef struct {
    const void *impl, *storage;
    uint64_t description; /* a hash of the words that describe it */
    uint64_t memory[3];   /* address and owners, in the storage's record */
} fst_moving;

/* Remembers such a tensor. Returns 1, or 0 where it has no usable record. `view` is torch's
 * answer on the object. */
int fst_moving_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_moving *moving);

/* Torch's answer for all tensors with the same description: contiguous, in CPU memory, with
 * elements and a version counter. */
typedef struct {
    uint64_t description;
    uint64_t memory[3]; /* of the tensor that torch was asked about: tells who owns the memory */
    int64_t offset;     /* bytes from the storage's address to the first element */
    int64_t count;
    fst_dtype dtype;
} fst_form;

enum { FST_FORMS = 512 }; /* a model has some hundred shapes */

typedef struct {
    fst_form table[FST_FORMS]; /* indexed by a hash of the description */
    const void *none;          /* what stands where a tensor has no gradient; NULL: not known yet */
} fst_forms;

/* Remembers torch's answer about a tensor, where it is of the kind that fst_form describes. */
void fst_forms_learn(const fst_record_layout *layout, fst_forms *forms, PyObject *object,
                     const fst_view *view);

/* The form of a live tensor with this record, and the address of its data. NULL if torch has to
 * be asked. */
const fst_form *fst_forms_find(const fst_record_layout *layout, const fst_forms *forms,
                               const void *impl, void **data);

/* Prefetches what a later call of fst_record_grad and fst_forms_find reads. The four steps, 0 to
 * 3, each need the cache lines of the step before. */
enum { FST_STEPS_TO_GRAD = 4 };
void fst_record_fetch_grad(const fst_record_layout *layout, PyObject *object, int step);

/* The address of a tensor's version counter. NULL if it has none, or if that is not known. */
const void *fst_record_counter(const fst_record_layout *layout, PyObject *object);

/* The record of a tensor whose version counter can be moved from C. NULL if Python has to do it. */
const void *fst_record_counted(const fst_record_layout *layout, PyObject *object);

/* Whether the version counter of the tensor with this record can be moved from C. */
int fst_record_counts(const fst_record_layout *layout, const void *impl);

/* Moves the version counters of tensors that were written. The records are those of forms or of
 * fst_record_counted. */
void fst_record_move_versions(const fst_record_layout *layout, const void *const *impls,
                              size_t count);
