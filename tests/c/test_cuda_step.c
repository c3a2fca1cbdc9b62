/* The kernels of a step, and of the loss scale after it, run without a GPU, against the CPU: the
 * same bits for every rule, type, layout and setting, for any number of blocks and any order of
 * blocks and threads. */
#include "../cuda/models.h"

static options random_options(void)
{
    static const double scales[] = {NAN, 1.0, 65536.0, 3.7, 1e-30, INFINITY, 0.0};
    static const double norms[] = {NAN, NAN, 0.5, 1e30, 0.0, INFINITY};
    options o = {.scale = scales[random_below(sizeof scales / sizeof scales[0])],
                 .max_norm = norms[random_below(sizeof norms / sizeof norms[0])],
                 .found_inf = NAN};
    const size_t found = random_below(8);
    if (found < 6)
        o.found_inf = found == 0 ? 2.0 : 0.0;
    o.measure_found_inf = found > 2 && found < 6;
    o.write_grad = (int)random_below(2);
    o.scale_is_double = (int)random_below(2);
    o.found_is_double = (int)random_below(2);
    o.norm_is_double = (int)random_below(2);
    o.negated = (int)random_below(2);
    return o;
}

static double (*const grad_values[])(void) = {random_unit, random_unit, random_value};

static kind random_kind(fst_dtype dtype, fst_dtype grad_dtype, placement how)
{
    kind k = {.dtype = dtype, .grad_dtype = grad_dtype, .state_dtype = dtype, .how = how};
    const int half = dtype == FST_BF16 || dtype == FST_F16;
    k.grad_value = grad_values[random_below(3)];
    k.master = half && random_below(2) ? FST_F32 : -1;
    if (dtype == FST_BF16 && random_below(3) == 0)
        k.master = FST_I16;
    if (half && random_below(2))
        k.state_dtype = FST_F32;
    if (random_below(4) == 0)
        k.state_dtype = FST_BF16;
    return k;
}

/* Several tensors in several groups; chunks that do not fill, and once a tensor of one or two. */
static void all_kinds(fst_rule rule, fst_dtype dtype, fst_dtype grad_dtype, placement how)
{
    static const int64_t sizes[] = {1, 5, 8, 31, 255, 256, 517, 1024, 2051, 4096};
    for (int round = 0; round < 3; round++) {
        model *m = new_model(rule);
        const kind k = random_kind(dtype, grad_dtype, how);
        for (unsigned group = 0; group < 2; group++) {
            add_param(m, group, 0, &k);
            for (int i = 0; i < 2; i++)
                add_param(m, group, sizes[random_below(sizeof sizes / sizeof sizes[0])], &k);
        }
        const kind other = random_kind((fst_dtype)random_below(FST_DTYPE_COUNT), FST_F32,
                                       (placement)random_below(PLACEMENTS));
        add_param(m, 2, 1 + (int64_t)random_below(300), &other);
        add_param(m, 2, (round ? 1 : 16384) + (int64_t)(random_below(2) * random_below(1000)), &k);
        const options o = random_options();
        compare(m, &o, &k);
        model_free(m);
    }
}

/* Every type of every operand, also those that a plan would not make. */
static void all_types(fst_rule rule)
{
    for (int p = 0; p < FST_DTYPE_COUNT; p++)
        for (int g = 0; g < FST_DTYPE_COUNT; g++)
            for (int s = 0; s < FST_DTYPE_COUNT; s++) {
                model *m = new_model(rule);
                kind k = {(fst_dtype)p, (fst_dtype)g, (fst_dtype)s, ALIGNED,
                          random_value, -1,           NULL};
                k.master = p < FST_BF16             ? -1
                           : p == FST_BF16 && g % 2 ? FST_I16
                           : s % 2                  ? FST_F32
                                                    : FST_F64;
                const options o = {NAN, NAN, NAN, .write_grad = s % 2};
                add_param(m, 0, 1037, &k);
                m->params[0].wide ^= g % 2;
                compare(m, &o, &k);
                model_free(m);
            }
}

/* Of any size that a float has, and of ordinary size; never negative, as second moments are. */
static double any_size(void)
{
    return ldexp(fabs(random_unit()), (int)random_below(276) - 149);
}

static double ordinary(void)
{
    return 0.001 + fabs(random_unit());
}

