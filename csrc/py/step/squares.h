/* squares.h - sums of squares of gradients, measured in backward and used by the step. */
#ifndef FST_PY_STEP_SQUARES_H
#define FST_PY_STEP_SQUARES_H

#include "core/plan.h"
#include "py/module.h"

enum { FST_MOST_SQUARES = 1 << 24 };

/* The sums of one gradient, and what identifies the gradient. */
typedef struct {
    PyObject *grad; /* owned, so that no other tensor gets its address; NULL: not measured */
    const void *data;
    fst_dtype dtype;
    double *partial; /* per chunk of the parameter's span */
    size_t capacity;
    int64_t count, version;
    double inv_scale;
} fst_square;

typedef struct {
    PyObject_HEAD
    fst_square *slots; /* by the index of the parameter among those of all groups */
    size_t slot_count;
    double inv_scale; /* factor for the gradients that are measured next */
} fst_squares_object;

/* The slot of a parameter, which is made if needed; NULL with a Python error. Slots move when
 * Python code makes another one. */
fst_square *fst_squares_at(fst_squares_object *self, Py_ssize_t index);

/* Measures `grad`, which is or will be the gradient of `param`, into a slot. Returns 1; 0 where
 * the step will find and report the same problem; -1 with a Python error. */
int fst_squares_measure(fst_module *module, fst_squares_object *self, Py_ssize_t index,
                        PyObject *param, PyObject *grad);

/* Fills the partial sums of operand `operand` of a sealed plan, as a measuring pass would. Span
 * i belongs to the parameter of slot_of[i]. Returns 0, without a usable result, where an operand
 * is not the gradient that was measured. */
int fst_squares_fill(const fst_squares_object *self, fst_plan *plan, unsigned operand,
                     const uint32_t *slot_of, double inv_scale);

#endif
