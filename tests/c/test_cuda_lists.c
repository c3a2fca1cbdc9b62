/* The kernels that work on a list of tensors, run without a GPU, against the passes of the CPU: the
 * same bits on every level, for any number of blocks and any order of blocks and threads. */
#include "../cuda/device.h"
#include "core/passes.h"
#include "rules/loss_scale.h"

enum { FEW = 20, MANY = 2600 /* more chunks than a block folds in one go */ };

typedef struct {
    array *tensors[MANY];
    size_t count;
    fst_plan plan;
    device device;
} list;

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

static void list_seal(list *l)
{
    fst_status status = {0};
    fst_plan_init(&l->plan, 1);
    fst_plan_begin(&l->plan);
    for (size_t i = 0; i < l->count; i++)
        *fst_plan_add(&l->plan, l->tensors[i]->count, 0, &status) = l->tensors[i]->op;
    CHECK_INT(fst_plan_seal(&l->plan, 0, 1, &status), FST_OK);
    const fst_work work = fst_plan_work(&l->plan);
    device_make(&l->device, &work, 0);
}

/* Tensors of all types and layouts; one of several chunks. */
static list *list_new(size_t count, double (*value)(void))
{
    list *l = must_alloc(sizeof *l);
    l->count = count;
    for (size_t i = 0; i < count; i++) {
        const fst_dtype dtype = (fst_dtype)random_below(FST_DTYPE_COUNT);
        const int64_t size = 1 + (int64_t)(i ? random_below(count == MANY ? 20 : 1500)
                                             : (size_t)FST_CHUNK + random_below(20000));
        const arrangement how = (arrangement)random_below(EXPANDED);
        l->tensors[i] =
            random_below(2) ? array_new_aligned(dtype, size) : array_new(dtype, how, size);
        array_fill(l->tensors[i], value);
    }
    list_seal(l);
    return l;
}

static list *list_clone(const list *from)
{
    list *l = must_copy(from, sizeof *from);
    for (size_t i = 0; i < l->count; i++)
        l->tensors[i] = array_clone(from->tensors[i]);
    list_seal(l);
    return l;
}

static void list_free(list *l)
{
    for (size_t i = 0; i < l->count; i++)
        array_free(l->tensors[i]);
    fst_plan_free(&l->plan);
    device_free(&l->device);
    free(l);
}

static int same_list(const list *a, const list *b)
{
    int same = 1;
    for (size_t i = 0; i < a->count; i++)
        same = same && same_memory(a->tensors[i], b->tensors[i]);
    return same;
}

static unsigned any_grid(void)
{
    simt_shuffle_by(random_below(3));
    return 1 + (unsigned)random_below(5);
}

static void unscale(size_t count, double (*value)(void), double scale, int how)
{
    list *start = list_new(count, value), *got = list_clone(start);
    double place = -1.0, found = 0.0;
    const double inverse = (double)(float)(1.0 / scale);
    const fst_work work = fst_plan_work(&got->plan);
    fst_unscale_launch launch = {.factor = inverse, .inverse = how == 1};
    launch.found_inf = scalar_at(&found, how % 2);
    if (how > 0)
        launch.scale = scalar_at(&place, 1);
    place = how == 1 ? inverse : scale;
    const unsigned grid = any_grid();
    for (size_t round = 0; round < work.round_count; round++) {
        launch.tables = device_round(&got->device, &work, round);
        device_launch(&got->device, "fst_unscale", grid, &launch);
    }
    for (size_t i = 0; i < level_count; i++) {
        list *want = list_clone(start);
        fst_status status = {0};
        fst_measurement seen;
        fst_cpu = levels[i];
        CHECK_INT(fst_unscale(&want->plan, 0, inverse, &seen, &status), FST_OK);
        const fst_device_outcome *out = got->device.outcome;
        CHECK(same_list(got, want));
        CHECK(same_double(out->square_sum, seen.square_sum));
        CHECK(same_double(out->norm, sqrt(seen.square_sum)));
        CHECK(same_double(out->inv_scale, inverse));
        CHECK_INT(out->nonfinite, seen.nonfinite);
        CHECK_NEAR(load_value(&found, how % 2 ? FST_F64 : FST_F32), seen.nonfinite, 0.0);
        list_free(want);
    }
    list_free(got);
    list_free(start);
}

