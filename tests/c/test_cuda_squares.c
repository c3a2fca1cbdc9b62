/* Sums of squares by the kernels, run without a GPU, of elements that are easy to get wrong: the
 * bits of the CPU, wherever such an element is and whatever it is multiplied by. */
#include "../cuda/device.h"
#include "core/passes.h"

enum { MAX_OTHERS = 2 /* with them a block has three chunks at least */ };

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

/* The tensor, and as many others of one element as make a warp, not a block, take each chunk. */
typedef struct {
    array *tensors[1 + MAX_OTHERS];
    int count;
    fst_plan plan;
} list;

static void list_seal(list *l)
{
    fst_status status = {0};
    fst_plan_init(&l->plan, 1);
    fst_plan_begin(&l->plan);
    for (int i = 0; i < l->count; i++)
        *fst_plan_add(&l->plan, l->tensors[i]->count, 0, &status) = l->tensors[i]->op;
    CHECK_INT(fst_plan_seal(&l->plan, 0, 1, &status), FST_OK);
}

static list *list_new(fst_dtype dtype, const squares *s, double (*value)(void), int others)
{
    list *l = must_alloc(sizeof *l);
    l->count = 1 + others;
    l->tensors[0] = random_below(8) ? array_new_aligned(dtype, s->count)
                                    : array_new(dtype, random_below(2) ? FLAT : STRIDED, s->count);
    array_fill(l->tensors[0], value);
    for (int64_t i = s->at; i < s->count; i += FST_CHUNK)
        set(&l->tensors[0]->op, i, s->special);
    for (int i = 1; i < l->count; i++) {
        l->tensors[i] = array_new_aligned(dtype, 1);
        array_fill(l->tensors[i], value);
    }
    list_seal(l);
    return l;
}

static list *list_clone(const list *from)
{
    list *l = must_copy(from, sizeof *from);
    for (int i = 0; i < l->count; i++)
        l->tensors[i] = array_clone(from->tensors[i]);
    list_seal(l);
    return l;
}

static void list_free(list *l)
{
    for (int i = 0; i < l->count; i++)
        array_free(l->tensors[i]);
    fst_plan_free(&l->plan);
    free(l);
}

static int same_list(const list *a, const list *b)
{
    int same = 1;
    for (int i = 0; i < a->count; i++)
        same = same && same_memory(a->tensors[i], b->tensors[i]);
    return same;
}

/* A launch of fst_norm or fst_unscale, which leaves its outcome in `d`. */
static void run_kernel(const list *l, const squares *s, int write, unsigned grid, device *d)
{
    double scale = s->factor, norm = -1.0, found = 0.0;
    const fst_work work = fst_plan_work(&l->plan);
    device_make(d, &work, 0);
    simt_shuffle_by(random_below(3));
    if (write) {
        fst_unscale_launch launch = {.tables = d->tables, .inverse = 1};
        launch.scale = scalar_at(&scale, 1);
        launch.found_inf = scalar_at(&found, 1); /* without it 1 would be no work */
        device_launch(d, kernel_of(write), grid, &launch);
    } else {
        fst_norm_launch launch = {.tables = d->tables, .power = 2.0, .kind = FST_NORM_SQUARES};
        scale = 1.0 / scale;
        launch.scale = scalar_at(&scale, 1);
        launch.norm = scalar_at(&norm, 1);
        device_launch(d, kernel_of(write), grid, &launch);
    }
}

static void compare_by(fst_dtype dtype, const squares *s, double (*value)(void), int write,
                       int others)
{
    device d;
    fst_measurement seen;
    fst_status status = {0};
    const unsigned grid = others ? 1 : 1 + (unsigned)random_below(3);
    const double factor = write ? s->factor : 1.0 / (1.0 / s->factor);
    list *got = list_new(dtype, s, value, others), *want = list_clone(got);
    run_kernel(got, s, write, grid, &d);
    fst_cpu = levels[random_below(level_count)];
    if (write)
        CHECK_INT(fst_unscale(&want->plan, 0, factor, &seen, &status), FST_OK);
    else
        CHECK_INT(fst_measure(&want->plan, 0, factor, &seen, &status), FST_OK);
    const int same = same_list(got, want) && same_double(d.outcome->square_sum, seen.square_sum) &&
                     d.outcome->nonfinite == seen.nonfinite;
    if (!CHECK(same))
        fprintf(stderr,
                "    %s of %s, %d others: %lld elements, %a at %d, times %a: %a, found %d, not %a, "
                "%d\n",
                kernel_of(write), dtype_names[dtype], others, (long long)s->count, s->special,
                s->at, s->factor, d.outcome->square_sum, d.outcome->nonfinite, seen.square_sum,
                seen.nonfinite);
    device_free(&d);
    list_free(got);
    list_free(want);
}

static void compare(fst_dtype dtype, const squares *s, double (*value)(void), int write)
{
    compare_by(dtype, s, value, write, 0);
    compare_by(dtype, s, value, write, MAX_OTHERS);
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
