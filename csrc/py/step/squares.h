/* squares.h - sums of squares that were taken of each gradient in backward, for the step. */
#ifndef FST_PY_STEP_SQUARES_H
#define FST_PY_STEP_SQUARES_H

#include "core/plan.h"
#include "py/module.h"

enum { FST_MOST_SQUARES = 1 << 24 };

/* One gradient as it was when it was measured. */
typedef struct {
    PyObject *grad; /* owned: its address is then nobody else's; NULL: not measured */
    const void *data;
    fst_dtype dtype;
    double *partial; /* per chunk of the parameter's span */
    size_t capacity;
    int64_t count, version;
    double inv_scale;
} fst_square;

typedef struct {
    PyObject_HEAD
    fst_square *slots; /* by the place of the parameter among those of all groups */
    size_t slot_count;
    double inv_scale; /* what the next gradients are multiplied by */
} fst_squares_object;

/* The slot, which is made where there is none; NULL with a Python error. Python code may make
 * another one, and then it lies elsewhere. */
fst_square *fst_squares_at(fst_squares_object *self, Py_ssize_t index);

/* Measures `grad`, which is or will be that of `param`, into a slot: 1, or 0 where the step will
 * find the same problem, and say so, or -1 with a Python error. */
int fst_squares_measure(fst_module *module, fst_squares_object *self, Py_ssize_t index,
                        PyObject *param, PyObject *grad);

/* Puts the sums in the place of a measuring pass over operand `operand` of a sealed plan, of whose
 * span i the parameter is at slot_of[i]. Returns 0, changing nothing of use, where a span's
 * operand is not what was measured. */
int fst_squares_fill(const fst_squares_object *self, fst_plan *plan, unsigned operand,
                     const uint32_t *slot_of, double inv_scale);

#endif
