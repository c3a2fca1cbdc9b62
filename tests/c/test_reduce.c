/* Norms, sums and finite checks: against the tree written out, against long double, for all levels;
 * and the passes built on them over lists of many tensors. */
#include "core/passes.h"
#include "reference.h"
#include "rules/loss_scale.h"

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

static const double orders[] = {2.0, 1.0, INFINITY, -INFINITY, 0.0, 3.0, 0.5, -1.0};
enum { ORDERS = sizeof orders / sizeof orders[0] };

static fst_norm_kind norm_of(double p)
{
    if (isinf(p))
        return p > 0.0 ? FST_NORM_MAX : FST_NORM_MIN;
    return p == 2.0   ? FST_NORM_SQUARES
           : p == 1.0 ? FST_NORM_ABS
           : p == 0.0 ? FST_NORM_NONZERO
                      : FST_NORM_POWER;
}

/* The terms of elements [begin, begin + count), to be freed. */
static double *terms_of(const fst_operand *op, int64_t begin, size_t count, double p, double factor)
{
    double *terms = must_alloc(count * sizeof *terms);
    for (size_t i = 0; i < count; i++)
        terms[i] = expected_term(op, begin + (int64_t)i, norm_of(p), p, factor);
    return terms;
}

/* Every level gives the bits of the tree: also with infinities, NaN and values of any size. */
static void reductions_follow_the_tree(fst_dtype dtype, arrangement how, size_t count)
{
    const int64_t begin = (int64_t)random_below(600);
    array *a = array_new(dtype, how, begin + (int64_t)count);
    array_fill(a, random_below(2) ? random_value : random_unit);
    for (size_t k = 0; k < ORDERS; k++) {
        const double factor = k % 2 ? 1.0 : 1.0 / 3.0;
        double *terms = terms_of(&a->op, begin, count, orders[k], factor);
        const double want = expected_tree(terms, count, norm_of(orders[k]));
        for (size_t i = 0; i < level_count; i++) {
            const double got =
                levels[i]->reduce(&a->op, begin, count, norm_of(orders[k]), orders[k], factor);
            CHECK(same_double(got, want));
        }
        free(terms);
    }
    array_free(a);
}

static void combining_follows_the_tree(size_t count)
{
    double *values = must_alloc(count * sizeof *values);
    for (size_t round = 0; round < 2; round++)
        for (int norm = FST_NORM_SQUARES; norm <= FST_NORM_POWER; norm++) {
            for (size_t i = 0; i < count; i++)
                values[i] = round ? random_positive() : fabs(random_unit());
            const double want = expected_tree(values, count, (fst_norm_kind)norm);
            for (size_t i = 0; i < level_count; i++)
                CHECK(same_double(levels[i]->combine(values, count, (fst_norm_kind)norm), want));
        }
    free(values);
}

/* A list of tensors of many sizes, types and layouts, sealed into a plan. */
typedef struct {
    fst_plan plan;
    array **tensors;
    size_t count;
} list;

static void list_seal(list *l, int written)
{
    fst_status status = {0};
    fst_plan_begin(&l->plan);
    for (size_t i = 0; i < l->count; i++)
        *fst_plan_add(&l->plan, l->tensors[i]->count, 0, &status) = l->tensors[i]->op;
    CHECK_INT(fst_plan_seal(&l->plan, 0, (unsigned)written, &status), FST_OK);
}

static void list_make(list *l, size_t count, double (*value)(void))
{
    l->tensors = must_alloc(count * sizeof *l->tensors);
    l->count = count;
    fst_plan_init(&l->plan, 1);
    for (size_t i = 0; i < count; i++) {
        const int64_t size = 1 + (int64_t)random_below(i % 16 ? 200 : 3 * FST_CHUNK);
        l->tensors[i] = array_new((fst_dtype)random_below(FST_DTYPE_COUNT),
                                  (arrangement)random_below(EXPANDED), size);
        array_fill(l->tensors[i], value);
    }
    list_seal(l, 0);
}

static void list_free(list *l)
{
    for (size_t i = 0; i < l->count; i++)
        array_free(l->tensors[i]);
    free(l->tensors);
    fst_plan_free(&l->plan);
}

