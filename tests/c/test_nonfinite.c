/* Infinity and NaN are found where they are and nowhere else; large values do not overflow. */
#include "core/passes.h"
#include "reference.h"

static const fst_cpu_kernels *kernels;

/* What a pass says of one array; unscale works on a copy. */
static fst_measurement seen_by(int unscale, const array *from, double inv_scale)
{
    fst_measurement seen = {-1.0, -1};
    fst_status status = {0};
    fst_plan plan;
    array *a = array_clone(from);
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    *fst_plan_add(&plan, a->count, 0, &status) = a->op;
    fst_plan_seal(&plan, 0, 1, &status);
    CHECK_INT((unscale ? fst_unscale : fst_measure)(&plan, 0, inv_scale, &seen, &status), FST_OK);
    fst_plan_free(&plan);
    array_free(a);
    return seen;
}

static double ones(void)
{
    return 1.0;
}

/* One bad element at any place, in any type and layout, is seen; without it nothing is. */
static void one_bad_element_is_found(fst_dtype dtype, arrangement how)
{
    static const double bad[] = {INFINITY, -INFINITY, NAN};
    static const int64_t counts[] = {1, 7, 31, 33, 512, 700, 16384, 16385, 50000};
    static const double scales[] = {1.0, 1e-3, 1e-50}; /* the last one is 0 in fp32 */
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        array *a = array_new(dtype, how, counts[i]);
        array_fill(a, ones);
        for (int pass = 0; pass < 2; pass++)
            for (size_t k = 0; k < 12; k++) {
                const int64_t at =
                    k < 2 ? (a->count - 1) * (int64_t)k : (int64_t)random_below((size_t)a->count);
                CHECK_INT(seen_by(pass, a, scales[k % 3]).nonfinite, 0);
                CHECK(!kernels->nonfinite(&a->op, 0, (size_t)a->count));
                set(&a->op, at, bad[k / 3 % 3]);
                const fst_measurement seen = seen_by(pass, a, scales[k % 3]);
                CHECK_INT(seen.nonfinite, 1);
                CHECK(!isfinite(seen.square_sum));
                CHECK(kernels->nonfinite(&a->op, 0, (size_t)a->count));
                CHECK(kernels->nonfinite(&a->op, at, 1));
                set(&a->op, at, 1.0);
            }
        array_free(a);
    }
}

/* 1e19 and 1e38 in fp32 and bf16: their squares are infinite in fp32 but not in double. */
static void large_squares_do_not_overflow(void)
{
    static const double sizes[] = {1e19, 1e38, 3e38};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int half = 0; half < 2; half++) {
            array *a = array_new(half ? FST_BF16 : FST_F32, FLAT, 40000);
            array_fill(a, ones);
            for (int64_t at = 0; at < a->count; at++)
                set(&a->op, at, at % 2 ? -sizes[i] : sizes[i]);
            const double value = get(&a->op, 0), want = 40000.0 * value * value;
            const fst_measurement seen = seen_by(0, a, 1.0);
            CHECK_INT(seen.nonfinite, 0);
            CHECK_NEAR(seen.square_sum, want, 1e-12 * want);
            CHECK_INT(seen_by(1, a, 1.0).nonfinite, 0);
            CHECK_NEAR(seen_by(1, a, 1.0 / 1024.0).square_sum, want / 0x1p20, 1e-12 * want);
            array_free(a);
        }
}

/* An overflow that scaling or squaring makes is infinite, but no gradient was. */
static void own_overflow_is_not_found(void)
{
    static const struct {
        fst_dtype dtype;
        double value, inv_scale;
    } cases[] = {
        {FST_F32, 3e38, 4.0},     {FST_BF16, -3e38, 4.0},  {FST_F64, 1e200, 1.0},
        {FST_F64, -1e300, 1e20},  {FST_F64, 1.7e308, 1.0}, {FST_F32, -3.4e38, 1e30},
        {FST_F16, 65504.0, 1e38},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int pass = 0; pass < 2; pass++) {
            array *a = array_new(cases[i].dtype, FLAT, 40000);
            array_fill(a, ones);
            set(&a->op, 33333, cases[i].value);
            fst_measurement seen = seen_by(pass, a, cases[i].inv_scale);
            CHECK(isinf(seen.square_sum));
            CHECK_INT(seen.nonfinite, 0);
            set(&a->op, 11111, (double)NAN); /* in another chunk */
            seen = seen_by(pass, a, cases[i].inv_scale);
            CHECK_INT(seen.nonfinite, 1);
            array_free(a);
        }
}

/* NaN wins over every number in a maximum and in a minimum, wherever it is. */
static void nan_wins(void)
{
    array *a = array_new(FST_F32, FLAT, 1500);
    for (int64_t at = 0; at < a->count; at += 37) {
        array_fill(a, random_unit);
        set(&a->op, (at * 7 + 1) % a->count, INFINITY);
        CHECK(kernels->reduce(&a->op, 0, 1500, FST_NORM_MAX, 0.0, 1.0) == INFINITY);
        CHECK(isfinite(kernels->reduce(&a->op, 0, 1500, FST_NORM_MIN, 0.0, 1.0)));
        set(&a->op, at, NAN);
        CHECK(isnan(kernels->reduce(&a->op, 0, 1500, FST_NORM_MAX, 0.0, 1.0)));
        CHECK(isnan(kernels->reduce(&a->op, 0, 1500, FST_NORM_MIN, 0.0, 1.0)));
        CHECK(kernels->reduce(&a->op, at, 1, FST_NORM_NONZERO, 0.0, 1.0) == 1.0);
    }
    array_free(a);
}

/* NaN stays NaN and infinities come down to the limit. */
static void clamping(fst_dtype dtype, arrangement how)
{
    static const double limits[] = {0.0, 0.3, 1.0, 7.0, INFINITY};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        array *a = array_new(dtype, how, 1100);
        array_fill(a, random_value);
        array *want = array_clone(a);
        const double limit = dtype == FST_F64 ? limits[i] : narrowed(limits[i]);
        for (int64_t at = 0; at < a->count; at++) {
            const double x = get(&a->op, at);
            if (at >= 3 && fabs(x) > limit)
                set(&want->op, at, copysign(limit, x));
        }
        kernels->clamp(&a->op, 3, (size_t)a->count - 3, limits[i]);
        CHECK(same_memory(a, want));
        array_free(want);
        array_free(a);
    }
}

int main(void)
{
    const fst_cpu_kernels *levels[MAX_LEVELS];
    const size_t count = supported_levels(levels);
    for (size_t i = 0; i < count; i++) {
        kernels = levels[i];
        fst_cpu = kernels;
        for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
            for (int how = FLAT; how < EXPANDED; how++) {
                one_bad_element_is_found((fst_dtype)dtype, (arrangement)how);
                clamping((fst_dtype)dtype, (arrangement)how);
            }
        large_squares_do_not_overflow();
        own_overflow_is_not_found();
        nan_wins();
    }
    return check_report();
}
