/* factored_bind.h - the tensors of a step of Adafactor. */
#ifndef FST_PY_STEP_FACTORED_BIND_H
#define FST_PY_STEP_FACTORED_BIND_H

#include "cpu/factored.h"
#include "py/module.h"

/* The tensors of a parameter. A vector has its variance in ROW's place. */
enum { FST_OF_PARAM, FST_OF_GRAD, FST_OF_STEP, FST_OF_ROW, FST_OF_COL, FST_OF_COUNT };

/* A parameter with a gradient. */
typedef struct {
    PyObject *objects[FST_OF_COUNT]; /* owned; NULL: absent */
    fst_layout *layouts[2];          /* of the parameter and the gradient; mostly NULL */
    fst_view step;
    Py_ssize_t group, index;
    int has_rows; /* the state has a row, not a variance */
    int is_left;  /* it is for torch */
} fst_factored_entry;

/* The parameters of a step. */
typedef struct {
    fst_factored_entry *entries;
    fst_factored *params; /* what is computed: entry i's at [i] */
    size_t count, capacity;
    Py_ssize_t position; /* of the walk through the states */
} fst_factored_list;

/* Lists the parameters of a group that have a gradient, with their states, which it holds. Runs
 * Python code. *missing becomes 1 if a state is missing. Returns 0, or -1 with a Python error. */
int fst_factored_gather(fst_module *module, fst_factored_list *list, Py_ssize_t group,
                        PyObject *params, PyObject *state, int *missing);

/* Reads and checks all tensors, and marks what is for torch. Returns 0, or -1 with a Python
 * error. */
int fst_factored_bind(fst_module *module, fst_factored_list *list);

/* Marks parameters that share memory as torch's. Returns 0, or -1 with a Python error. */
int fst_factored_part(fst_module *module, fst_factored_list *list);

void fst_factored_free(fst_factored_list *list);

#endif