static double ordinary_or_zero(void)
{
    return random_below(4) ? ordinary() : 0.0;
}

/* As where a mask keeps some parameters and their gradients at 0. */
static double mostly_zero(void)
{
    return random_below(4) ? 0.0 : any_size();
}

/* Sets a rule's eps, if it has one, to a value that few use. */
static void set_odd_eps(model *m, fst_rule rule)
{
    static const double odd[] = {0.0, 1e-20, 1e-15, 2.0};
    for (unsigned i = 0; i < fst_rules[rule].hyper_count; i++)
        if (!strcmp(fst_rules[rule].hyper[i], "eps"))
            m->groups[0].hyper[i] = odd[random_below(sizeof odd / sizeof odd[0])];
}

/* What quick_math.h computes, and what it must leave to sqrtf and /. */
static void sizes_of_values(fst_rule rule)
{
    static const fst_dtype types[][2] = {
        {FST_F32, FST_F32}, {FST_BF16, FST_BF16}, {FST_BF16, FST_F32}, {FST_F16, FST_F32}};
    static double (*const values[])(void) = {any_size, ordinary, ordinary_or_zero, mostly_zero};
    for (size_t type = 0; type < sizeof types / sizeof types[0]; type++)
        for (size_t value = 0; value < sizeof values / sizeof values[0]; value++)
            for (int few = 0; few < 2; few++) {
                model *m = new_model(rule);
                kind k = {types[type][0], types[type][0], types[type][1],
                          ALIGNED,        values[value],  -1,
                          values[value]};
                const options o = {NAN, NAN, NAN, .write_grad = few};
                if (few)
                    set_odd_eps(m, rule);
                for (int i = 0; i < (few ? 1 : 9); i++) /* of which warps take some alone */
                    add_param(m, 0, i % 3 ? 1024 : 4096 + 260, &k);
                compare(m, &o, &k);
                model_free(m);
            }
}

/* All settings that decide whether a step is skipped and what it multiplies by. */
static void all_settings(void)
{
    static const double scales[] = {NAN, 1024.0, 0.0}, norms[] = {NAN, 0.25, 1e9};
    static const double founds[] = {NAN, 0.0, 1.0, NAN, 0.0, 3.0};
    for (size_t scale = 0; scale < 3; scale++)
        for (size_t norm = 0; norm < 3; norm++)
            for (size_t found = 0; found < 6; found++)
                for (int values = 1; values < 3; values++) {
                    model *m = new_model(FST_RULE_adam);
                    kind k = random_kind(FST_F32, FST_F32, ALIGNED);
                    options o = {scales[scale], founds[found], norms[norm], .write_grad = values};
                    k.grad_value = grad_values[values];
                    o.measure_found_inf = found >= 3 && !isnan(o.found_inf);
                    add_param(m, 0, 777, &k);
                    add_param(m, 1, 0, &k);
                    compare(m, &o, &k);
                    model_free(m);
                }
}

/* Parameters that are views of the same memory are updated one after the other. */
static void rounds(void)
{
    model *m = new_model(FST_RULE_momentum);
    const kind k = {FST_F32, FST_F32, FST_F32, ALIGNED, random_unit, -1, NULL};
    const options o = {NAN, NAN, 0.5, .write_grad = 0};
    for (int i = 0; i < 3; i++)
        add_param(m, 0, 3000, &k);
    m->params[2].array[FST_OP_PARAM] = m->params[0].array[FST_OP_PARAM];
    fst_plan plan;
    model_plan(m, &o, &plan);
    CHECK_INT((int64_t)plan.round_count, 2);
    fst_plan_free(&plan);
    compare(m, &o, &k);
    model_free(m);
}

/* A gradient that is one row seen again and again, in parameters of other layouts. */
static void expanded_gradients(void)
{
    for (int how = ALIGNED; how < PLACEMENTS; how++) {
        model *m = new_model(FST_RULE_adam);
        const kind k = {FST_F32, FST_F32, FST_F32, (placement)how, random_unit, -1, NULL};
        const options o = {NAN, NAN, 0.5, .write_grad = 0};
        add_param(m, 0, 2100, &k);
        array **grad = &m->arrays[m->params[0].array[FST_OP_GRAD]];
        array_free(*grad);
        *grad = array_new(FST_F32, EXPANDED, 2100);
        array_fill(*grad, random_unit);
        compare(m, &o, &k);
        model_free(m);
    }
}

