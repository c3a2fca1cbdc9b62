/* Steps of Adafactor: against the formula in double, and the same bits on every level. */
#include "common.h"

#include "core/factored_step.h"

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

typedef struct {
    int64_t batch, rows, cols;
    int is_vector;
} shape;

/* The tensors of one parameter. */
typedef struct {
    array *param, *grad, *row, *col;
} tensors;

static const double weight = 0.4, decay = 0.999, rho = -0.01, least = 1e-3, threshold = 0.5;
static const double least_moment = 1e-2;

static tensors tensors_new(fst_dtype dtype, arrangement how, const shape *s)
{
    const int64_t count = s->batch * s->rows * s->cols;
    tensors t = {array_new(dtype, how, count), array_new(dtype, how, count),
                 array_new(dtype, FLAT, s->is_vector ? count : s->batch * s->rows),
                 array_new(dtype, FLAT, s->batch * s->cols)};
    array_fill(t.param, random_unit);
    array_fill(t.grad, random_unit);
    array_fill(t.row, random_positive);
    array_fill(t.col, random_positive);
    for (int64_t i = 0; i < t.row->count; i++)
        set(&t.row->op, i, 0.1 + 0.01 * (double)(i % 7));
    for (int64_t i = 0; i < t.col->count; i++)
        set(&t.col->op, i, 0.2 + 0.01 * (double)(i % 5));
    return t;
}

static tensors tensors_clone(const tensors *t)
{
    return (tensors){array_clone(t->param), array_clone(t->grad), array_clone(t->row),
                     array_clone(t->col)};
}

static void tensors_free(tensors *t)
{
    array_free(t->param);
    array_free(t->grad);
    array_free(t->row);
    array_free(t->col);
}

static fst_factored factored_of(const tensors *t, const shape *s)
{
    return (fst_factored){
        .param = t->param->op,
        .grad = t->grad->op,
        .row = t->row->op,
        .col = t->col->op,
        .count = s->batch * s->rows * s->cols,
        .batch = s->batch,
        .rows = s->rows,
        .cols = s->is_vector ? 1 : s->cols,
        .kind = s->is_vector ? FST_FACTORED_VECTOR : FST_FACTORED_WHOLE,
        .weight = weight,
        .decay = decay,
        .floor = least_moment,
        .least_scale = least,
        .rho = rho,
        .threshold = threshold,
    };
}

/* The mean of the squares of `count` elements that lie `stride` apart. */
static double mean_square(const fst_operand *op, int64_t first, int64_t count, int64_t stride)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++)
        sum += get(op, first + i * stride) * get(op, first + i * stride);
    return sum / (double)count;
}

static void move(const fst_operand *state, int64_t at, double mean)
{
    set(state, at, get(state, at) + weight * (mean - get(state, at)));
}

static void expected_states(const tensors *t, const shape *s)
{
    const fst_operand *grad = &t->grad->op;
    const int64_t size = s->rows * s->cols;
    for (int64_t i = 0; s->is_vector && i < s->cols; i++)
        move(&t->row->op, i, mean_square(grad, i, 1, 1));
    for (int64_t b = 0; !s->is_vector && b < s->batch; b++) {
        for (int64_t r = 0; r < s->rows; r++)
            move(&t->row->op, b * s->rows + r,
                 mean_square(grad, b * size + r * s->cols, s->cols, 1));
        for (int64_t c = 0; c < s->cols; c++)
            move(&t->col->op, b * s->cols + c, mean_square(grad, b * size + c, s->rows, s->cols));
    }
}

static double mean_of_rows(const tensors *t, const shape *s, int64_t matrix)
{
    double sum = 0.0;
    for (int64_t r = 0; r < s->rows; r++)
        sum += get(&t->row->op, matrix * s->rows + r);
    return fmax(sum / (double)s->rows, least_moment);
}

/* The update of element i, before it is scaled; `mean` is that of its matrix's rows. */
static double expected_update(const tensors *t, const shape *s, int64_t i, double mean)
{
    double moment = get(&t->row->op, s->is_vector ? i : i / s->cols);
    if (!s->is_vector) {
        const int64_t matrix = i / (s->rows * s->cols);
        moment *= get(&t->col->op, matrix * s->cols + i % s->cols) / mean;
    }
    return get(&t->grad->op, i) / sqrt(fmax(moment, least_moment * least_moment));
}

