/* gather.h - what the files of the types Slots and Gather share. */
#ifndef FST_PY_LOAD_GATHER_H
#define FST_PY_LOAD_GATHER_H

#include "io/crew.h"
#include "py/load/arguments.h"

enum { FST_MAX_ROW_DIMS = 63 }; /* torch's limit for tensors is 64 */

typedef struct {
    PyObject_HEAD
    fst_slots *pool;
} fst_slots_object;

/* What a tensor of one field of a batch looks like. */
typedef struct {
    fst_dl_dtype dtype;
    int row_dims;
    int64_t row_shape[FST_MAX_ROW_DIMS];
} fst_field_form;

/* A tensor as it was when it was noted (watch.c). */
typedef struct fst_watch fst_watch;

typedef struct {
    PyObject_HEAD
    fst_slots_object *slots;
    PyObject *owner; /* keeps what the table points to */
    const fst_dl_api *api;
    fst_table table;
    fst_field_form *forms; /* one per field */
    fst_watch **watches;   /* per node one per field; NULL: what cannot move */
    size_t next_look;      /* the node that was looked at last */
    size_t moves;          /* of held memory, when all were looked at */
    fst_crew *crew;        /* NULL when closed */
    PyObject *outputs;     /* a list: for each batch in the crew a tuple of tensors, or None */
    int busy;              /* a thread is in a method that let go of the GIL */
} fst_gather_object;

/* A tensor over a slot, which goes back to its pool when the last tensor over the same memory is
 * freed; without strides its elements lie one after another. Takes the slot over, in any case. */
PyObject *fst_slot_tensor(const fst_dl_api *api, fst_dl_dtype dtype, int ndim, const int64_t *shape,
                          const int64_t *strides, fst_slot *slot);

/* Notes where a torch.Tensor is and what form it has; NULL with a Python error. */
fst_watch *fst_watch_new(const fst_module *state, const fst_dl_api *api, PyObject *object);
void fst_watch_free(fst_watch *watch);

/* How often held memory was moved by torch, or its storage ended (hold.c). */
size_t fst_hold_moves(void);

/* Whether the tensors are as they were when they were noted. All are looked at after held memory
 * has moved; else at most some leaves, in turn, as most changes move it. */
int fst_gather_is_same(const fst_module *state, fst_gather_object *self);

/* Reads the arguments `fields` and `nodes` of Gather, both tuples; 0, or -1 with a Python error. */
int fst_gather_parse(const fst_module *state, fst_gather_object *self, PyObject *fields,
                     PyObject *nodes);
/* The addresses of a tuple of packed tensors, one per field, that a batch of `rows` fits exactly;
 * 0, or -1 with a Python error. */
int fst_gather_read_outputs(const fst_module *state, const fst_gather_object *self,
                            PyObject *outputs, Py_ssize_t rows, char **addresses);

void fst_gather_forget(fst_gather_object *self);

#endif
