/* Sums of squares by the kernels, run without a GPU, of elements that are easy to get wrong: the
 * bits of the CPU, wherever such an element is and whatever it is multiplied by. */
#include "../cuda/device.h"
#include "core/passes.h"

typedef struct {
    int64_t count;
    int at; /* the element of the chunk that is special */
    double special, factor;
} squares;

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

static const double specials[] = {
    0.0,       -0.0,   0x1p-149, -0x1p-149,      0x1.fffffcp-127, 0x1p-126, 0x1.8p-75, 1e19,
    -0x1p63,   0x1p64, 65504.0,  0x1.fffffep103, 0x1p104,         -0x1p104, 0x1p127,   INFINITY,
    -INFINITY, NAN,    -NAN,     3e38,           -0x1.fffffep127, 0x1p-133, -0x1p-14,  0x1p-24};
static const double factors[] = {1.0,   -1.0,   0x1p-16,  0x1p24,    -0x1p-24, 3.7,    -1e-3,
                                 1e-30, 1e30,   1e-38,    -0x1p-126, 0x1p-149, 1e-44,  0.0,
                                 -0.0,  3.4e38, INFINITY, -INFINITY, NAN,      0x1p104};
static const fst_dtype types[] = {FST_F32, FST_BF16, FST_F16, FST_F64};

enum {
    SPECIALS = sizeof specials / sizeof *specials,
    FACTORS = sizeof factors / sizeof *factors,
    TYPES = sizeof types / sizeof *types
};

/* What surrounds the special elements: nothing, numbers whose squares they change by the last bit
 * or not at all, and numbers of which all products may be subnormal. */
static double nothing(void)
{
    return 0.0;
}

static double tiny(void)
{
    return random_unit() * 0x1p-126;
}

static double rounds_last(void)
{
    return ldexp(1.0 + (double)random_below(4) * 0x1p-23, -126 - (int)random_below(24));
}

static double any_size(void)
{
    return ldexp(random_unit(), (int)random_below(250) - 148);
}

static double (*const around[])(void) = {nothing, random_unit, tiny, rounds_last, any_size};
enum { AROUND = sizeof around / sizeof *around };

static const char *kernel_of(int write)
{
    return write ? "fst_unscale" : "fst_norm";
}

/* A launch of fst_norm or fst_unscale over an array, into `d`. */
static void run_kernel(const array *a, const squares *s, int write, device *d)
{
    fst_plan plan;
    fst_status status = {0};
    double scale = s->factor, norm = -1.0;
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    *fst_plan_add(&plan, a->count, 0, &status) = a->op;
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    const fst_work work = fst_plan_work(&plan);
    device_make(d, &work, 0);
    const unsigned grid = 1 + (unsigned)random_below(3);
    simt_shuffle_by(random_below(3));
    if (write) {
        fst_unscale_launch launch = {.tables = device_round(d, &work, 0), .inverse = 1};
        launch.scale = scalar_at(&scale, 1);
        device_launch(d, kernel_of(write), grid, &launch);
    } else {
        fst_norm_launch launch = {.tables = d->tables, .power = 2.0, .kind = FST_NORM_SQUARES};
        scale = 1.0 / scale;
        launch.scale = scalar_at(&scale, 1);
        launch.norm = scalar_at(&norm, 1);
        device_launch(d, kernel_of(write), grid, &launch);
    }
    fst_plan_free(&plan);
}

static void run_cpu(array *a, const squares *s, int write, fst_measurement *seen)
{
    fst_plan plan;
    fst_status status = {0};
    const double factor = write ? s->factor : 1.0 / (1.0 / s->factor);
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    *fst_plan_add(&plan, a->count, 0, &status) = a->op;
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    fst_passes_use(levels[random_below(level_count)]);
    if (write)
        CHECK_INT(fst_unscale(&plan, 0, factor, seen, &status), FST_OK);
    else
        CHECK_INT(fst_measure(&plan, 0, factor, seen, &status), FST_OK);
    fst_plan_free(&plan);
}

static void compare(fst_dtype dtype, const squares *s, double (*value)(void), int write)
{
    device d;
    fst_measurement seen;
    array *got = array_new_aligned(dtype, s->count);
    array_fill(got, value);
    for (int64_t i = s->at; i < s->count; i += FST_CHUNK)
        set(&got->op, i, s->special);
    array *want = array_clone(got);
    run_kernel(got, s, write, &d);
    run_cpu(want, s, write, &seen);
    const int same = same_memory(got, want) &&
                     same_double(d.outcome->square_sum, seen.square_sum) &&
                     d.outcome->nonfinite == seen.nonfinite;
    if (!CHECK(same))
        fprintf(stderr, "    %s: %s, %lld elements, %a at %d, times %a: %a, found %d, not %a, %d\n",
                kernel_of(write), dtype_names[dtype], (long long)s->count, s->special, s->at,
                s->factor, d.outcome->square_sum, (int)d.outcome->nonfinite, seen.square_sum,
                seen.nonfinite);
    device_free(&d);
    array_free(got);
    array_free(want);
}

/* Every special element with every factor. */
static void all_pairs(fst_dtype dtype, int write)
{
    for (int i = 0; i < SPECIALS; i++)
        for (int k = 0; k < FACTORS; k++) {
            const squares s = {2100, (int)random_below(2100), specials[i], factors[k]};
            compare(dtype, &s, around[random_below(AROUND)], write);
        }
}

/* Every count around those that loops take at a time, with the special element near an end. */
static void all_counts(fst_dtype dtype, int write)
{
    static const int64_t tiles[] = {8, 256, 512, 1024, 2048, 4096, FST_CHUNK, FST_CHUNK + 2048};
    static const int offs[] = {-9, -8, -1, 0, 1, 7, 8, 9};
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; i++)
        for (size_t k = 0; k < sizeof offs / sizeof *offs; k++) {
            squares s = {tiles[i] + offs[k], 0, specials[random_below(SPECIALS)],
                         factors[random_below(FACTORS)]};
            if (s.count < 1)
                continue;
            s.at = random_below(2) ? (int)random_below((size_t)s.count) % 9
                                   : (int)((s.count - 1) % FST_CHUNK);
            compare(dtype, &s, around[random_below(AROUND)], write);
        }
}

/* Numbers of every size in every lane, so that the order and the rounding of each sum show. */
static void all_sizes(fst_dtype dtype, int write)
{
    for (int i = 0; i < 4 * AROUND; i++) {
        const squares s = {3 * 4096 + (int)random_below(300), 0, 0.0, factors[i % 9]};
        compare(dtype, &s, around[i % AROUND], write);
    }
}

int main(void)
{
    level_count = supported_levels(levels);
    for (int i = 0; i < TYPES; i++)
        for (int write = 0; write < 2; write++) {
            all_pairs(types[i], write);
            all_counts(types[i], write);
            all_sizes(types[i], write);
        }
    return check_report();
}
