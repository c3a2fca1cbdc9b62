/* factored_tiles.h - the tiles of factored.h, by the loops of factored_loops.h, behind which it is
 * included. */

/* Vectors, and matrices of one element: every element has its own states. */
static void FST_T(vector)(const fst_factored *f, int64_t begin, size_t count, double *lanes,
                          int move)
{
    const FST_T(strips) s = FST_T(strips_of)(f, lanes);
    const FST_T(lerp) lerp = FST_T(lerp_of)(f->weight);
    const int is_vector = f->kind == FST_FACTORED_VECTOR;
    REAL q[STRIP] ALIGNED, rows[STRIP] ALIGNED, cols[STRIP] ALIGNED, grads[STRIP] ALIGNED;
    if (is_vector)
        for (size_t i = 0; i < STRIP && i < count; i++)
            q[i] = (REAL)1;
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        REAL *row = FST_T(load)(&f->row, rows, at, n);
        REAL *col = is_vector ? row : FST_T(load)(&f->col, cols, at, n);
        if (move) {
            const REAL *g = FST_T(load)(&f->grad, grads, at, n);
            FST_T(fst_loop_lerp_squares)(n, row, g, lerp);
            FST_T(store)(&f->row, row, at, n);
            FST_T(load)(&f->row, rows, at, n); /* as it is rounded */
            if (!is_vector) {
                FST_T(fst_loop_lerp_squares)(n, col, g, lerp);
                FST_T(store)(&f->col, col, at, n);
                FST_T(load)(&f->col, cols, at, n);
            }
        }
        if (!is_vector)
            FST_T(fst_loop_own_mean)(n, q, row, (REAL)f->floor);
        FST_T(strip)(&s, at, n, q, col);
    }
}

/* Moves the states of narrow matrices. */
static void FST_T(move_narrow)(const fst_factored *f, int64_t first, int64_t last)
{
    const FST_T(lerp) lerp = FST_T(lerp_of)(f->weight);
    const int64_t cols = f->cols, in_strip = STRIP / cols;
    double sums[FST_T(NARROW)] = {0}, row_sums[STRIP];
    REAL scratch[STRIP] ALIGNED, *rows_of = f->rows_of, *cols_of = f->cols_of;
    int64_t left = f->rows; /* rows of the matrix at hand */
    for (int64_t row = first * f->rows; row < last * f->rows; row += in_strip) {
        const int64_t rest = last * f->rows - row, some = rest < in_strip ? rest : in_strip;
        const REAL *g = FST_T(load)(&f->grad, scratch, row * cols, (size_t)(some * cols));
        for (int64_t r = 0; r < some; r++, g += cols) {
            double sum = 0.0;
            for (int64_t j = 0; j < cols; j++) {
                const double x = (double)g[j], square = x * x;
                sum += square;
                sums[j] += square;
            }
            row_sums[r] = sum;
            if (--left)
                continue;
            REAL *col = cols_of + (row + r) / f->rows * cols;
            for (int64_t j = 0; j < cols; j++) {
                col[j] = FST_T(lerped)(col[j], (REAL)(sums[j] / (double)f->rows), lerp);
                sums[j] = 0.0;
            }
            left = f->rows;
        }
        FST_T(fst_loop_lerp_sums)((size_t)some, rows_of + row, row_sums, (double)cols, lerp);
    }
}

/* The updates of narrow matrices. */
static void FST_T(narrow)(const fst_factored *f, int64_t first, int64_t last, double *lanes)
{
    const FST_T(strips) s = FST_T(strips_of)(f, lanes);
    const int64_t cols = f->cols, end = last * f->rows * cols;
    const REAL *row = (const REAL *)f->rows_of + first * f->rows;
    const REAL *col = (const REAL *)f->cols_of + first * cols;
    REAL q[STRIP] ALIGNED, c[STRIP] ALIGNED, mean = FST_T(mean_of)(f, row), value = *row / mean;
    int64_t j = 0, r = 0;
    for (int64_t at = first * f->rows * cols; at < end; at += STRIP) {
        const size_t n = (size_t)(end - at < STRIP ? end - at : STRIP);
        for (size_t i = 0; i < n; i++) {
            if (j == cols) {
                j = 0;
                row++;
                if (++r == f->rows) {
                    r = 0;
                    col += cols;
                    mean = FST_T(mean_of)(f, row);
                }
                value = *row / mean;
            }
            q[i] = value;
            c[i] = col[j++];
        }
        FST_T(strip)(&s, at, n, q, c);
    }
}

/* The part of one matrix that a tile is. */
typedef struct {
    int64_t matrix, row, rows, col, cols;
} FST_T(part);

