/* tensor_record.h - recognizes a tensor that is as it was, without a call into torch.
 *
 * Torch keeps what it knows of a tensor in a record of its own: storage, shape, strides, type,
 * device and so on; the storage has a record too, with its address. As long as both hold what they
 * held when torch was asked last, its answer still stands. Python finds out by experiment where
 * those records are and which of their words count (faststep/_torch/records.py); where the
 * experiment fails torch is asked every time. Records are compared, not written here (hold.c writes
 * one). */
#ifndef FST_PY_TORCH_TENSOR_RECORD_H
#define FST_PY_TORCH_TENSOR_RECORD_H

#include "py/torch/tensor.h"

/* Torch's own function that moves a tensor's version counter; takes the address of the pointer to
 * its record. */
typedef void (*fst_move_version)(const void *tensor);

enum {
    FST_RECORD_WORDS = 32,
    FST_RECORD_DIMS = 5, /* sizes of more dimensions are not in the record itself */
};

/* Where things are, in words from the beginning of what they are in. */
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

/* Where the records of a tensor are, of which nothing may change. */
typedef struct {
    const void *object, *impl, *storage; /* only compared, and asked for early */
} fst_tensor_record;

/* Notes where a tensor's records are and adds what they hold to a hash over several tensors, which
 * begins at 0; 1 if that can be said. The view is torch's answer on the object. The layout is known
 * here and below. */
int fst_record_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_tensor_record *record, uint64_t *hash);

/* A tensor that may be in other memory, or another tensor that is like it, the next time. */
typedef struct {
    const void *impl, *storage;
    uint64_t description; /* a hash of the words that describe it */
    uint64_t memory[3];   /* address and owners, in the storage's record */
} fst_moving;

/* 1 if it was taken; the view is torch's answer on the object. */
int fst_moving_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_moving *moving);

/* What torch answers on tensors with one description: packed ones in CPU memory, with elements and
 * a version counter. */
typedef struct {
    uint64_t description;
    uint64_t memory[3]; /* of the tensor that torch was asked about: tells who owns the memory */
    int64_t offset;     /* bytes from the storage's address to the first element */
    int64_t count;
    fst_dtype dtype;
} fst_form;

enum { FST_FORMS = 512 }; /* a model has some hundred shapes */

typedef struct {
    fst_form table[FST_FORMS]; /* each in the place that its description gives */
    const void *none;          /* torch's record for no gradient; NULL: not met yet */
} fst_forms;

/* Remembers torch's answer on an object, if it is one that can be remembered. */
void fst_forms_learn(const fst_record_layout *layout, fst_forms *forms, PyObject *object,
                     const fst_view *view);

/* The form of the tensor with this record, which is alive, and its data; NULL if torch has to be
 * asked. */
const fst_form *fst_forms_find(const fst_record_layout *layout, const fst_forms *forms,
                               const void *impl, void **data);

/* Asks early for what a later call of fst_record_grad and fst_forms_find reads, in four steps
 * that come one after another: 0, 1, 2, 3. */
enum { FST_STEPS_TO_GRAD = 4 };
void fst_record_fetch_grad(const fst_record_layout *layout, PyObject *object, int step);

/* The version counter of an object; NULL if it has none or that cannot be said. */
const void *fst_record_counter(const fst_record_layout *layout, PyObject *object);

/* The record of a tensor whose version counter can be moved here; NULL if Python has to do it. */
const void *fst_record_counted(const fst_record_layout *layout, PyObject *object);

/* Moves the version counters of tensors that were written: those with a form, or counted. */
void fst_record_move_versions(const fst_record_layout *layout, const void *const *impls,
                              size_t count);

#endif