/* The norm, and the clipping that goes by it. */
static void norm_and_scale(size_t count, double (*value)(void), double p, double max_norm)
{
    list *start = list_new(count, value), *got = list_clone(start);
    float shown = -1.0f;
    fst_norm_launch norm = {
        .tables = got->device.tables, .power = p, .kind = (int32_t)fst_norm_kind_of(p)};
    norm.norm = scalar_at(&shown, 0);
    device_launch(&got->device, "fst_norm", any_grid(), &norm);
    fst_scale_launch scale = {.tables = got->device.tables, .max_norm = max_norm, .factor = NAN};
    scale.norm = scalar_at(&got->device.outcome->norm, 1);
    device_launch(&got->device, "fst_scale", any_grid(), &scale);
    for (size_t i = 0; i < level_count; i++) {
        list *want = list_clone(start);
        fst_status status = {0};
        double expected = -1.0;
        fst_cpu = levels[i];
        CHECK_INT(fst_total_norm(&want->plan, 0, p, &expected, &status), FST_OK);
        CHECK(same_double(got->device.outcome->norm, expected));
        CHECK(same_double((double)shown, (double)(float)expected));
        const double factor = fst_clip_coefficient(expected, max_norm);
        if (!(factor >= 1.0))
            CHECK_INT(fst_scale(&want->plan, 0, factor, &status), FST_OK);
        CHECK(same_list(got, want));
        list_free(want);
    }
    list_free(got);
    list_free(start);
}

static void scale_and_clamp(size_t count, double factor)
{
    list *start = list_new(count, random_value), *got = list_clone(start);
    fst_scale_launch scale = {.tables = got->device.tables, .factor = factor};
    fst_clamp_launch clamp = {.tables = got->device.tables, .limit = 0.3};
    device_launch(&got->device, "fst_scale", any_grid(), &scale);
    device_launch(&got->device, "fst_clamp", any_grid(), &clamp);
    for (size_t i = 0; i < level_count; i++) {
        list *want = list_clone(start);
        fst_status status = {0};
        fst_cpu = levels[i];
        CHECK_INT(fst_scale(&want->plan, 0, factor, &status), FST_OK);
        CHECK_INT(fst_clamp(&want->plan, 0, 0.3, &status), FST_OK);
        CHECK(same_list(got, want));
        list_free(want);
    }
    list_free(got);
    list_free(start);
}

/* Sums and terms of any two types and layouts: those of the CPU. */
static array *any_array(int64_t size)
{
    const fst_dtype dtype = (fst_dtype)random_below(FST_DTYPE_COUNT);
    array *a = random_below(2) ? array_new_aligned(dtype, size)
                               : array_new(dtype, (arrangement)random_below(EXPANDED), size);
    array_fill(a, random_below(2) ? random_unit : random_value);
    return a;
}

static void accumulate(size_t count, unsigned terms, double factor, int begin)
{
    fst_status status = {0};
    fst_plan plan;
    device d;
    array *added[FEW][2], *starts[FEW], *got[FEW];
    fst_plan_init(&plan, 1 + terms);
    for (size_t i = 0; i < count; i++) {
        const int64_t size =
            1 + (int64_t)(i ? random_below(1500) : (size_t)FST_CHUNK + random_below(20000));
        starts[i] = any_array(size);
        got[i] = array_clone(starts[i]);
        fst_operand *op = fst_plan_add(&plan, size, 0, &status);
        op[0] = got[i]->op;
        for (unsigned k = 0; k < terms; k++) {
            added[i][k] = any_array(size);
            op[k + 1] = added[i][k]->op;
        }
    }
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    const fst_work work = fst_plan_work(&plan);
    device_make(&d, &work, 0);
    const fst_accumulate_launch launch = {
        .tables = d.tables, .factor = factor, .start = begin, .terms = terms};
    device_launch(&d, "fst_accumulate", any_grid(), &launch);
    for (size_t level = 0; level < level_count; level++)
        for (size_t i = 0; i < count; i++) {
            array *want = array_clone(starts[i]);
            const fst_operand op[3] = {want->op, added[i][0]->op, added[i][terms - 1]->op};
            const size_t size = (size_t)plan.spans[i].count;
            levels[level]->accumulate(op, terms, 0, size, factor,
                                      begin ? FST_SUM_START : FST_SUM_ADD);
            CHECK(same_memory(got[i], want));
            array_free(want);
        }
    for (size_t i = 0; i < count; i++) {
        for (unsigned k = 0; k < terms; k++)
            array_free(added[i][k]);
        array_free(starts[i]);
        array_free(got[i]);
    }
    fst_plan_free(&plan);
    device_free(&d);
}

/* A list that names one tensor twice: unscaled twice, in two rounds, and an infinity that only the
 * first of them meets is not forgotten in the second. */
