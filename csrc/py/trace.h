/* trace.h - what tells that a step is like the one before. */
#ifndef FST_PY_TRACE_H
#define FST_PY_TRACE_H

#include "py/plan.h"

/* A parameter of a traced step. */
struct fst_trace {
    fst_record param, grad, states[FST_MAX_KEYS];
    const PyObject *keys[FST_MAX_KEYS];
    PyObject *dict;      /* its state; borrowed, and used only where it was found again */
    Py_ssize_t state_at; /* where PyDict_Next() finds it in optimizer.state */
    const void *no_grad; /* what stands for no gradient, where it had none */
    int has_grad, share;
    int64_t span; /* -1: it has no elements */
};

/* Around a bind: makes room for the traces; keeps them if all of it could be traced. */
void fst_trace_begin(const fst_record_layout *layout, fst_plan_object *self);
void fst_trace_end(fst_plan_object *self, PyObject *param_lists);

/* A parameter without a gradient. */
void fst_trace_idle(const fst_record_layout *layout, fst_plan_object *self, size_t index,
                    PyObject *object);

void fst_trace_forget(fst_plan_object *self);
void fst_trace_free(fst_plan_object *self);

/* Whether what is bound still stands; gradients in other memory are followed. */
int fst_trace_holds(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                    PyObject *state);

#endif
