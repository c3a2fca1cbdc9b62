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
    Py_ssize_t position;      /* of the walk through the states */
    fst_factored_cache known; /* entry i's at [i]; taken from the module for the time of a call */
} fst_factored_list;

/* What was found of a parameter, which holds while torch's records of its tensors hold the same
 * words (tensor_record.h). */
typedef struct fst_factored_known {
    uint64_t hash; /* of parameter and states; 0: nothing is known */
    fst_moving grad;
    fst_factored bound;
    fst_view step;
    int has_rows;
} fst_factored_known;

/* Fills what is computed of a parameter that was bound before. Returns 0 if it or one of its
 * tensors may have changed: then torch has to be asked. */
int fst_factored_follow(const fst_module *module, fst_factored_entry *entry,
                        fst_factored_known *known, fst_factored *f);

/* Remembers what torch has answered. */
void fst_factored_remember(const fst_module *module, const fst_factored_entry *entry,
                           fst_factored_known *known, const fst_view *views, const fst_factored *f);

/* Prefetches what `follow` reads, in two steps, 0 and 1. */
void fst_factored_fetch(const fst_module *module, const fst_factored_entry *entry, int step);

/* Takes what is known from the module, with room for all entries, and gives it back. Without
 * memory nothing is known. */
void fst_factored_take_known(fst_module *module, fst_factored_list *list);
void fst_factored_give_known(fst_module *module, fst_factored_list *list);

/* Frees what the module knows of the last step. */
void fst_factored_forget(fst_module *module);

/* Whether two operands of `count` elements may share memory. */
int fst_factored_share(const fst_operand *one, const fst_operand *other, int64_t count);

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
