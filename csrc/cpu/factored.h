/* factored.h - a step of Adafactor for one parameter, whose second moments are the product of a row
 * and a column.
 *
 * A parameter is a batch of matrices, or a vector, whose second moments are kept as they are. It is
 * cut into tiles, which run in any order. Partial sums are kept per tile, so the bits are the same
 * for every number of threads. */
#pragma once

#include "base/work.h"

enum {
    FST_TILE = 16384,         /* elements of a tile of whole matrices, or of a vector */
    FST_SPLIT_FROM = 65536,   /* larger matrices are split; also the elements of one's tile */
    FST_SPLIT_COLUMNS = 4096, /* of a tile at most */
    FST_SPLIT_ROWS = 32,      /* of a tile at least: its column sums are some 6 % of its size */
};

typedef enum {
    FST_FACTORED_VECTOR, /* `row` holds a second moment for each element; a tile is FST_TILE */
    FST_FACTORED_WHOLE,  /* a tile is `per_tile` matrices */
    FST_FACTORED_SPLIT,  /* a tile is `tile_rows` x `tile_cols` of one matrix */
} fst_factored_kind;

typedef struct {
    /* The elements are iterated in the order of the shape: batch, rows, columns. */
    fst_operand param, grad;
    fst_operand row, col;             /* states, packed: batch x rows, batch x cols */
    int64_t count, batch, rows, cols; /* of a vector 1, but for the count */

    /* The step. */
    double weight;      /* of the new squares in the moments */
    double decay;       /* factor on the parameter */
    double floor;       /* least mean of a matrix's moments; its square: least moment */
    double least_scale; /* the step is rho times the RMS of the parameter or, if larger, this */
    double rho;         /* negative, but to maximize */
    double threshold;   /* an update of a larger RMS is scaled to this one */
    double size;        /* of the step, known once all tiles are measured */

    /* How it is cut. */
    fst_factored_kind kind;
    int64_t per_tile, tile_rows, tile_cols, row_tiles, col_tiles, tile_count;

    /* Memory of the step. `rows_of` and `cols_of` are the states as REAL: the states themselves, or
     * copies where their type is narrower. */
    void *rows_of, *cols_of;
    double *param_squares, *update_squares; /* one per tile */
    double *row_sums, *col_sums; /* split: batch x rows x col_tiles, batch x row_tiles x cols */
    double *means;               /* split: of each matrix's rows, at least `floor` */
} fst_factored;

/* The functions of one element type. All but `write` leave the parameter as it is. */
typedef struct {
    /* Sums the squares of the parameter's elements of a tile. Moves the tile's states, and sums the
     * squares of its update; where matrices are split, it sums the rows and columns instead. */
    void (*measure)(const fst_factored *f, int64_t tile);
    /* Split: moves the states of a matrix; then sums the squares of the update of a tile. */
    void (*settle)(const fst_factored *f, int64_t matrix);
    void (*measure_update)(const fst_factored *f, int64_t tile);
    void (*write)(const fst_factored *f, int64_t tile);
} fst_factored_loops;
