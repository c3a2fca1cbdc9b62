/* The update of every rule on every level against the reference: all combinations of types, all
 * layouts and sizes, all settings. fp32 and fp64 must be equal, not close; see reference.h. */
#include "reference.h"

enum { ABSENT = -1 };

typedef struct {
    int dtype[FST_OP_COUNT]; /* or ABSENT */
    arrangement how[FST_OP_COUNT];
    int64_t total, begin; /* elements that there are, and the first that is updated */
    size_t count;
} shape;

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

static void make(const shape *what, array *operand[FST_OP_COUNT])
{
    for (size_t k = 0; k < FST_OP_COUNT; k++) {
        operand[k] = NULL;
        if (what->dtype[k] == ABSENT)
            continue;
        operand[k] = array_new((fst_dtype)what->dtype[k], what->how[k], what->total);
        array_fill(operand[k], what->dtype[k] == FST_I16 ? random_remainder
                               : k > FST_OP_STATE        ? random_positive
                                                         : random_value);
    }
    if (operand[FST_OP_MASTER] &&
        what->dtype[FST_OP_MASTER] !=
            FST_I16) /* every third element of the parameter was written since */
        for (int64_t i = 0; i < what->total; i++)
            if (i % 3)
                set(&operand[FST_OP_PARAM]->op, i, get(&operand[FST_OP_MASTER]->op, i));
}

static void copy(array *const from[FST_OP_COUNT], array *to[FST_OP_COUNT],
                 fst_operand op[FST_OP_COUNT])
{
    for (size_t k = 0; k < FST_OP_COUNT; k++) {
        to[k] = from[k] ? array_clone(from[k]) : NULL;
        op[k] = to[k] ? to[k]->op : (fst_operand){.data = NULL};
    }
}

static void release(array *operand[FST_OP_COUNT])
{
    for (size_t k = 0; k < FST_OP_COUNT; k++)
        array_free(operand[k]);
}

static void describe(const char *level, size_t operand, const shape *what, const update_case *c)
{
    fprintf(stderr, "%s: %s%s, operand %zu; types", level, fst_rules[c->rule].name,
            c->wide ? " in fp64" : "", operand);
    for (size_t k = 0; k < FST_OP_COUNT; k++)
        fprintf(stderr, " %s", what->dtype[k] == ABSENT ? "-" : dtype_names[what->dtype[k]]);
    fprintf(stderr, "; layout %d, elements %" PRId64 " + %zu; write_grad %d\n", what->how[0],
            what->begin, what->count, c->write_grad);
}

/* One update by the reference and by every level, from the same bits to the same bits. */
static void compare(const shape *what, const update_case *c)
{
    array *start[FST_OP_COUNT], *want[FST_OP_COUNT], *got[FST_OP_COUNT];
    fst_operand op[FST_OP_COUNT];
    const fst_update_args args = args_of(c);
    make(what, start);
    copy(start, want, op);
    expected_update(op, what->begin, (int64_t)what->count, c);
    for (size_t i = 0; i < level_count; i++) {
        int same = 1;
        copy(start, got, op);
        levels[i]->update(op, what->begin, what->count, &args, c->inv_scale, c->write_grad);
        for (size_t k = 0; same && k < FST_OP_COUNT; k++)
            if (got[k] && !same_memory(got[k], want[k])) {
                describe(levels[i]->name, k, what, c);
                same = 0;
            }
        CHECK(same);
        release(got);
    }
    release(want);
    release(start);
}

/* Whether the rule takes Adam's hyper-parameters. */
static int is_adam(fst_rule rule)
{
    return rule == FST_RULE_adam || rule == FST_RULE_amsgrad || rule == FST_RULE_radam;
}

