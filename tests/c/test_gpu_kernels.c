/* From a plan through the driver to the real kernels, which a simulator runs behind the fake
 * driver: many steps over the same tables have the bits that the CPU has. */
#include "step.h"

#include "fake_cuda.h"
#include "gpu/launch.h"

enum { STEPS = 6 };

static const unsigned char fatbin[24] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8};
static fst_status status;

/* What the kernels of a step read and write besides the tensors; they run late. */
typedef struct {
    double scale, found_inf, norm, lr[MAX_GROUPS];
} numbers;

static void add(model *m, unsigned group, int64_t count, fst_dtype dtype, arrangement how)
{
    param *p = &m->params[m->param_count];
    const unsigned states = fst_rules[m->groups[group].rule].states;
    *p = (param){.count = count, .group = group, .wide = dtype == FST_F64, .value = 2.0};
    p->counts = m->param_count % 3 != 2;
    p->is_double = m->param_count % 2;
    scalar_set(&m->steps[m->param_count++], p->is_double, 0.0);
    for (unsigned k = 0; k < FST_OP_COUNT; k++) {
        const int there = k == FST_OP_PARAM || k == FST_OP_GRAD ||
                          (k >= FST_OP_STATE && k < FST_OP_STATE + states);
        p->array[k] = there && count ? m->array_count : -1;
        /* a gradient moves from step to step: it has two arrays */
        for (int twice = 0; there && count && twice < 1 + (k == FST_OP_GRAD); twice++) {
            array *a = array_new(dtype, how, count);
            array_fill(a, k >= FST_OP_STATE ? random_positive : random_unit);
            m->arrays[m->array_count++] = a;
        }
    }
}

static model *new_model(void)
{
    static const double hyper[2][FST_MAX_HYPER] = {{0.0078125, 0.9, 0.999, 1e-8, 0.1, 1.0},
                                                   {0.125, 0.9, 0.3, 0.01, 1.0}};
    model *m = must_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->group_count = 2;
    for (int g = 0; g < 2; g++) {
        m->groups[g] = (model_group){
            .rule = g ? FST_RULE_momentum : FST_RULE_adam, .maximize = g, .lr_on_device = g};
        memcpy(m->groups[g].hyper, hyper[g], sizeof hyper[g]);
    }
    add(m, 0, 17000, FST_F32, FLAT);
    add(m, 0, 700, FST_BF16, TRANSPOSED);
    add(m, 0, 330, FST_F32, NEGATED);
    add(m, 1, 301, FST_F64, STRIDED);
    add(m, 1, 0, FST_F32, FLAT);
    add(m, 1, 1025, FST_F16, FLAT);
    add(m, 0, 1, FST_F32, FLAT);
    return m;
}

static void move_gradients(model *m, int step)
{
    for (int i = 0; i < m->param_count; i++)
        if (m->params[i].count)
            m->params[i].array[FST_OP_GRAD] += step == 0 ? 0 : step % 2 ? 1 : -1;
}

static void gpu_step(model *m, fst_gpu_tables *tables, const options *o, numbers *n)
{
    device d;
    fst_plan plan;
    model_plan(m, o, &plan);
    const fst_work work = fst_plan_work(&plan);
    device_make(&d, &work, 1);
    device_add_spans(&d, m, o, n->lr);
    const fst_gpu_rules rules = {.spans = d.spans,
                                 .groups = d.groups,
                                 .span_count = work.span_count + 1,
                                 .group_count = (size_t)m->group_count};
    scalar_set(&n->scale, o->scale_is_double, o->scale);
    scalar_set(&n->found_inf, o->found_is_double, o->found_inf);
    fst_begin_launch begin = {.max_norm = o->max_norm,
                              .measure_found_inf = o->measure_found_inf,
                              .norm = scalar_at(&n->norm, o->norm_is_double)};
    begin.measure = o->measure_found_inf || !isnan(o->max_norm);
    if (!isnan(o->scale))
        begin.grad_scale = scalar_at(&n->scale, o->scale_is_double);
    if (!isnan(o->found_inf))
        begin.found_inf = scalar_at(&n->found_inf, o->found_is_double);
    const fst_update_launch update = {.write_grad = o->write_grad};
    CHECK_INT(fst_gpu_tables_set(tables, &work, &rules, NULL, &status), FST_OK);
    CHECK_INT(fst_gpu_step(tables, &begin, &update, &status), FST_OK);
    device_free(&d);
    fst_plan_free(&plan);
}

/* The norm, or NaN where nothing was measured, as the device writes it. */
static int same_numbers(const numbers *n, const options *o, const outcome *want)
{
    const double norm = o->norm_is_double ? want->norm : (double)(float)want->norm;
    return same_double(scalar_get(&n->norm, o->norm_is_double), norm) &&
           (isnan(o->found_inf) ||
            same_double(scalar_get(&n->found_inf, o->found_is_double), want->found_inf));
}