/* The updates of a part of a wide matrix. */
static void FST_T(wide)(const fst_factored *f, const FST_T(part) *part, REAL mean, double *lanes)
{
    const FST_T(strips) s = FST_T(strips_of)(f, lanes);
    const REAL *rows_of = (const REAL *)f->rows_of + part->matrix * f->rows;
    const REAL *cols_of = (const REAL *)f->cols_of + part->matrix * f->cols;
    const size_t cols = (size_t)part->cols, same = cols < STRIP ? cols : STRIP;
    REAL q[STRIP] ALIGNED;
    for (int64_t r = part->row; r < part->row + part->rows; r++) {
        const REAL value = rows_of[r] / mean;
        const int64_t at = (part->matrix * f->rows + r) * f->cols + part->col;
        for (size_t i = 0; i < same; i++)
            q[i] = value;
        for (size_t done = 0; done < cols; done += STRIP)
            FST_T(strip)(&s, at + (int64_t)done, cols - done < STRIP ? cols - done : STRIP, q,
                         cols_of + part->col + done);
    }
}

/* Adds up the rows and columns of a part. Row r's sum goes to row_sums[r * stride]. */
static void FST_T(sum_part)(const fst_factored *f, const FST_T(part) *part, double *row_sums,
                            int64_t stride, double *col_sums)
{
    double lanes[FST_LANES] ALIGNED;
    REAL scratch[STRIP] ALIGNED;
    const size_t cols = (size_t)part->cols;
    for (size_t j = 0; j < cols; j++)
        col_sums[j] = 0.0;
    for (int64_t r = 0; r < part->rows; r++) {
        const int64_t at = (part->matrix * f->rows + part->row + r) * f->cols + part->col;
        fill_lanes(lanes, cols, FST_NORM_SQUARES);
        for (size_t done = 0; done < cols; done += STRIP) {
            const size_t n = cols - done < STRIP ? cols - done : STRIP;
            FST_T(fst_loop_add_squares)(n, lanes, col_sums + done,
                                        FST_T(load)(&f->grad, scratch, at + (int64_t)done, n));
        }
        row_sums[r * stride] = fold_lanes(lanes, cols, FST_NORM_SQUARES);
    }
}

/* Moves the states of a wide matrix that is one part. */
static void FST_T(move_wide)(const fst_factored *f, int64_t matrix)
{
    const FST_T(lerp) lerp = FST_T(lerp_of)(f->weight);
    double row_sums[STRIP], part_sums[FST_SPLIT_COLUMNS], sums[FST_SPLIT_COLUMNS];
    REAL *rows = (REAL *)f->rows_of + matrix * f->rows;
    REAL *cols = (REAL *)f->cols_of + matrix * f->cols;
    for (int64_t row = 0; row < f->rows; row += STRIP) {
        const int64_t some = f->rows - row < STRIP ? f->rows - row : STRIP;
        const FST_T(part) part = {matrix, row, some, 0, f->cols};
        FST_T(sum_part)(f, &part, row_sums, 1, row ? part_sums : sums);
        for (int64_t j = 0; row && j < f->cols; j++)
            sums[j] += part_sums[j];
        FST_T(fst_loop_lerp_sums)((size_t)some, rows + row, row_sums, (double)f->cols, lerp);
    }
    FST_T(fst_loop_lerp_sums)((size_t)f->cols, cols, sums, (double)f->rows, lerp);
}

/* Matrices [first, last), moved where asked for. */
static void FST_T(matrices)(const fst_factored *f, int64_t first, int64_t last, double *lanes,
                            int move)
{
    const int64_t rows = f->rows, cols = f->cols;
    if (rows * cols == 1) {
        FST_T(vector)(f, first, (size_t)(last - first), lanes, move);
        return;
    }
    if (move) {
        FST_T(read_state)(&f->row, f->rows_of, first * rows, (last - first) * rows);
        FST_T(read_state)(&f->col, f->cols_of, first * cols, (last - first) * cols);
        if (cols < FST_T(NARROW))
            FST_T(move_narrow)(f, first, last);
        else
            for (int64_t matrix = first; matrix < last; matrix++)
                FST_T(move_wide)(f, matrix);
        FST_T(write_state)(&f->row, f->rows_of, first * rows, (last - first) * rows);
        FST_T(write_state)(&f->col, f->cols_of, first * cols, (last - first) * cols);
    }
    if (cols < FST_T(NARROW)) {
        FST_T(narrow)(f, first, last, lanes);
        return;
    }
    for (int64_t matrix = first; matrix < last; matrix++) {
        const FST_T(part) all = {matrix, 0, rows, 0, cols};
        FST_T(wide)(f, &all, FST_T(mean_of)(f, (const REAL *)f->rows_of + matrix * rows), lanes);
    }
}