/* Everything that a rule looks at, at once: decay, look-ahead, dampening; step 2. */
static update_case usual(fst_rule rule)
{
    static const double hyper[FST_RULE_COUNT][FST_MAX_HYPER] = {
        [FST_RULE_adam] = {0.01, 0.9, 0.999, 1e-8, 0.1, 1.0},
        [FST_RULE_amsgrad] = {0.01, 0.9, 0.999, 1e-8, 0.1, 0.0},
        [FST_RULE_sgd] = {0.1, 0.0, 0.0, 0.01, 0.0},
        [FST_RULE_momentum] = {0.1, 0.9, 0.3, 0.01, 1.0},
        [FST_RULE_lion] = {0.001, 0.9, 0.99, 0.1},
        [FST_RULE_adagrad] = {0.01, 0.3, 0.01, 1e-8},
        [FST_RULE_rmsprop] = {0.01, 0.9, 1e-8, 0.01, 0.0},
        [FST_RULE_rmsprop_momentum] = {0.01, 0.9, 1e-8, 0.01, 0.8},
        [FST_RULE_rmsprop_centered] = {0.01, 0.9, 1e-8, 0.01, 0.0},
        [FST_RULE_rmsprop_centered_momentum] = {0.01, 0.9, 1e-8, 0.01, 0.8},
        [FST_RULE_adamax] = {0.01, 0.9, 0.999, 1e-8, 0.1},
        [FST_RULE_adadelta] = {0.5, 0.9, 1e-6, 0.01},
        [FST_RULE_radam] = {0.01, 0.9, 0.3, 1e-8, 0.1, 1.0},
        [FST_RULE_rprop] = {0.01, 0.5, 1.2, 1e-6, 50.0},
        [FST_RULE_nadam] = {0.01, 0.9, 0.999, 1e-8, 0.1, 1.0, 0.3, 0.2},
        [FST_RULE_asgd] = {0.01, 0.3, 0.75, 0.0, 0.1, 0.0, 0.4, 0.01},
    };
    update_case c = {.rule = rule, .step = 2.0, .inv_scale = 1.0 / 1024.0, .clip = 0.37};
    memcpy(c.hyper, hyper[rule], sizeof c.hyper);
    c.sign = 1.0;
    return c;
}

static shape all_of(fst_rule rule, fst_dtype dtype, arrangement how, int64_t begin, size_t count)
{
    shape what = {.total = begin + (int64_t)count, .begin = begin, .count = count};
    for (unsigned k = 0; k < FST_OP_COUNT; k++) {
        const int there =
            k < FST_OP_MASTER || (k >= FST_OP_STATE && k < FST_OP_STATE + fst_rules[rule].states);
        what.dtype[k] = there ? (int)dtype : ABSENT;
        what.how[k] = how;
    }
    return what;
}

/* Types of parameter, gradient, states and master, each on its own. The update is in double for an
 * fp64 value, as a plan has it, and the other way round. */
static void all_types(fst_rule rule)
{
    for (int p = 0; p < FST_DTYPE_COUNT; p++)
        for (int g = 0; g < FST_DTYPE_COUNT; g++)
            for (int s = 0; s < FST_DTYPE_COUNT; s++)
                for (int master = ABSENT; master <= FST_F64; master++)
                    for (int other_way = 0; other_way < 2; other_way++) {
                        update_case c = usual(rule);
                        shape what = all_of(rule, FST_F32, FLAT, 3, 517);
                        c.write_grad = (p + g + s + master + other_way) & 1;
                        c.wide = ((master == ABSENT ? p : master) == FST_F64) ^ other_way;
                        what.dtype[FST_OP_PARAM] = p;
                        what.dtype[FST_OP_GRAD] = g;
                        what.dtype[FST_OP_MASTER] = master;
                        for (unsigned k = 0; k < fst_rules[rule].states; k++)
                            what.dtype[FST_OP_STATE + k] = (s + (int)k) % FST_DTYPE_COUNT;
                        compare(&what, &c);
                        if (fst_rules[rule].states == 0 && s > 0)
                            return;
                    }
}

/* A bf16 parameter with its remainder, beside gradients and states of each type; where all lie one
 * after another, and not. */
static void in_halves(fst_rule rule)
{
    for (int g = 0; g < FST_DTYPE_COUNT; g++)
        for (int s = 0; s < FST_DTYPE_COUNT; s++)
            for (int how = FLAT; how < EXPANDED; how++)
                for (unsigned bits = 0; bits < 8; bits++) {
                    update_case c = usual(rule);
                    shape what = all_of(rule, FST_BF16, FLAT, bits & 1 ? 3 : 0, how ? 77 : 517);
                    what.dtype[FST_OP_GRAD] = g;
                    what.dtype[FST_OP_MASTER] = FST_I16;
                    what.how[FST_OP_MASTER] = how == NEGATED ? FLAT : (arrangement)how;
                    what.how[FST_OP_PARAM] = bits & 2 ? FLAT : (arrangement)how;
                    if (how == NEGATED_TRANSPOSED)
                        what.how[FST_OP_MASTER] = TRANSPOSED;
                    for (unsigned k = 0; k < fst_rules[rule].states; k++)
                        what.dtype[FST_OP_STATE + k] = s;
                    c.write_grad = (int)(bits >> 2);
                    c.wide = s == FST_F64;
                    c.clip = bits & 1 ? 0.37 : 1.0;
                    compare(&what, &c);
                }
}

