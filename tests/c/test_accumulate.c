/* The accumulating pass against the reference, bit for bit: every pair of types and layouts, every
 * level, both ways to start, and as a whole pass over a plan. */
#include "core/passes.h"
#include "reference.h"

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

static double expected(const fst_operand *sum, const fst_operand *term, int64_t i, double factor,
                       int start)
{
    const int wide = sum->dtype == FST_F64 || term->dtype == FST_F64;
    const double x = get(term, i);
    const double product = wide ? x * factor : narrowed(x * narrowed(factor));
    if (start)
        return product;
    return wide ? get(sum, i) + product : narrowed(get(sum, i) + product);
}

static void expect(array *sum, const array *term, int64_t begin, size_t count, double factor,
                   int start)
{
    for (int64_t i = begin; i < begin + (int64_t)count; i++)
        set(&sum->op, i, expected(&sum->op, &term->op, i, factor, start));
}

static void compare(fst_dtype to, fst_dtype from, arrangement how_to, arrangement how_from,
                    size_t count)
{
    const int64_t begin = (int64_t)random_below(300);
    const double factors[] = {1.0, 1.0 / 3.0, -65536.0};
    array *sum = array_new(to, how_to, begin + (int64_t)count);
    array *term = array_new(from, how_from, begin + (int64_t)count);
    array_fill(sum, random_value);
    array_fill(term, random_value);
    for (size_t f = 0; f < 3; f++)
        for (int how = FST_SUM_ADD; how <= FST_SUM_STREAM; how++) {
            array *want = array_clone(sum);
            expect(want, term, begin, count, factors[f], how != FST_SUM_ADD);
            for (size_t i = 0; i < level_count; i++) {
                array *got = array_clone(sum);
                const fst_operand ops[2] = {got->op, term->op};
                levels[i]->accumulate(ops, begin, count, factors[f], (fst_sum_kind)how);
                if (!CHECK(same_memory(got, want)))
                    fprintf(stderr, "%s: %s to %s, layouts %d, %d, %zu elements, kind %d\n",
                            levels[i]->name, dtype_names[from], dtype_names[to], how_from, how_to,
                            count, how);
                array_free(got);
            }
            array_free(want);
        }
    array_free(sum);
    array_free(term);
}

/* Spans of many sizes, the same sum twice: rounds keep their order. */
static void a_pass_covers_every_span(void)
{
    const int64_t sizes[] = {1, 255, 40000, 7, 16384};
    fst_plan plan;
    fst_status status = {0};
    array *sums[5], *terms[5], *want[5];
    fst_plan_init(&plan, 2);
    for (size_t i = 0; i < 5; i++) {
        sums[i] = array_new(FST_F32, FLAT, sizes[i]);
        terms[i] = array_new(FST_BF16, FLAT, sizes[i]);
        array_fill(sums[i], random_unit);
        array_fill(terms[i], random_unit);
        want[i] = array_clone(sums[i]);
        for (int twice = 0; twice < 2; twice++) {
            fst_operand *ops = fst_plan_add(&plan, sizes[i], 0, &status);
            ops[0] = sums[i]->op;
            ops[1] = terms[i]->op;
            expect(want[i], terms[i], 0, (size_t)sizes[i], 0.5, 0);
        }
    }
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    CHECK_INT((int)plan.round_count, 2);
    CHECK_INT(fst_accumulate(&plan, 0.5, 0, &status), FST_OK);
    for (size_t i = 0; i < 5; i++) {
        CHECK(same_memory(sums[i], want[i]));
        array_free(sums[i]);
        array_free(terms[i]);
        array_free(want[i]);
    }
    fst_plan_free(&plan);
}

int main(void)
{
    const size_t counts[] = {1, 9, 256, 1000};
    level_count = supported_levels(levels);
    fst_passes_use(fst_cpu_select(NULL));
    for (int to = 0; to < FST_DTYPE_COUNT; to++)
        for (int from = 0; from < FST_DTYPE_COUNT; from++)
            for (int how_to = FLAT; how_to < EXPANDED; how_to++)
                for (int how_from = FLAT; how_from < ARRANGEMENTS; how_from++)
                    for (size_t c = 0; c < 4; c++)
                        compare((fst_dtype)to, (fst_dtype)from, (arrangement)how_to,
                                (arrangement)how_from, counts[c]);
    a_pass_covers_every_span();
    return check_report();
}