static FST_T(part) FST_T(part_of)(const fst_factored *f, int64_t tile)
{
    const int64_t col = tile % f->col_tiles * f->tile_cols, rest = tile / f->col_tiles;
    const int64_t row = rest % f->row_tiles * f->tile_rows;
    return (FST_T(part)){
        .matrix = rest / f->row_tiles,
        .row = row,
        .rows = f->rows - row < f->tile_rows ? f->rows - row : f->tile_rows,
        .col = col,
        .cols = f->cols - col < f->tile_cols ? f->cols - col : f->tile_cols,
    };
}

/* The updates of a tile that is not split, with the sum of their squares in lanes or none. */
static void FST_T(unsplit)(const fst_factored *f, int64_t tile, double *lanes, int move)
{
    const int64_t first = tile * f->per_tile, size = f->rows * f->cols;
    const int64_t all = f->kind == FST_FACTORED_VECTOR ? f->count : f->batch;
    const int64_t some = all - first < f->per_tile ? all - first : f->per_tile;
    if (lanes)
        f->param_squares[tile] =
            FST_T(squares)(&f->param, first * size, 1, 0, (size_t)(some * size));
    if (f->kind == FST_FACTORED_VECTOR)
        FST_T(vector)(f, first, (size_t)some, lanes, move);
    else
        FST_T(matrices)(f, first, first + some, lanes, move);
}

static void FST_T(measure_factored)(const fst_factored *f, int64_t tile)
{
    double lanes[FST_LANES] ALIGNED;
    if (f->kind != FST_FACTORED_SPLIT) {
        const size_t reached = f->count < FST_LANES ? (size_t)f->count : FST_LANES;
        fill_lanes(lanes, reached, FST_NORM_SQUARES);
        FST_T(unsplit)(f, tile, lanes, 1);
        f->update_squares[tile] = fold_lanes(lanes, reached, FST_NORM_SQUARES);
        return;
    }
    const FST_T(part) part = FST_T(part_of)(f, tile);
    const int64_t row = part.matrix * f->rows + part.row;
    const int64_t row_tile = tile / f->col_tiles; /* of all matrices */
    FST_T(sum_part)(f, &part, f->row_sums + row * f->col_tiles + tile % f->col_tiles, f->col_tiles,
                    f->col_sums + row_tile * f->cols + part.col);
    f->param_squares[tile] =
        FST_T(squares)(&f->param, row * f->cols + part.col, part.rows, f->cols, (size_t)part.cols);
}

static void FST_T(settle_factored)(const fst_factored *f, int64_t matrix)
{
    const FST_T(lerp) lerp = FST_T(lerp_of)(f->weight);
    const int64_t rows = f->rows, cols = f->cols;
    double *row_sums = f->row_sums + matrix * rows * f->col_tiles;
    double *col_sums = f->col_sums + matrix * f->row_tiles * cols;
    REAL *rows_of = (REAL *)f->rows_of + matrix * rows, *cols_of = f->cols_of;
    cols_of += matrix * cols;
    for (int64_t r = 0; r < rows; r++) {
        double sum = row_sums[r * f->col_tiles];
        for (int64_t k = 1; k < f->col_tiles; k++)
            sum += row_sums[r * f->col_tiles + k];
        row_sums[r] = sum; /* of a row that has been read */
    }
    for (int64_t k = 1; k < f->row_tiles; k++)
        for (int64_t j = 0; j < cols; j++)
            col_sums[j] += col_sums[k * cols + j];
    FST_T(read_state)(&f->row, f->rows_of, matrix * rows, rows);
    FST_T(read_state)(&f->col, f->cols_of, matrix * cols, cols);
    FST_T(fst_loop_lerp_sums)((size_t)rows, rows_of, row_sums, (double)cols, lerp);
    FST_T(fst_loop_lerp_sums)((size_t)cols, cols_of, col_sums, (double)rows, lerp);
    FST_T(write_state)(&f->row, f->rows_of, matrix * rows, rows);
    FST_T(write_state)(&f->col, f->cols_of, matrix * cols, cols);
    f->means[matrix] = (double)FST_T(mean_of)(f, rows_of);
}

static void FST_T(measure_factored_update)(const fst_factored *f, int64_t tile)
{
    double lanes[FST_LANES] ALIGNED;
    const FST_T(part) part = FST_T(part_of)(f, tile);
    fill_lanes(lanes, FST_LANES, FST_NORM_SQUARES);
    FST_T(wide)(f, &part, (REAL)f->means[part.matrix], lanes);
    f->update_squares[tile] = fold_lanes(lanes, FST_LANES, FST_NORM_SQUARES);
}

static void FST_T(write_factored)(const fst_factored *f, int64_t tile)
{
    if (f->kind != FST_FACTORED_SPLIT) {
        FST_T(unsplit)(f, tile, NULL, 0);
        return;
    }
    const FST_T(part) part = FST_T(part_of)(f, tile);
    FST_T(wide)(f, &part, (REAL)f->means[part.matrix], NULL);
}