/* bf16 states that are rounded by noise, beside parameters and gradients of each type; from any
 * element on, in any layout. */
static void with_noise(fst_rule rule)
{
    for (int p = 0; p < FST_DTYPE_COUNT; p++)
        for (int how = FLAT; how < EXPANDED; how++)
            for (unsigned bits = 0; bits < 16; bits++) {
                const int64_t begin = bits & 1 ? (int64_t)random_below(40) : 0;
                update_case c = usual(rule);
                shape what = all_of(rule, (fst_dtype)p, FLAT, begin, 1 + random_below(700));
                what.dtype[FST_OP_GRAD] = bits & 2 ? p : FST_F32;
                what.dtype[FST_OP_MASTER] = p == FST_BF16 && bits & 4 ? FST_I16 : ABSENT;
                for (unsigned k = 0; k < fst_rules[rule].states; k++) {
                    what.dtype[FST_OP_STATE + k] = bits & 8 && k ? FST_F32 : FST_BF16;
                    what.how[FST_OP_STATE + k] = (arrangement)how;
                }
                c.wide = p == FST_F64;
                c.noisy = 1;
                c.noise = (fst_noise){{(uint32_t)random_bits(), (uint32_t)random_bits()},
                                      (uint32_t)random_below(9),
                                      (uint32_t)random_below(9)};
                compare(&what, &c);
            }
}

/* Every operand in an order of its own, and a gradient that is one row seen again and again. */
static void all_layouts_and_sizes(fst_rule rule, fst_dtype dtype)
{
    static const int64_t begins[] = {0, 1, 13, 511, 16383};
    for (size_t size = 1; size <= 16384; size = size == 70    ? 511
                                                : size == 515 ? 1025
                                                : size > 1024 ? size * 4 - 4
                                                              : size + 1)
        for (int how = FLAT; how <= ARRANGEMENTS; how++) {
            /* The last one in an eighth of the sizes: most of the time goes into what is before. */
            const int64_t begin = begins[random_below(size % 8 ? 4 : 5)];
            update_case c = usual(rule);
            shape what = all_of(rule, dtype, (arrangement)(how % ARRANGEMENTS), begin, size);
            c.wide = dtype == FST_F64;
            c.write_grad = (int)random_below(2);
            if (how == EXPANDED || how == ARRANGEMENTS)
                for (unsigned k = 0; k < FST_OP_COUNT; k++)
                    what.how[k] = (arrangement)((k + size) % EXPANDED);
            if (how == EXPANDED) {
                c.write_grad = 0;
                what.how[FST_OP_GRAD] = EXPANDED;
            }
            compare(&what, &c);
        }
}

static void all_settings(fst_rule rule, fst_dtype dtype)
{
    static const double scales[] = {1.0, 1.0 / 65536.0, 3.7, 1e-42, 1e30};
    static const double clips[] = {1.0, 0.123456789, 0.0, NAN};
    for (size_t scale = 0; scale < sizeof scales / sizeof scales[0]; scale++)
        for (size_t clip = 0; clip < sizeof clips / sizeof clips[0]; clip++)
            for (unsigned bits = 0; bits < 32; bits++) {
                update_case c = usual(rule);
                const shape what = all_of(rule, dtype, bits & 16 ? STRIDED : FLAT, 1, 70);
                c.wide = dtype == FST_F64;
                c.inv_scale = scales[scale];
                c.clip = clips[clip];
                c.sign = bits & 1 ? -1.0 : 1.0;
                c.write_grad = bits >> 1 & 1;
                c.step = bits & 4 ? 1.0 : 3.0;
                const int switched = is_adam(rule) ? 5 : 4;
                if (bits & 8)
                    c.hyper[switched] = 1.0 - c.hyper[switched];
                if (bits & 16)
                    c.hyper[switched == 5 ? 4 : 3] = 0.0; /* no weight decay */
                compare(&what, &c);
            }
}

