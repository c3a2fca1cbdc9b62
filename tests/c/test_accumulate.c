/* The accumulating pass against the reference, bit for bit: every pair of types and layouts, one
 * term and two, every level, both ways to start, and as a whole pass over a plan. */
#include "core/passes.h"
#include "reference.h"

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

/* What element i of op[0] becomes: all in the widest of the types, rounded to its own at the end.
 */
static double expected(const fst_operand *op, unsigned terms, int64_t i, double factor, int start)
{
    int wide = 0;
    for (unsigned k = 0; k <= terms; k++)
        wide |= op[k].dtype == FST_F64;
    double sum = start ? 0.0 : get(&op[0], i);
    for (unsigned k = 1; k <= terms; k++) {
        const double x = get(&op[k], i);
        const double product = wide ? x * factor : narrowed(x * narrowed(factor));
        const double added = start && k == 1 ? product : sum + product;
        sum = wide ? added : narrowed(added);
    }
    return sum;
}

static void expect(const fst_operand *op, unsigned terms, int64_t begin, size_t count,
                   double factor, int start)
{
    for (int64_t i = begin; i < begin + (int64_t)count; i++)
        set(&op[0], i, expected(op, terms, i, factor, start));
}

static void compare_one(const array *sum, const array *const *others, unsigned terms, int64_t begin,
                        size_t count, double factor, int how)
{
    fst_operand ops[3] = {{.data = NULL}};
    for (unsigned k = 0; k < terms; k++)
        ops[k + 1] = others[k]->op;
    array *want = array_clone(sum);
    ops[0] = want->op;
    expect(ops, terms, begin, count, factor, how != FST_SUM_ADD);
    for (size_t i = 0; i < level_count; i++) {
        array *got = array_clone(sum);
        ops[0] = got->op;
        levels[i]->accumulate(ops, terms, begin, count, factor, (fst_sum_kind)how);
        if (!CHECK(same_memory(got, want)))
            fprintf(stderr, "%s: %u terms, %s (and %s) to %s, %zu elements, kind %d\n",
                    levels[i]->name, terms, dtype_names[others[0]->op.dtype],
                    dtype_names[others[1]->op.dtype], dtype_names[sum->op.dtype], count, how);
        array_free(got);
    }
    array_free(want);
}

/* With one term, and with a second one of any type and layout. */
static void compare(fst_dtype to, fst_dtype from, arrangement how_to, arrangement how_from,
                    size_t count)
{
    const int64_t begin = (int64_t)random_below(300);
    const double factors[] = {1.0, 1.0 / 3.0, -65536.0};
    array *sum = array_new(to, how_to, begin + (int64_t)count);
    array *others[2] = {array_new(from, how_from, begin + (int64_t)count),
                        array_new((fst_dtype)random_below(FST_DTYPE_COUNT),
                                  (arrangement)random_below(ARRANGEMENTS), begin + (int64_t)count)};
    array_fill(sum, random_value);
    for (unsigned k = 0; k < 2; k++)
        array_fill(others[k], random_value);
    for (size_t f = 0; f < 3; f++)
        for (int how = FST_SUM_ADD; how <= FST_SUM_STREAM; how++)
            for (unsigned terms = 1; terms <= 2; terms++)
                compare_one(sum, (const array *const *)others, terms, begin, count, factors[f],
                            how);
    array_free(sum);
    for (unsigned k = 0; k < 2; k++)
        array_free(others[k]);
}

/* Spans of many sizes, the same sum twice: rounds keep their order. */
static void a_pass_covers_every_span(unsigned terms)
{
    const int64_t sizes[] = {1, 255, 40000, 7, 16384};
    fst_plan plan;
    fst_status status = {0};
    array *arrays[5][3], *want[5];
    fst_plan_init(&plan, 1 + terms);
    for (size_t i = 0; i < 5; i++) {
        fst_operand given[3];
        for (unsigned k = 0; k <= terms; k++) {
            arrays[i][k] = array_new(k ? FST_BF16 : FST_F32, FLAT, sizes[i]);
            array_fill(arrays[i][k], random_unit);
            given[k] = arrays[i][k]->op;
        }
        want[i] = array_clone(arrays[i][0]);
        for (int twice = 0; twice < 2; twice++) {
            memcpy(fst_plan_add(&plan, sizes[i], 0, &status), given, (1 + terms) * sizeof *given);
            fst_operand wanted[3] = {want[i]->op, given[1], given[terms]};
            expect(wanted, terms, 0, (size_t)sizes[i], 0.5, 0);
        }
    }
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    CHECK_INT((int)plan.round_count, 2);
    CHECK_INT(fst_accumulate(&plan, 0.5, 0, &status), FST_OK);
    for (size_t i = 0; i < 5; i++) {
        CHECK(same_memory(arrays[i][0], want[i]));
        for (unsigned k = 0; k <= terms; k++)
            array_free(arrays[i][k]);
        array_free(want[i]);
    }
    fst_plan_free(&plan);
}

int main(void)
{
    const size_t counts[] = {1, 9, 256, 1000};
    level_count = supported_levels(levels);
    fst_cpu = fst_cpu_select(NULL);
    for (int to = 0; to < FST_DTYPE_COUNT; to++)
        for (int from = 0; from < FST_DTYPE_COUNT; from++)
            for (int how_to = FLAT; how_to < EXPANDED; how_to++)
                for (int how_from = FLAT; how_from < ARRANGEMENTS; how_from++)
                    for (size_t c = 0; c < 4; c++)
                        compare((fst_dtype)to, (fst_dtype)from, (arrangement)how_to,
                                (arrangement)how_from, counts[c]);
    for (unsigned terms = 1; terms <= 2; terms++)
        a_pass_covers_every_span(terms);
    return check_report();
}