static void steps(const options *o, size_t lag, fst_gpu_tables *tables)
{
    model *got = new_model(), *want = model_clone(got);
    numbers all[STEPS];
    outcome expected[STEPS];
    fake_cuda_lag(lag);
    for (int step = 0; step < STEPS; step++) {
        options now = *o;
        if (!isnan(now.found_inf))
            now.found_inf = step == 2 && !now.measure_found_inf; /* a step that is skipped */
        move_gradients(got, step);
        move_gradients(want, step);
        gpu_step(got, tables, &now, &all[step]);
        expected[step] = cpu_step(want, &now);
    }
    fake_cuda_lag(0);
    fake_cuda_synchronize();
    const char *complaint = fake_cuda_complaint();
    if (!CHECK(!complaint))
        fprintf(stderr, "    %s\n", complaint);
    for (int i = 0; i < got->array_count; i++)
        CHECK(same_memory(got->arrays[i], want->arrays[i]));
    CHECK_BYTES(got->steps, want->steps, sizeof got->steps);
    for (int step = 0; step < STEPS; step++)
        CHECK(same_numbers(&all[step], o, &expected[step]));
    model_free(got);
    model_free(want);
}

/* Gradients are unscaled, or scaled and measured; then clipped by the norm that this left on the
 * device, and clamped. With `shared` one tensor is listed twice. */
static void explicit_calls(fst_gpu_tables *tables, int unscale, int shared)
{
    model *got = new_model(), *want = model_clone(got);
    const options o = {.scale = NAN, .write_grad = 1};
    fst_measurement seen = {0};
    double norm, shown = 0.0;
    fst_plan plan;
    if (shared) {
        got->params[5] = got->params[1];
        want->params[5] = want->params[1];
    }
    model_plan(want, &o, &plan);
    CHECK_INT((int64_t)plan.round_count, 1 + shared);
    if (unscale)
        CHECK_INT(fst_unscale(&plan, FST_OP_GRAD, 0.125, &seen, &status), FST_OK);
    else
        CHECK_INT(fst_scale(&plan, FST_OP_GRAD, 0.125, &status), FST_OK);
    CHECK_INT(fst_total_norm(&plan, FST_OP_GRAD, 2.0, &norm, &status), FST_OK);
    if (unscale)
        norm = sqrt(seen.square_sum); /* of the products before they are rounded */
    CHECK_INT(fst_scale(&plan, FST_OP_GRAD, fst_clip_coefficient(norm, 0.5), &status), FST_OK);
    CHECK_INT(fst_clamp(&plan, FST_OP_GRAD, 0.001, &status), FST_OK);
    fst_plan_free(&plan);
    model_plan(got, &o, &plan);
    const fst_work work = fst_plan_work(&plan);
    const fst_unscale_launch inverse = {.factor = 0.125, .operand = FST_OP_GRAD};
    const fst_scale_launch scale = {.factor = 0.125, .operand = FST_OP_GRAD};
    const fst_norm_launch measure = {
        .norm = scalar_at(&shown, 1), .kind = FST_NORM_SQUARES, .operand = FST_OP_GRAD};
    const fst_scale_launch clip = {.max_norm = 0.5, .operand = FST_OP_GRAD};
    const fst_clamp_launch clamp = {.limit = 0.001, .operand = FST_OP_GRAD};
    CHECK_INT(fst_gpu_tables_set(tables, &work, NULL, NULL, &status), FST_OK);
    if (unscale) {
        CHECK_INT(fst_gpu_unscale(tables, &inverse, &status), FST_OK);
    } else {
        CHECK_INT(fst_gpu_scale(tables, &scale, 0, &status), FST_OK);
        CHECK_INT(fst_gpu_norm(tables, &measure, &status), FST_OK);
    }
    CHECK_INT(fst_gpu_scale(tables, &clip, 1, &status), FST_OK);
    CHECK_INT(fst_gpu_clamp(tables, &clamp, &status), FST_OK);
    fake_cuda_synchronize();
    CHECK(unscale || same_double(shown, norm));
    for (int i = 0; i < got->array_count; i++)
        CHECK(same_memory(got->arrays[i], want->arrays[i]));
    fst_plan_free(&plan);
    model_free(got);
    model_free(want);
}

int main(void)
{
    static const options cases[] = {
        {.scale = NAN, .found_inf = NAN, .max_norm = NAN},
        {.scale = 1024.0, .found_inf = 0.0, .max_norm = 0.5, .measure_found_inf = 1},
        {.scale = 3.7, .found_inf = 0.0, .max_norm = 1e9, .write_grad = 1, .norm_is_double = 1},
    };
    fst_cpu = fst_cpu_select(NULL);
    fst_gpu_kernels_in_memory(fatbin, sizeof fatbin);
    fst_gpu_tables *tables = fst_gpu_tables_new(0, &status);
    if (!CHECK(tables != NULL)) {
        fprintf(stderr, "    %s\n", status.message);
        return check_report();
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (size_t lag = 0; lag <= 12; lag += 12)
            steps(&cases[i], lag, tables);
    for (int i = 0; i < 4; i++)
        explicit_calls(tables, i % 2, i / 2);
    fst_gpu_tables_free(tables);
    return check_report();
}