/* An infinite gradient, an infinite or NaN state, 0 / 0: nothing is filtered and nothing is lost.
 * All combinations of a few values in parameter, gradient and three states. */
static void nonfinite_values_go_through(fst_rule rule)
{
    static const double values[] = {0.0, -0.0, 1.0, INFINITY, -INFINITY, NAN, 0x1p-149, 3e38};
    enum { VALUES = sizeof values / sizeof values[0], COUNT = 1 << 15 };
    update_case c = usual(rule);
    const shape what = all_of(rule, FST_F32, FLAT, 0, COUNT);
    c.inv_scale = c.clip = 1.0;
    if (is_adam(rule))
        c.hyper[3] = 0.0; /* eps */
    const fst_update_args args = args_of(&c);
    array *start[FST_OP_COUNT], *want[FST_OP_COUNT], *got[FST_OP_COUNT];
    fst_operand op[FST_OP_COUNT];
    make(&what, start);
    for (int64_t i = 0, place = 1; place < COUNT; place *= VALUES, i++)
        for (int64_t at = 0; at < COUNT; at++)
            if (start[i < 2 ? i : FST_OP_STATE + i - 2])
                set(&start[i < 2 ? i : FST_OP_STATE + i - 2]->op, at, values[at / place % VALUES]);
    copy(start, want, op);
    expected_update(op, 0, COUNT, &c);
    for (size_t level = 0; level < level_count; level++) {
        copy(start, got, op);
        levels[level]->update(op, 0, COUNT, &args, c.inv_scale, 0);
        for (size_t k = 0; k < FST_OP_COUNT; k++)
            CHECK(!got[k] || same_memory(got[k], want[k]));
        release(got);
    }
    release(want);
    release(start);
}

static void levels_are_found_by_name(void)
{
    const char *name, *best = NULL;
    size_t index = 0;
    int supported = 0;
    for (; (name = fst_cpu_level(index, &supported)); index++) {
        const fst_cpu_kernels *kernels = fst_cpu_select(name);
        CHECK((kernels != NULL) == (supported != 0));
        CHECK(!kernels || !strcmp(kernels->name, name));
        best = supported ? name : best;
    }
    CHECK(index > 0 && !strcmp(fst_cpu_level(0, &supported), "base") && supported);
    CHECK(best && !strcmp(fst_cpu_select(NULL)->name, best));
    CHECK(fst_cpu_select("mmx") == NULL);
    CHECK(fst_cpu_select("") == NULL);
}

/* In blocks of their own size, so that AddressSanitizer sees a byte too far. */
static void channels_are_split(const fst_cpu_kernels *level)
{
    for (size_t count = 0; count < 150; count++) {
        unsigned char *pixels = malloc(3 * count + !count), *planes = malloc(3 * count + !count);
        for (size_t i = 0; i < 3 * count; i++)
            pixels[i] = (unsigned char)random_bits();
        level->split(count, planes, pixels);
        for (size_t i = 0; i < 3 * count; i++)
            CHECK_INT(planes[i % 3 * count + i / 3], pixels[i]);
        free(pixels);
        free(planes);
    }
}

/* How a loop reaches its elements depends on the number of states, which the first rules have from
 * 0 to 3. All rules would take minutes under AddressSanitizer. */
#if defined(__SANITIZE_ADDRESS__)
enum { RULES_IN_ALL_LAYOUTS = FST_RULE_lion + 1 };
#else
enum { RULES_IN_ALL_LAYOUTS = FST_RULE_COUNT };
#endif

int main(void)
{
    level_count = supported_levels(levels);
    for (size_t i = 0; i < level_count; i++)
        channels_are_split(levels[i]);
    levels_are_found_by_name();
    for (int rule = 0; rule < FST_RULE_COUNT; rule++) {
        all_types((fst_rule)rule);
        in_halves((fst_rule)rule);
        with_noise((fst_rule)rule);
        for (int dtype = 0; dtype < FST_DTYPE_COUNT && rule < RULES_IN_ALL_LAYOUTS; dtype++) {
            all_layouts_and_sizes((fst_rule)rule, (fst_dtype)dtype);
            all_settings((fst_rule)rule, (fst_dtype)dtype);
        }
        nonfinite_values_go_through((fst_rule)rule);
    }
    return check_report();
}
