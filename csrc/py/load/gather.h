/* gather.h - the types Slots and Gather, for the files that implement them. */
#pragma once

#include "io/batcher.h"
#include "py/load/arguments.h"

enum { FST_MAX_ROW_DIMS = 63 }; /* torch's limit for tensors is 64 */

typedef struct {
    PyObject_HEAD
    fst_slots *pool;
} fst_slots_object;

/* The dtype and row shape of one field of a batch. */
typedef struct {
    fst_dl_dtype dtype;
    int row_dims;
    int64_t row_shape[FST_MAX_ROW_DIMS];
} fst_field_form;

/* A source tensor with its address and form as they were when Gather was made (watch.c). */
typedef struct fst_watch fst_watch;

typedef struct {
    PyObject_HEAD
    fst_slots_object *slots;
    PyObject *owner; /* keeps the arrays alive */
    fst_table table;
    fst_field_form *forms; /* one per field */
    fst_watch **watches;   /* one per node and field; NULL: cannot move */
    size_t next_look;      /* the node that was checked last */
    size_t moves;          /* fst_hold_moves() when all were checked last */
    fst_batcher *batcher;
} fst_gather_object;

/* A tensor over a slot. The slot returns to its pool when the last tensor over its memory is
 * freed. Without strides the tensor is contiguous. Takes the slot over in any case. */
PyObject *fst_slot_tensor(const fst_module *state, fst_dl_dtype dtype, int ndim, int64_t *shape,
                          int64_t *strides, fst_slot *slot);

/* Remembers the address and form of a torch.Tensor; NULL with a Python error. */
fst_watch *fst_watch_new(const fst_module *state, PyObject *object);
void fst_watch_free(fst_watch *watch);

/* How often torch has moved held memory or freed its storage (hold.c). */
size_t fst_hold_moves(void);

/* Whether the source tensors are unchanged. Most changes move held memory, and then all tensors
 * are checked; otherwise a few leaves per call, in turn. */
int fst_gather_is_same(const fst_module *state, fst_gather_object *self);

/* Parses the arguments `fields` and `nodes` of Gather, both tuples. Returns 0, or -1 with a
 * Python error. */
int fst_gather_parse(const fst_module *state, fst_gather_object *self, PyObject *fields,
                     PyObject *nodes);
/* Reads the addresses of a tuple of contiguous tensors, one per field, that each fit a batch of
 * `rows` exactly. Returns 0, or -1 with a Python error. */
int fst_gather_read_outputs(const fst_module *state, const fst_gather_object *self,
                            PyObject *outputs, Py_ssize_t rows, char **addresses);

void fst_gather_forget(fst_gather_object *self);
