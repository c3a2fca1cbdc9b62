/* The kernels of a step whose states are in codes of 8 bits, run without a GPU, against the CPU:
 * the same bits for every rule, type and layout of parameter and gradient, with blocks that end
 * anywhere.
 */
#include "../cuda/models.h"

static double ordinary(void)
{
    return random_unit() * 0.1;
}

static double tiny(void)
{
    return ldexp(random_unit(), -(int)random_below(140));
}

static double mostly_zero(void)
{
    return random_below(40) ? 0.0 : random_unit();
}

static double (*const values[])(void) = {ordinary, ordinary, tiny, mostly_zero, random_value};

static const fst_rule rules[] = {FST_RULE_adam, FST_RULE_momentum, FST_RULE_amsgrad, FST_RULE_lion};
/* Rows that are no multiple of eight, that are one but not of 64, and others. */
static const int64_t lengths[] = {1, 64, 65, 72, 100, 136, 999, 1000, 2048, 16392, 20001};
static const int64_t counts[] = {1, 7, 64, 65, 200, 1000, 1024, 4099, 16384, 16456, 40000};
enum { SHORT = 8 }; /* of these, of one chunk that is not full */

#define ANY(table) table[random_below(sizeof table / sizeof table[0])]

/* An element at which a block begins, in a larger parameter of such rows. */
static int64_t begin_in(const model_group *g)
{
    const int64_t row = fst_code_row(g->code_rows);
    return (row ? row : FST_BLOCK) * (int64_t)random_below(3) * (int64_t)random_below(300);
}

static void random_case(fst_rule rule, fst_dtype dtype, int master, placement how)
{
    static const double scales[] = {NAN, 65536.0, 3.7}, norms[] = {NAN, 0.5, 1e30};
    const options o = {ANY(scales), random_below(3) ? NAN : 0.0, ANY(norms), .measure_found_inf = 0,
                       .write_grad = (int)random_below(2)};
    const kind k = {.dtype = dtype,
                    .grad_dtype = random_below(6) ? dtype : FST_F32,
                    .how = how,
                    .grad_value = ANY(values),
                    .master = master,
                    .value = random_below(3) ? ordinary : ANY(values)};
    model *m = new_model(rule);
    for (int i = 0; i < 3; i++) {
        m->groups[i % 2].code_rows = ANY(lengths);
        m->groups[i % 2].code_begin = how <= GRAD_MISALIGNED ? begin_in(&m->groups[i % 2]) : 0;
        add_param(m, (unsigned)(i % 2), i ? counts[random_below(SHORT)] : ANY(counts), &k);
    }
    const kind plain = {dtype, dtype, FST_F32, ALIGNED, ordinary, -1, NULL};
    m->groups[0].code_rows = m->groups[0].code_begin = 0;
    add_param(m, 0, 700, &plain); /* as one that is too small for codes */
    compare(m, &o, &k);
    model_free(m);
}

/* All types and layouts, few of which have loops of their own. */
static void all_types(fst_rule rule)
{
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (int how = ALIGNED; how < PLACEMENTS; how++) {
            const int half = dtype == FST_BF16 || dtype == FST_F16;
            const int master = !half                                  ? -1
                               : dtype == FST_BF16 && random_below(2) ? FST_I16
                               : random_below(2)                      ? FST_F32
                                                                      : -1;
            random_case(rule, (fst_dtype)dtype, master, (placement)how);
        }
}

#if defined(__SANITIZE_ADDRESS__)
enum { ONE_LENGTH_IN = sizeof lengths / sizeof lengths[0] }; /* values lead to no other place */
#else
enum { ONE_LENGTH_IN = 3 };
#endif

/* The types that have loops of their own, with blocks of one in so many lengths, for each rule
 * others, and for each of these other values in each turn. */
static void all_lengths(fst_rule rule, fst_dtype dtype, int master, size_t turn)
{
    const size_t first = (turn + turn / 3) % ONE_LENGTH_IN;
    for (size_t n = first; n < sizeof lengths / sizeof lengths[0]; n += ONE_LENGTH_IN) {
        const size_t value = (n + turn) % (sizeof values / sizeof values[0]);
        const options o = {NAN, NAN, NAN, .write_grad = (int)random_below(4) == 0};
        const kind k = {.dtype = dtype,
                        .grad_dtype = dtype,
                        .grad_value = values[value],
                        .master = master,
                        .value = values[value]};
        model *m = new_model(rule);
        m->groups[0].code_rows = lengths[n];
        m->groups[0].code_begin = begin_in(&m->groups[0]);
        add_param(m, 0, counts[(n + turn) % (sizeof counts / sizeof counts[0])], &k);
        add_param(m, 0, counts[(n * 3 + turn) % (sizeof counts / sizeof counts[0])], &k);
        compare(m, &o, &k);
        model_free(m);
    }
}

/* A step that is skipped writes neither codes nor scales. */
static void skipped(void)
{
    const options o = {1024.0, 1.0, NAN, .write_grad = 0};
    const kind k = {.grad_value = ordinary, .master = -1};
    model *m = new_model(FST_RULE_adam);
    m->groups[0].code_rows = 1;
    add_param(m, 0, 5000, &k);
    compare(m, &o, &k);
    model *got = model_clone(m);
    device_step(got, &o, 2);
    for (int i = 0; i < m->array_count; i++)
        CHECK(same_memory(m->arrays[i], got->arrays[i]));
    model_free(got);
    model_free(m);
}

int main(void)
{
    for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
        all_lengths(rules[r], FST_F32, -1, 3 * r);
        all_lengths(rules[r], FST_BF16, FST_I16, 3 * r + 1);
        all_lengths(rules[r], FST_BF16, -1, 3 * r + 2);
        all_types(rules[r]);
    }
    skipped();
    return check_report();
}
