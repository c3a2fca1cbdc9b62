/* record.h - recognizes a tensor that is as it was, without a call into torch.
 *
 * Torch keeps what it knows of a tensor in a record of its own: storage, shape, strides, type,
 * device and so on; the storage has a record too, with its address. As long as both hold what they
 * held when torch was asked last, its answer still stands. Python finds out by experiment where
 * those records are and which of their words count (faststep/_records.py); where the experiment
 * fails torch is asked every time. Records are compared, never written. */
#ifndef FST_PY_RECORD_H
#define FST_PY_RECORD_H

#include "py/tensor.h"

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

/* A tensor as it was. */
typedef struct {
    const void *object; /* only compared */
    const void *impl, *storage;
    uint64_t description; /* a hash of the words that describe it */
    uint64_t memory[3];   /* address and owners, in the storage's record */
    uint64_t data;        /* what torch answered */
} fst_record;

/* 1 if it was taken; the view is torch's answer on the object. The layout is known here and below.
 */
int fst_record_take(const fst_record_layout *layout, PyObject *object, const fst_view *view,
                    fst_record *record);

/* Takes no more than which record is the object's; 1 if that is known. */
int fst_record_of(const fst_record_layout *layout, PyObject *object, fst_record *record);
int fst_record_is_of(const fst_record_layout *layout, const fst_record *record, PyObject *object);

/* Whether torch's record, which the caller knows to be alive, still holds what it held. */
int fst_record_is_same(const fst_record_layout *layout, const fst_record *record);

/* Whether the object of the record, which is alive, is still the same tensor in the same memory. */
int fst_record_holds(const fst_record_layout *layout, const fst_record *record);

/* The record of a parameter's gradient: torch's one for none where there is none; NULL if that
 * cannot be said. `param` must hold. */
const void *fst_record_grad(const fst_record_layout *layout, const fst_record *param);

/* Whether the tensor with this record is like the recorded one but for its memory, which the record
 * then follows. Nothing changes where it is not. */
int fst_record_follow(const fst_record_layout *layout, fst_record *record, const void *impl);

/* Asks early for what tells whether the record still holds. */
void fst_record_fetch(const fst_record_layout *layout, const fst_record *record);

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

/* The record of the gradient of an exact torch.Tensor or Parameter; NULL where it never had one. */
const void *fst_record_grad_of(const fst_record_layout *layout, PyObject *object);

/* Asks early for what a later call of fst_record_grad_of and fst_forms_find reads, in four steps
 * that come one after another: 0, 1, 2, 3. */
enum { FST_STEPS_TO_GRAD = 4 };
void fst_record_fetch_grad(const fst_record_layout *layout, PyObject *object, int step);

/* The record of a tensor whose version counter can be moved here; NULL if Python has to do it. */
const void *fst_record_counted(const fst_record_layout *layout, PyObject *object);

/* Moves the version counters of tensors that were written: those with a form, or counted. */
void fst_record_move_versions(const fst_record_layout *layout, const void *const *impls,
                              size_t count);

#endif