static void no_parameters(void)
{
    model *m = new_model(FST_RULE_adam);
    const kind k = random_kind(FST_F32, FST_F32, ALIGNED);
    const options o = {1024.0, 0.0, 1.0, .measure_found_inf = 1};
    compare(m, &o, &k);
    add_param(m, 0, 0, &k);
    compare(m, &o, &k);
    model_free(m);
}

/* More step counters than a block advances in one go, and the arguments of each rule. */
static void many_counters(int skipped)
{
    enum { COUNT = 2600 };
    device d;
    double *steps = must_alloc(COUNT * sizeof *steps);
    float found_inf = (float)skipped;
    const fst_work nothing = {.width = FST_OP_COUNT};
    const double *hyper = usual[FST_RULE_adam];
    device_make(&d, &nothing, COUNT);
    d.groups = must_alloc_poison(sizeof *d.groups);
    d.tables.groups = address_of(d.groups);
    memcpy(d.groups->hyper, hyper, sizeof d.groups->hyper);
    d.groups->lr = (fst_device_scalar){.data = 0};
    for (int i = 0; i < COUNT; i++) {
        steps[i] = i % 1000;
        d.spans[i] = (fst_device_span){scalar_at(&steps[i], 1), .rule = FST_RULE_adam};
        d.spans[i].wide = i % 2;
    }
    fst_begin_launch begin = {.tables = d.tables, .max_norm = NAN};
    begin.found_inf = scalar_at(&found_inf, 0);
    device_launch(&d, "fst_begin", 3, &begin);
    CHECK_INT(d.outcome->skip, skipped);
    for (int i = 0; i < COUNT; i++) {
        fst_update_args want = {.rule = FST_RULE_adam, .wide = i % 2};
        const fst_rule_args *got = (const fst_rule_args *)d.args + i;
        const size_t size = i % 2 ? sizeof got->adam_f64 : sizeof got->adam_f32;
        CHECK(steps[i] == i % 1000 + 1 - skipped);
        fst_rule_fill_args(&want, hyper, i % 1000 + 1);
        if (!skipped)
            CHECK_BYTES(got, &want.rule_args, size);
    }
    device_free(&d);
    free(steps);
}

static void loss_scales(void)
{
    const fst_loss_scale_args args = {2.0, 0.5, 1.0, 4096.0, 3, 2};
    float scale = 1024.0f, found[2] = {0.0f, 0.0f}, want = scale;
    int32_t growth = 0, left = 2, want_growth = 0, want_left = 2;
    fst_loss_scale_launch launch = {
        .scale = address_of(&scale),
        .growth_tracker = address_of(&growth),
        .found_inf = scalar_at(found, 0),
        .growth_factor = args.growth_factor,
        .backoff_factor = args.backoff_factor,
        .min_scale = args.min_scale,
        .max_scale = args.max_scale,
        .growth_interval = args.growth_interval,
        .hysteresis = args.hysteresis,
    };
    for (int i = 0; i < 200; i++) {
        int32_t once = 1;
        launch.hysteresis_left = i % 5 ? address_of(&left) : 0;
        found[0] = random_below(3) ? 0.0f : 2.0f;
        device_launch(NULL, "fst_loss_scale", 1, &launch);
        fst_loss_scale_update(&want, &want_growth, i % 5 ? &want_left : &once, found[0], &args);
        CHECK(scale == want && growth == want_growth && left == want_left);
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
    for (int rule = 0; rule < FST_RULE_COUNT; rule++) {
        for (int dtype = 0; dtype < FST_DTYPE_COUNT && rule < RULES_IN_ALL_LAYOUTS; dtype++)
            for (int own = 0; own < (dtype == FST_F32 ? 1 : 2); own++)
                for (int how = ALIGNED; how < PLACEMENTS; how++)
                    all_kinds((fst_rule)rule, (fst_dtype)dtype, own ? (fst_dtype)dtype : FST_F32,
                              (placement)how);
        all_types((fst_rule)rule);
        if (rule < RULES_IN_ALL_LAYOUTS)
            sizes_of_values((fst_rule)rule);
    }
    all_settings();
    rounds();
    expanded_gradients();
    no_parameters();
    for (int skipped = 0; skipped < 2; skipped++)
        many_counters(skipped);
    loss_scales();
    return check_report();
}
