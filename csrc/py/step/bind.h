/* bind.h - a bind in progress, shared by bind.c, bound.c and states.c. */
#pragma once

#include "py/step/trace.h"
#include "py/torch/arrays.h"

typedef struct {
    fst_module *module;
    fst_step_plan *self;
    fst_step_part *part; /* of the parameter at hand */
    PyObject *state, *missing, *fresh;
    Py_ssize_t fresh_at;
    Py_ssize_t group, index; /* of the parameter at hand */
    fst_shard shard;         /* of the parameter at hand */
    fst_trace *trace;        /* of the parameter at hand; NULL: none */
    const void *counter;     /* version counter of the state that was listed last */
    int write_grads, rescanned;
    int ran_python; /* Python code ran while an earlier parameter was bound: its addresses may be
                       stale */
    int again; /* the attempt, from 0: from the second on the objects that the first found are bound
                  again */
    size_t held_at; /* from the second attempt on: the place of the next of these objects in
                       self->held */
    size_t param_count;
} fst_binding;

/* fst_step_raise() for the parameter at hand. */
int fst_bind_problem(const fst_binding *at, const char *role, const fst_problem *problem);

/* An address some elements before an array, where another array would begin whose part it is. */
static inline void *fst_moved_back(void *data, int64_t elements, size_t size)
{
    return (void *)((uintptr_t)data - (uintptr_t)elements * size);
}

/* Reads a tuple of so many ints, which runs no Python code. Returns 0, or -1 with a Python error
 * (bound.c). */
int fst_bind_ints(PyObject *tuple, int64_t *out, Py_ssize_t count);

/* Finds what the parameter at hand is of a whole one. Returns 0, or -1 with a Python error
 * (bound.c). */
int fst_bind_shard(fst_binding *at, const fst_param *param, PyObject *object);

/* Keeps a reference, which it takes over, to the end of the step. Returns the object, or NULL
 * with a Python error. */
PyObject *fst_bind_hold(fst_step_plan *self, PyObject *object);

/* Raises the error that parameters were changed during the step. */
void fst_bind_raise_changed(const fst_binding *at);

/* The next of the objects that the first attempt found for the parameter at hand, borrowed; NULL
 * with a Python error if it found no more (bound.c). */
PyObject *fst_bind_found(fst_binding *at);

/* Ends the objects of the parameter at hand: in the first attempt by a NULL behind them, which
 * later attempts go on after. Returns 0, or -1 with a Python error. */
int fst_bind_end_found(fst_binding *at);

/* Replaces a DTensor by its local tensor, which the step holds. `which` is its bit in
 * `param->dtensors` (dtensors.c). Returns 0, or -1 with a Python error. */
int fst_bind_local(fst_binding *at, fst_param *param, unsigned which, PyObject **object);

/* Lists a tensor that the step writes. Returns 0, or -1 with a Python error. */
int fst_bind_written(fst_step_plan *self, PyObject *object);

/* Appends to an array of borrowed references. Returns 0, or -1 with a Python error. */
int fst_bind_note(PyObject ***array, size_t *count, size_t *capacity, PyObject *object);

/* Makes an operand of a tensor that must have the parameter's shape and device. */
int fst_bind_operand(const fst_binding *at, const fst_param *param, const char *role,
                     const fst_view *view, int written, fst_operand *op);

/* Binds the states of the parameter at hand (states.c). Returns 1 if all are there, 0 if one is
 * missing, FST_UNSETTLED if Python has to look at one, which may be divided in another way than the
 * parameter, -1 with a Python error. */
enum { FST_UNSETTLED = 2 };
int fst_bind_states(fst_binding *at, fst_param *param, PyObject *object, fst_dtype of_param,
                    fst_operand *ops, fst_counter *counter);

/* The same for Adafactor (factored_states.c), where FST_UNSETTLED is for torch's operators. */
int fst_factored_bind_states(fst_binding *at, fst_param *param, PyObject *object, fst_dtype dtype,
                             fst_counter *counter);

/* Parts of the two (states.c). The state dictionary of a parameter, which the step holds, or NULL:
 */
PyObject *fst_state_of(fst_binding *at, const fst_param *param, PyObject *object);

/* A state by name, which the step holds, or NULL. Where it is the next entry of the dictionary, as
 * usual, *key becomes its key, borrowed; else NULL. */
PyObject *fst_state_find(fst_binding *at, PyObject *state, Py_ssize_t *position, PyObject *wanted,
                         PyObject **key);

/* fst_bind_problem() for the state of that name. */
int fst_state_refuse(const fst_binding *at, PyObject *name, const fst_problem *problem);

/* Refuses to write a state that was made in inference mode outside of it. Returns 0, or -1 with a
 * Python error. */
int fst_state_check_inference(const fst_binding *at, PyObject *name, PyObject *object);

/* Traces state `k` of the parameter at hand, entry `k` of its dictionary. `value` is the local
 * tensor of `whole`, which may be a DTensor. */
void fst_state_trace(const fst_binding *at, const fst_param *param, unsigned k, const PyObject *key,
                     PyObject *whole, PyObject *value, const fst_view *view);

/* Lists a state that the step writes. Neighbouring small states share a version counter, which
 * moves once. */
int fst_state_written(fst_binding *at, PyObject *value, PyObject *whole);