/* The tree over chunks of 16384 elements, tensor after tensor, and then over the chunks. */
static double expected_list(const list *l, double p, double factor)
{
    double *partial = NULL;
    size_t chunks = 0;
    for (size_t i = 0; i < l->count; i++)
        for (int64_t begin = 0; begin < l->tensors[i]->count; begin += 16384) {
            const int64_t left = l->tensors[i]->count - begin;
            const size_t count = (size_t)(left < 16384 ? left : 16384);
            double *terms = terms_of(&l->tensors[i]->op, begin, count, p, factor);
            partial = realloc(partial, (chunks + 1) * sizeof *partial);
            if (!partial)
                exit(1);
            partial[chunks++] = expected_tree(terms, count, norm_of(p));
            free(terms);
        }
    const double sum = expected_tree(partial, chunks, norm_of(p));
    free(partial);
    return sum;
}

/* The norm of the norms of the tensors, in long double. */
static long double slow_norm(const list *l, double p)
{
    long double total = p < 0.0 && isinf(p) ? (long double)INFINITY : 0.0L;
    for (size_t i = 0; i < l->count; i++) {
        long double own = 0.0L;
        for (int64_t at = 0; at < l->tensors[i]->count; at++) {
            const long double x = fabsl((long double)get(&l->tensors[i]->op, at));
            if (isinf(p))
                total = (p > 0.0 ? x > total : x < total) ? x : total;
            else if (p == 0.0)
                own = own != 0.0L || x != 0.0L;
            else
                own += powl(x, (long double)p);
        }
        total += isinf(p) ? 0.0L : own;
    }
    return isinf(p) || p == 0.0 ? total : powl(total, 1.0L / (long double)p);
}

static void norms_of_lists(size_t count)
{
    list l;
    list_make(&l, count, random_unit);
    for (size_t k = 0; k < ORDERS; k++) {
        const double sum = expected_list(&l, orders[k], 1.0),
                     exact = (double)slow_norm(&l, orders[k]);
        for (size_t i = 0; i < level_count; i++) {
            double norm = -1.0;
            fst_status status = {0};
            fst_cpu = levels[i];
            CHECK_INT(fst_total_norm(&l.plan, 0, orders[k], &norm, &status), FST_OK);
            CHECK_NEAR(norm, exact, 1e-12 * fabs(exact));
            if (orders[k] == 2.0)
                CHECK(same_double(norm, sqrt(sum)));
            else if (orders[k] == 1.0 || isinf(orders[k]))
                CHECK(same_double(norm, sum));
            else if (orders[k] != 0.0)
                CHECK(same_double(norm, pow(sum, 1.0 / orders[k])));
        }
    }
    list_free(&l);
}

/* Measuring and unscaling see the same, and unscaling writes what scaling writes. */
static void passes_over_lists(size_t count, double inv_scale)
{
    list l;
    list_make(&l, count, random_unit);
    const double want = expected_list(&l, 2.0, inv_scale);
    for (size_t i = 0; i < level_count; i++) {
        fst_status status = {0};
        fst_measurement seen = {-1.0, -1}, unscaled = {-1.0, -1};
        array **before = must_copy(l.tensors, count * sizeof *before);
        fst_cpu = levels[i];
        CHECK_INT(fst_measure(&l.plan, 0, inv_scale, &seen, &status), FST_OK);
        CHECK(same_double(seen.square_sum, want) && !seen.nonfinite);
        for (size_t k = 0; k < count; k++)
            l.tensors[k] = array_clone(before[k]);
        list_seal(&l, 1);
        CHECK_INT(fst_unscale(&l.plan, 0, inv_scale, &unscaled, &status), FST_OK);
        CHECK_INT(unscaled.nonfinite, 0);
        CHECK_NEAR(unscaled.square_sum, want, 0x1p-7 * want); /* bf16 is rounded to 8 bits */
        for (size_t k = 0; k < count; k++) {
            const fst_operand *op = &l.tensors[k]->op;
            array *scaled = array_clone(before[k]), *expected = array_clone(before[k]);
            levels[i]->scale(&scaled->op, 0, (size_t)scaled->count, inv_scale);
            for (int64_t at = 0; at < expected->count; at++) {
                const double x = get(&expected->op, at);
                const double factor = op->dtype == FST_F64 ? inv_scale : narrowed(inv_scale);
                set(&expected->op, at, op->dtype == FST_F64 ? x * factor : narrowed(x * factor));
            }
            CHECK(same_memory(l.tensors[k], expected));
            CHECK(same_memory(scaled, expected));
            array_free(scaled);
            array_free(expected);
            array_free(l.tensors[k]);
        }
        memcpy(l.tensors, before, count * sizeof *before);
        list_seal(&l, 0);
        free(before);
    }
    list_free(&l);
}

