/* param.h - what a step plan remembers of one parameter between steps. */
#pragma once

#include "py/torch/tensor.h"

enum { FST_MAX_KEYS = FST_MAX_STATES + 3 }; /* a step counter, scales, and a master */

/* Bits of fst_param.dtensors; those of the states follow. */
enum { FST_IS_PARAM, FST_IS_GRAD, FST_IS_STATE };

/* A parameter as the last step saw it. Pointers to Python objects are compared and prefetched,
 * never followed. */
typedef struct {
    const PyObject *param;
    Py_ssize_t state_at; /* where PyDict_Next() finds it in optimizer.state */
    int64_t *geometry;   /* shape, then strides */
    int *order;          /* its dimensions in the order of the elements */
    int64_t count;
    int ndim, order_count;
    unsigned dtensors;              /* which of its tensors are DTensors */
    int flat;                       /* contiguous in that order, signs aside */
    const void *dict;               /* its state */
    const void *record;             /* of its shape, inside torch's record of the tensor */
    const void *grad, *grad_record; /* of the step before: the allocator often reuses the address */
    struct {
        const PyObject *object;
        const void *record;
        fst_dl_managed *pin; /* keeps a small tensor alive, by a C++ reference */
    } states[FST_MAX_KEYS];
} fst_param;

/* Pins are C++ references that keep tensors alive. Old ones are freed when no step uses addresses,
 * because freeing a tensor may run finalizers. */
typedef struct {
    fst_dl_managed **pins;
    size_t count, capacity;
} fst_old_pins;

/* Frees the pins, which may be the last references to their tensors. Python code may run. */
void fst_old_pins_free(fst_old_pins *old);

/* Learns a parameter that is new or has changed its shape. Its elements are taken in the order of
 * the shape, or else in that of memory. Returns 0, or -1 with `problem` filled. */
int fst_param_learn(fst_param *param, fst_old_pins *old, PyObject *object, const fst_view *view,
                    int in_shape_order, fst_problem *problem);

void fst_param_forget(fst_param *param, fst_old_pins *old);

/* Whether a tensor has the parameter's shape; its shape and strides; its shape and strides
 * without gaps and without flipped signs. */
int fst_param_has_shape(const fst_param *param, const fst_view *view);
int fst_param_fits(const fst_param *param, const fst_view *view);
int fst_param_is_packed_in(const fst_param *param, const fst_view *view);

/* Remembers the tensor of state `k`, and pins it if it is small. */
void fst_param_note_state(fst_tensors *tensors, fst_param *param, fst_old_pins *old, unsigned k,
                          PyObject *object, const fst_view *view);

/* Prefetches a parameter's records and objects. Between two steps the model evicts them from the
 * cache. */
void fst_param_fetch(const fst_param *param);
