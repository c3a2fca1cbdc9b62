/* table.h - rows in arrays: finds the sample of an index and copies it into a batch.
 *
 * A table is a tree of nodes. A leaf has rows, with one column per field; all leaves have the
 * same fields. Other nodes choose among another node's samples, or join several nodes one after
 * another. */
#pragma once

#include <stdint.h>

#include "base/widen.h"

typedef struct {
    size_t items; /* of a row */
    fst_conversion conversion;
    uint32_t boundary; /* the token between documents */
    int begins;        /* it is the first token of a document, not the last */
    fst_float_form floats;
} fst_field;

typedef struct {
    const char *data;
    int64_t stride; /* bytes from row to row; 0 and less than none are allowed */
} fst_column;

typedef enum { FST_ROWS, FST_CHOSEN, FST_JOINED } fst_node_kind;

typedef struct {
    fst_node_kind kind;
    int64_t length;        /* samples */
    fst_column *columns;   /* FST_ROWS: one per field */
    size_t child;          /* FST_CHOSEN: of which node */
    const int64_t *chosen; /* which samples; NULL: start, start + step and so on */
    int64_t start, step;
    size_t *children; /* FST_JOINED */
    int64_t *ends;    /* sums of the children's lengths */
    size_t child_count;
} fst_node;

typedef struct {
    fst_field *fields;
    size_t field_count;
    fst_node *nodes; /* children before their parents; the last is the root */
    size_t node_count;
} fst_table;

/* Where a sample lies: a row of a leaf. */
typedef struct {
    const fst_node *leaf;
    int64_t row;
} fst_place;

/* Chooses the conversion loops once, at start-up. */
void fst_table_use(const fst_widen_loops *loops);

size_t fst_field_row_bytes(const fst_field *field); /* of a batch */

/* Bytes of a sample in a batch, over all fields. */
size_t fst_table_row_bytes(const fst_table *table);

/* Finds the sample of an index. Negative indices count from the end, at each level. Returns 0,
 * or -1 if there is no such sample. */
int fst_table_find(const fst_table *table, int64_t index, fst_place *place);

/* Copies the samples places[begin..end) to the same rows of the fields' outputs; with
 * `stream` by non-temporal stores. */
void fst_table_copy(const fst_table *table, const fst_place *places, size_t begin, size_t end,
                    char *const *outputs, int stream);
