#include "core/factored_step.h"

#include <math.h>
#include <stdlib.h>

#include "cpu/parallel.h"

enum {
    WAVE = 1 << 20,  /* elements that go through all stages together, while the caches hold them */
    UNIT = 16384,    /* elements that a thread takes at a time */
    ITEM_COST = 64,  /* of a tile beside its elements, in elements */
    GRAIN = 1 << 16, /* elements of a stage that are worth another thread */
    ALONE = 1 << 18, /* up to so many in all, a step runs on the calling thread (job.c says why) */
    AHEAD = 2,       /* small parameters to prefetch */
};

static int64_t parts(int64_t count, int64_t size)
{
    return (count + size - 1) / size;
}

static int64_t at_least(int64_t count, int64_t least)
{
    return count < least ? least : count;
}

/* Cuts a parameter into tiles, by its shape alone. */
static void cut(fst_factored *f)
{
    f->row_tiles = f->col_tiles = 1;
    if (f->kind == FST_FACTORED_VECTOR) {
        f->per_tile = FST_TILE;
        f->tile_count = parts(f->count, FST_TILE);
        return;
    }
    const int64_t size = f->rows * f->cols;
    if (size <= FST_SPLIT_FROM && f->cols <= FST_SPLIT_COLUMNS) {
        f->kind = FST_FACTORED_WHOLE;
        f->per_tile = at_least(FST_TILE / size, 1);
        f->tile_count = parts(f->batch, f->per_tile);
        return;
    }
    f->kind = FST_FACTORED_SPLIT;
    f->tile_cols = f->cols < FST_SPLIT_COLUMNS ? f->cols : FST_SPLIT_COLUMNS;
    f->tile_rows = at_least(FST_SPLIT_FROM / f->tile_cols, FST_SPLIT_ROWS);
    f->row_tiles = parts(f->rows, f->tile_rows);
    f->col_tiles = parts(f->cols, f->tile_cols);
    f->tile_count = f->batch * f->row_tiles * f->col_tiles;
}

/* Measured and written at once, as it is one tile. */
static int is_small(const fst_factored *f)
{
    return f->tile_count == 1 && f->kind != FST_FACTORED_SPLIT;
}

static const fst_factored_loops *loops_of(const fst_factored *f)
{
    return &fst_cpu->factored[f->param.dtype == FST_F64];
}

/* Takes `size` bytes of the step's memory, of which `taken` are; NULL while sizes are added up. */
static void *take(char *memory, size_t *taken, size_t size)
{
    void *place = memory ? memory + *taken : NULL;
    *taken += (size + 63) / 64 * 64;
    return place;
}

static double *take_numbers(char *memory, size_t *taken, int64_t count)
{
    return take(memory, taken, (size_t)count * sizeof(double));
}

/* A state as the loops compute with it: itself, or room for a copy in fp32. */
static void *take_state(const fst_operand *state, int64_t count, char *memory, size_t *taken)
{
    const int is_low = state->dtype == FST_BF16 || state->dtype == FST_F16;
    return is_low ? take(memory, taken, (size_t)count * sizeof(float)) : state->data;
}

/* Gives a parameter its part of the step's memory. */
static void place(fst_factored *f, char *memory, size_t *taken)
{
    if (f->kind != FST_FACTORED_VECTOR && f->rows * f->cols > 1) {
        f->rows_of = take_state(&f->row, f->batch * f->rows, memory, taken);
        f->cols_of = take_state(&f->col, f->batch * f->cols, memory, taken);
    }
    if (f->kind == FST_FACTORED_SPLIT) {
        f->row_sums = take_numbers(memory, taken, f->batch * f->rows * f->col_tiles);
        f->col_sums = take_numbers(memory, taken, f->batch * f->row_tiles * f->cols);
        f->means = take_numbers(memory, taken, f->batch);
    }
    double *squares = take_numbers(memory, taken, 2 * f->tile_count);
    f->param_squares = squares;
    f->update_squares = squares ? squares + f->tile_count : NULL;
}

/* A tile of a parameter, or one of its matrices. */
typedef struct {
    fst_factored *f;
    int64_t index;
} item;

typedef void (*item_fn)(const item *item);

/* A stage of a wave: items in units of about equal cost, which threads take in turn. */
typedef struct {
    item *items;
    size_t *units; /* the first item of each, and the end */
    size_t item_count, unit_count, next;
    int64_t unit_cost; /* of the unit at hand */
    int64_t cost;      /* of all */
    int alone;         /* on the calling thread */
    item_fn run;
} stage;

static void begin(stage *s)
{
    s->item_count = s->unit_count = s->next = 0;
    s->unit_cost = UNIT;
    s->cost = 0;
}

static void add(stage *s, fst_factored *f, int64_t index, int64_t cost)
{
    if (s->unit_cost >= UNIT) {
        s->units[s->unit_count++] = s->item_count;
        s->unit_cost = 0;
    }
    s->unit_cost += cost + ITEM_COST;
    s->cost += cost + ITEM_COST;
    s->items[s->item_count++] = (item){f, index};
}