/* A step in which no parameter has a gradient. */
static void empty_lists(void)
{
    list l = {.count = 0};
    fst_status status = {0};
    fst_measurement seen = {-1.0, -1};
    double norm = -1.0;
    fst_plan_init(&l.plan, 1);
    list_seal(&l, 1);
    fst_cpu = fst_cpu_select(NULL);
    CHECK_INT(fst_measure(&l.plan, 0, 1.0, &seen, &status), FST_OK);
    CHECK(seen.square_sum == 0.0 && !seen.nonfinite);
    CHECK_INT(fst_unscale(&l.plan, 0, 1.0, &seen, &status), FST_OK);
    CHECK(seen.square_sum == 0.0 && !seen.nonfinite);
    CHECK_INT(fst_total_norm(&l.plan, 0, 2.0, &norm, &status), FST_OK);
    CHECK(norm == 0.0);
    CHECK_INT(fst_scale(&l.plan, 0, 2.0, &status), FST_OK);
    CHECK_INT(fst_clamp(&l.plan, 0, 2.0, &status), FST_OK);
    CHECK_INT(fst_update(&l.plan, NULL, 1.0, 1, &status), FST_OK);
    fst_plan_free(&l.plan);
}

/* One pass has the bits of measuring, then scaling; of the sums expected, every `wrong`-th chunk's
 * is not what is there (0: none). */
static void clips_as_expected(size_t count, size_t wrong, double max_norm)
{
    list l;
    list_make(&l, count, random_unit);
    for (size_t i = 0; i < level_count; i++) {
        fst_status status = {0};
        double norm = -1.0, want = -1.0;
        int done = -1;
        array **before = must_copy(l.tensors, count * sizeof *before);
        fst_cpu = levels[i];
        CHECK_INT(fst_total_norm(&l.plan, 0, 2.0, &want, &status), FST_OK);
        const size_t chunks = l.plan.chunk_count;
        double *sums = must_copy(l.plan.partial, chunks * sizeof *sums);
        double *expected = must_copy(sums, chunks * sizeof *sums);
        for (size_t c = 0; wrong && c < chunks; c += wrong)
            expected[c] = sums[c] * 1.5 + 1.0;
        const double first = fst_clip_coefficient(
            sqrt(levels[i]->combine(expected, chunks, FST_NORM_SQUARES)), max_norm);
        const double right = fst_clip_coefficient(want, max_norm);
        const int clips = first < 1.0 && first >= 0x1p-24;
        for (size_t k = 0; k < count; k++)
            l.tensors[k] = array_clone(before[k]);
        list_seal(&l, 1);
        CHECK_INT(fst_clip_expected(&l.plan, 0, expected, max_norm, &norm, &done, &status), FST_OK);
        CHECK_INT(done, clips);
        CHECK(!clips || same_double(norm, want));
        for (size_t k = 0; k < count; k++) {
            array *scaled = array_clone(before[k]);
            for (size_t c = 0; clips && c < chunks; c++) {
                const fst_chunk *chunk = &l.plan.chunks[c];
                if (l.plan.operands[chunk->span].data != l.tensors[k]->op.data)
                    continue;
                const int same = sums[c] == expected[c];
                if (same)
                    levels[i]->scale(&scaled->op, chunk->begin, chunk->count, first);
                if (!same || wrong)
                    levels[i]->scale(&scaled->op, chunk->begin, chunk->count,
                                     same ? right / first : right);
            }
            CHECK(same_memory(l.tensors[k], scaled));
            array_free(scaled);
            array_free(l.tensors[k]);
        }
        memcpy(l.tensors, before, count * sizeof *before);
        list_seal(&l, 0);
        free(before);
        free(expected);
        free(sums);
    }
    list_free(&l);
}

int main(void)
{
    static const size_t sizes[] = {255, 256, 257, 511, 512, 513, 1023, 1025, 4096, 16383, 16384};
    level_count = supported_levels(levels);
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (int how = FLAT; how < ARRANGEMENTS; how++) {
            for (size_t size = 1; size <= 70; size++)
                reductions_follow_the_tree((fst_dtype)dtype, (arrangement)how, size);
            for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
                reductions_follow_the_tree((fst_dtype)dtype, (arrangement)how, sizes[i]);
        }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        combining_follows_the_tree(sizes[i]);
    for (size_t count = 1; count < 40; count++)
        combining_follows_the_tree(count);
    empty_lists();
    norms_of_lists(1);
    norms_of_lists(300);
    passes_over_lists(100, 1.0 / 65536.0);
    passes_over_lists(100, 1.0);
    for (size_t wrong = 0; wrong < 4; wrong++)
        clips_as_expected(100, wrong, 0.5);
    clips_as_expected(100, 0, 1e9);
    clips_as_expected(100, 0, 1e-9);
    return check_report();
}