static void expected_step(const tensors *t, const shape *s)
{
    const int64_t count = s->batch * s->rows * s->cols;
    const double alpha = fmax(least, sqrt(mean_square(&t->param->op, 0, count, 1))) * rho;
    double *updates = must_alloc((size_t)count * sizeof *updates), sum = 0.0, mean = 1.0;
    expected_states(t, s);
    for (int64_t i = 0; i < count; i++) {
        if (!s->is_vector && i % (s->rows * s->cols) == 0)
            mean = mean_of_rows(t, s, i / (s->rows * s->cols));
        updates[i] = expected_update(t, s, i, mean);
        sum += updates[i] * updates[i];
    }
    const double size = alpha / fmax(1.0, sqrt(sum / (double)count) / threshold);
    for (int64_t i = 0; i < count; i++)
        set(&t->param->op, i, get(&t->param->op, i) * decay + size * updates[i]);
    free(updates);
}

static void near(const array *got, const array *want, double tolerance)
{
    int all = 1;
    for (int64_t i = 0; i < got->count; i++)
        all &= fabs(get(&got->op, i) - get(&want->op, i)) <= tolerance;
    CHECK(all);
}

/* Some parameters in one call, as they share its memory and its waves. */
static void steps_agree(fst_dtype dtype, arrangement how, const shape *shapes, size_t count)
{
    const double tolerance = dtype == FST_F64 ? 1e-13 : dtype == FST_F32 ? 1e-5 : 2e-2;
    tensors *given = must_alloc(count * sizeof *given), *first = must_alloc(count * sizeof *first);
    fst_factored *params = must_alloc(count * sizeof *params);
    fst_status status = {0};
    for (size_t i = 0; i < count; i++)
        given[i] = tensors_new(dtype, how, &shapes[i]);
    for (size_t level = 0; level < level_count; level++) {
        tensors *now = must_alloc(count * sizeof *now);
        fst_cpu = levels[level];
        for (size_t i = 0; i < count; i++) {
            now[i] = tensors_clone(&given[i]);
            params[i] = factored_of(&now[i], &shapes[i]);
        }
        CHECK_INT(fst_factored_step(params, count, &status), FST_OK);
        for (size_t i = 0; i < count; i++) {
            if (level == 0) {
                first[i] = now[i];
                continue;
            }
            CHECK(same_memory(now[i].param, first[i].param));
            CHECK(same_memory(now[i].grad, given[i].grad));
            CHECK(same_memory(now[i].row, first[i].row));
            CHECK(same_memory(now[i].col, first[i].col));
            tensors_free(&now[i]);
        }
        free(now);
    }
    for (size_t i = 0; i < count; i++) {
        expected_step(&given[i], &shapes[i]);
        near(first[i].param, given[i].param, tolerance);
        near(first[i].row, given[i].row, tolerance);
        near(first[i].col, given[i].col, tolerance);
        tensors_free(&given[i]);
        tensors_free(&first[i]);
    }
    free(given);
    free(first);
    free(params);
}

int main(void)
{
    static const shape small[] = {
        {1, 1, 1, 1},    {1, 1, 300, 1}, {1, 1, 20000, 1}, {1, 1, 1, 0},    {300, 1, 1, 0},
        {1, 5, 1, 0},    {1, 1, 9, 0},   {50, 3, 3, 0},    {2, 7, 63, 0},   {3, 2, 64, 0},
        {1, 300, 65, 0}, {2, 3, 700, 0}, {1, 2000, 3, 0},  {2000, 3, 2, 0},
    };
    static const shape split[] = {
        {1, 70, 1000, 0},
        {1, 3, 9000, 0},
        {2, 34000, 2, 0},
        {1, 1, 70000, 0},
    };
    level_count = supported_levels(levels);
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (int how = FLAT; how < TRANSPOSED; how++) {
            steps_agree((fst_dtype)dtype, (arrangement)how, small, sizeof small / sizeof *small);
            steps_agree((fst_dtype)dtype, (arrangement)how, small + 5, 1);
        }
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        steps_agree((fst_dtype)dtype, FLAT, split, sizeof split / sizeof *split);
    return check_report();
}