static void fetch(const fst_operand *op, int64_t count)
{
    const size_t size = (size_t)count * fst_dtype_size(op->dtype);
    for (size_t at = 0; !op->layout && at < size && at < 1024; at += 64)
        __builtin_prefetch((const char *)op->data + at);
}

static void run_units(int64_t first, int64_t last, void *context)
{
    stage *s = context;
    (void)first, (void)last;
    for (;;) {
        const size_t unit = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (unit >= s->unit_count)
            return;
        for (size_t i = s->units[unit]; i < s->units[unit + 1]; i++) {
            if (i + AHEAD < s->units[unit + 1] && is_small(s->items[i + AHEAD].f)) {
                const fst_factored *f = s->items[i + AHEAD].f;
                fetch(&f->param, f->count);
                fetch(&f->grad, f->count);
                if (f->kind == FST_FACTORED_VECTOR)
                    fetch(&f->row, f->count);
            }
            s->run(&s->items[i]);
        }
    }
}

static fst_code run(stage *s, item_fn fn, fst_status *status)
{
    s->run = fn;
    s->units[s->unit_count] = s->item_count;
    if (s->unit_count == 0)
        return FST_OK;
    /* each call takes units until none is left */
    return fst_parallel_for(s->alone ? 1 : parts(s->cost, GRAIN), 1, run_units, s, status);
}

static double sum_of(const double *values, int64_t count)
{
    double sum = values[0];
    for (int64_t i = 1; i < count; i++)
        sum += values[i];
    return sum;
}

/* The size of the step, of the sums of all tiles. Comparisons treat NaN as Python's max() does. */
static void conclude(fst_factored *f)
{
    const double root = sqrt((double)f->count);
    const double scale = sqrt(sum_of(f->param_squares, f->tile_count)) / root;
    const double above = sqrt(sum_of(f->update_squares, f->tile_count)) / (root * f->threshold);
    const double alpha = (scale > f->least_scale ? scale : f->least_scale) * f->rho;
    f->size = alpha / (above > 1.0 ? above : 1.0);
}

static void write_tile(const item *i)
{
    loops_of(i->f)->write(i->f, i->index);
}

static void measure_tile(const item *i)
{
    loops_of(i->f)->measure(i->f, i->index);
    if (is_small(i->f)) {
        conclude(i->f);
        write_tile(i);
    }
}

static void settle_matrix(const item *i)
{
    loops_of(i->f)->settle(i->f, i->index);
}

static void measure_update(const item *i)
{
    loops_of(i->f)->measure_update(i->f, i->index);
}

static void add_tiles(stage *s, fst_factored *f)
{
    for (int64_t tile = 0; tile < f->tile_count; tile++)
        add(s, f, tile, f->count / f->tile_count);
}

/* Makes the step of some parameters, stage by stage. */
static fst_code run_wave(stage *s, fst_factored *params, size_t count, fst_status *status)
{
    begin(s);
    for (size_t i = 0; i < count; i++)
        add_tiles(s, &params[i]);
    if (run(s, measure_tile, status))
        return status->code;
    begin(s);
    for (size_t i = 0; i < count; i++)
        for (int64_t b = 0; params[i].kind == FST_FACTORED_SPLIT && b < params[i].batch; b++)
            add(s, &params[i], b, params[i].rows + params[i].cols * params[i].row_tiles);
    if (run(s, settle_matrix, status))
        return status->code;
    begin(s);
    for (size_t i = 0; i < count; i++)
        if (params[i].kind == FST_FACTORED_SPLIT)
            add_tiles(s, &params[i]);
    if (run(s, measure_update, status))
        return status->code;
    begin(s);
    for (size_t i = 0; i < count; i++)
        if (!is_small(&params[i])) {
            conclude(&params[i]);
            add_tiles(s, &params[i]);
        }
    return run(s, write_tile, status);
}

static fst_code run_waves(stage *s, fst_factored *params, size_t count, fst_status *status)
{
    for (size_t first = 0, last; first < count; first = last) {
        int64_t elements = params[first].count;
        for (last = first + 1; last < count && elements + params[last].count <= WAVE; last++)
            elements += params[last].count;
        if (run_wave(s, params + first, last - first, status))
            return status->code;
    }
    return FST_OK;
}

fst_code fst_factored_step(fst_factored *params, size_t count, fst_status *status)
{
    size_t tiles = 0, size = 0, taken = 0;
    int64_t cost = 0;
    for (size_t i = 0; i < count; i++) {
        cut(&params[i]);
        tiles += (size_t)params[i].tile_count;
        cost += params[i].count + params[i].tile_count * ITEM_COST;
        place(&params[i], NULL, &size);
    }
    stage s = {.alone = cost <= ALONE};
    char *memory = malloc(size + tiles * sizeof *s.items + (tiles + 1) * sizeof *s.units);
    if (!memory)
        return fst_fail(status, FST_NO_MEMORY, "no memory for the sums of %zu parameters", count);
    for (size_t i = 0; i < count; i++)
        place(&params[i], memory, &taken);
    s.items = (item *)(void *)(memory + taken);
    s.units = (size_t *)(void *)(s.items + tiles);
    run_waves(&s, params, count, status);
    free(memory);
    return status->code;
}
