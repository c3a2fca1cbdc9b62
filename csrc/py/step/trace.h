/* trace.h - what tells that a step is like the one before. */
#pragma once

#include "py/step/step_plan.h"

/* A state of a parameter of a traced step: an entry of its dictionary. */
struct fst_traced_state {
    const PyObject *key;
    fst_tensor_record value;
};

/* A parameter of a traced step. One hash covers the records of the parameter and its states, as
 * thousands of traces are read per step. */
struct fst_trace {
    fst_tensor_record param;
    const void
        *type; /* of the parameter's object, as a script may give it a class with its own `grad` */
    uint64_t hash;
    fst_moving grad;  /* without a gradient, only `impl`: torch's record for none */
    const void *meta; /* prefetched, like `entries` */
    PyObject *dict;   /* its state; borrowed, and used only once it has been found again */
    const void *entries;
    Py_ssize_t state_at; /* where PyDict_Next() finds it in optimizer.state */
    uint32_t states;     /* the first of them */
    int32_t span;        /* -1: it has no elements */
    int16_t part;
    uint8_t has_grad;
    uint8_t key_count;  /* states */
    uint8_t is_dtensor; /* `param` and `grad` are its local tensors; see fst_traced_dtensors */
    uint8_t pinned;     /* its states are pinned, so their records live as long as the pins */
};

/* The DTensors of a traced parameter, whose local tensors are traced. Pointers are compared, never
 * followed. */
struct fst_traced_dtensors {
    const void *object, *impl; /* the parameter */
    struct {
        const void *object, *impl; /* NULL: the state is a plain tensor */
    } states[FST_MAX_KEYS];
};

/* Begin and end tracing a bind. The trace is kept if everything could be traced. */
void fst_trace_begin(const fst_record_layout *layout, fst_step_plan *self, int again);
void fst_trace_end(const fst_record_layout *layout, fst_step_plan *self, int write_grads);

/* Trace parameter `index`, with a gradient or without. The first returns the trace, to which the
 * states are added in their order, or NULL if the step is not traced. */
fst_trace *fst_trace_param(const fst_record_layout *layout, fst_step_plan *self, size_t index,
                           PyObject *object, const fst_view *view, PyObject *grad,
                           const fst_view *grad_view);
void fst_trace_idle(const fst_record_layout *layout, fst_step_plan *self, size_t index,
                    PyObject *object);
void fst_trace_dict(fst_trace *trace, PyObject *dict, Py_ssize_t state_at, unsigned key_count);
void fst_trace_state(const fst_record_layout *layout, fst_step_plan *self, fst_trace *trace,
                     const PyObject *key, PyObject *value, const fst_view *view, int pinned);

void fst_trace_free(fst_step_plan *self);

/* Trace that parameter `index` is a DTensor, and so is a state of it (trace_dtensors.c). */
void fst_trace_dtensor(const fst_record_layout *layout, fst_step_plan *self, fst_trace *trace,
                       size_t index, PyObject *object);
void fst_trace_dtensor_state(const fst_record_layout *layout, fst_step_plan *self,
                             const fst_trace *trace, unsigned k, PyObject *object);

/* Prefetches the objects of a parameter that was traced as a DTensor. */
void fst_trace_fetch_dtensors(const fst_step_plan *self, const fst_trace *trace,
                              unsigned key_count);

/* Whether a parameter that was traced as a DTensor is still the same: its local tensor becomes
 * *object, and that of its gradient *grad, both borrowed. The gradient may be another one that is
 * divided in the same way. */
int fst_trace_same_dtensor(fst_module *module, const fst_step_plan *self, const fst_trace *trace,
                           PyObject **object, PyObject **grad);

/* The local tensor of a state, borrowed; the state itself where it was no DTensor; NULL if it is
 * another one than was traced. */
PyObject *fst_trace_same_state(const fst_module *module, const fst_step_plan *self,
                               const fst_trace *trace, unsigned k, PyObject *object);

/* Whether what is bound is still valid. Follows gradients to other memory. */
int fst_trace_follow(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                     PyObject *state, int write_grads);

/* Holds all tensors of a step that is followed until its end, as a long step releases the GIL.
 * Returns 1, 0 if Python code has run, so that all has to be bound anew, -1 with a Python error. */
int fst_trace_hold(fst_module *module, fst_step_plan *self, PyObject *param_lists);

/* Moves the version counters of the gradients, where a step that writes them is traced. */
void fst_trace_move_grads(const fst_record_layout *layout, const fst_step_plan *self);