static void rounds(int bad)
{
    list *l = list_new(3, random_unit);
    fst_plan_free(&l->plan);
    device_free(&l->device);
    array_free(l->tensors[2]);
    l->tensors[2] = l->tensors[1];
    if (bad)
        set(&l->tensors[0]->op, 7, (double)INFINITY);
    list_seal(l);
    const fst_work work = fst_plan_work(&l->plan);
    CHECK_INT((int64_t)work.round_count, 2);
    float found = 0.0f;
    const double before = get(&l->tensors[1]->op, 0);
    for (size_t round = 0; round < work.round_count; round++) {
        fst_unscale_launch launch = {.tables = device_round(&l->device, &work, round)};
        launch.factor = 0.5;
        launch.found_inf = scalar_at(&found, 0);
        device_launch(&l->device, "fst_unscale", 2, &launch);
    }
    CHECK(found == (float)bad);
    CHECK_INT(l->device.outcome->nonfinite, bad);
    CHECK_NEAR(get(&l->tensors[1]->op, 0), before / 4.0, 0x1p-7);
    l->count = 2;
    list_free(l);
}

/* Tensors of zeros do not count in the 0-norm, one element of many does. */
static double zero(void)
{
    return 0.0;
}

static void zeros(void)
{
    list *l = list_new(9, zero);
    fst_norm_launch norm = {.tables = l->device.tables, .kind = FST_NORM_NONZERO};
    device_launch(&l->device, "fst_norm", 2, &norm);
    CHECK(l->device.outcome->norm == 0.0);
    set(&l->tensors[0]->op, l->tensors[0]->count - 1, 1.0);
    set(&l->tensors[4]->op, 0, -1.0);
    set(&l->tensors[8]->op, 0, (double)NAN);
    device_launch(&l->device, "fst_norm", 2, &norm);
    CHECK(l->device.outcome->norm == 3.0);
    list_free(l);
}

/* Elements of a span beyond the 2^32nd, without its memory: an address that lies as far before it,
 * and a layout that sees the same few elements again and again. */
static void far_elements(fst_dtype dtype, int by_layout)
{
    const int64_t far = INT64_C(7) << 33;
    list *l = list_new(1, random_unit);
    fst_plan_free(&l->plan);
    device_free(&l->device);
    array_free(l->tensors[0]);
    l->tensors[0] = by_layout ? array_new(dtype, EXPANDED, 5000) : array_new_aligned(dtype, 5000);
    array_fill(l->tensors[0], random_unit);
    list_seal(l);
    const fst_operand *op = &l->tensors[0]->op;
    const uint32_t count = l->device.chunks[0].count;
    l->device.chunks[0].begin = far;
    if (by_layout)
        l->device.layouts[0].shape[0] = INT64_C(1) << 34;
    else
        l->device.operands[0].data -= (uint64_t)far * fst_dtype_size(dtype);
    fst_norm_launch norm = {.tables = l->device.tables, .kind = FST_NORM_ABS};
    device_launch(&l->device, "fst_norm", 1, &norm);
    const double want = levels[0]->reduce(op, 0, count, FST_NORM_ABS, 1.0, 1.0);
    CHECK(same_double(l->device.outcome->norm, want));
    if (!by_layout) {
        array *scaled = array_clone(l->tensors[0]);
        fst_scale_launch scale = {.tables = l->device.tables, .factor = 0.7};
        levels[0]->scale(&scaled->op, 0, count, 0.7);
        device_launch(&l->device, "fst_scale", 1, &scale);
        CHECK(same_memory(l->tensors[0], scaled));
        array_free(scaled);
    }
    list_free(l);
}

int main(void)
{
    static const double orders[] = {2.0, 1.0, INFINITY, -INFINITY, 0.0, 3.0, 0.5, -1.0};
    static const double limits[] = {1e-3, 1e9, 0.0, INFINITY};
    static double (*const values[])(void) = {random_unit, random_value};
    level_count = supported_levels(levels);
    for (int round = 0; round < 40; round++) {
        const size_t count = round ? 1 + random_below(FEW) : 0;
        unscale(count, values[round / 3 % 2], round % 4 ? 1024.0 : 1e-3, round % 3);
        for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++)
            norm_and_scale(count, values[round % 4 == 3], orders[i], limits[(round + (int)i) % 4]);
        scale_and_clamp(count, round % 2 ? 0.7 : 1e20);
        for (unsigned terms = 1; terms <= 2; terms++)
            accumulate(count, terms, round % 2 ? 1.0 : 0.3, round % 4 > 1);
    }
    unscale(MANY, random_unit, 3.0, 0);
    for (int i = 0; i < 5; i++)
        norm_and_scale(MANY, random_unit, orders[i], 0.5);
    for (int bad = 0; bad < 2; bad++)
        rounds(bad);
    zeros();
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (int by_layout = 0; by_layout < 2; by_layout++)
            far_elements((fst_dtype)dtype, by_layout);
    return check_report();
}
