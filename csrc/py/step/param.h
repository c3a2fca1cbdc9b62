/* param.h - what a plan remembers of one parameter between steps. */
#ifndef FST_PY_STEP_PARAM_H
#define FST_PY_STEP_PARAM_H

#include "py/torch/tensor.h"

enum { FST_MAX_KEYS = FST_MAX_STATES + 1 };

/* A parameter as it was seen last. Pointers to Python objects are only compared and fetched ahead,
 * never followed. */
typedef struct {
    const PyObject *param;
    Py_ssize_t state_at; /* where PyDict_Next() finds it in optimizer.state */
    int64_t *geometry;   /* shape, then strides */
    int *order;          /* its dimensions in the order of memory */
    int64_t count;
    int ndim, order_count;
    int flat;           /* its elements lie one after another in that order, signs aside */
    const void *dict;   /* its state */
    const void *record; /* where its shape lies: inside torch's record of the tensor */
    const void *grad,
        *grad_record; /* of the step before: the allocator often gives the same again */
    struct {
        const PyObject *object;
        const void *record;
        fst_dl_managed *pin; /* for small tensors */
    } states[FST_MAX_KEYS];
} fst_param;

/* Pins that are given up when no step uses addresses: what then becomes free may have finalizers.
 */
typedef struct {
    fst_dl_managed **pins;
    size_t count, capacity;
} fst_old_pins;

/* Frees them, and with them the last hold of a tensor: Python code may run. */
void fst_old_pins_free(fst_old_pins *old);

/* Learns a parameter that is new or has changed its shape. Returns 0, or -1 with `problem` filled.
 */
int fst_param_learn(fst_param *param, fst_old_pins *old, PyObject *object, const fst_view *view,
                    fst_problem *problem);

void fst_param_forget(fst_param *param, fst_old_pins *old);

/* Whether a tensor has the shape of the parameter; whether it has its strides as well; whether its
 * elements then lie one after another as they are, in the order of the parameter's memory. */
int fst_param_has_shape(const fst_param *param, const fst_view *view);
int fst_param_fits(const fst_param *param, const fst_view *view);
int fst_param_is_packed_in(const fst_param *param, const fst_view *view);

/* Remembers the tensor of state `k`, and pins it if it is small. */
void fst_param_note_state(fst_tensors *tensors, fst_param *param, fst_old_pins *old, unsigned k,
                          PyObject *object, const fst_view *view);

/* Between two steps the model runs and the tensors' records leave the cache: with thousands of
 * small tensors a step is a chase after pointers, so those of a parameter further on are asked for
 * early. */
void fst_param_fetch(const fst_param *param);

#endif
