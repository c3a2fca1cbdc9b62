/* step.h - optimizer steps by the kernels, and by the CPU as csrc/py does them, on copies of the
 * same parameters. */
#pragma once

#include "core/rule_args.h"
#include "core/passes.h"
#include "device.h"
#include "rules/codes.h"
#include "rules/loss_scale.h"

enum { MAX_PARAMS = 16, MAX_GROUPS = 4, MAX_ARRAYS = MAX_PARAMS * FST_OP_COUNT };

typedef struct {
    int64_t count;           /* 0: without elements, it only counts */
    int64_t begin;           /* of a part of a larger parameter with states in codes */
    int array[FST_OP_COUNT]; /* index of each operand's array, -1: absent */
    unsigned group;
    int counts, is_double, negated; /* its step counter */
    fst_dtype number_dtype[FST_MAX_NUMBERS];
    double value; /* what the rule reads without one */
    int wide;
} param;

typedef struct {
    fst_rule rule;
    double hyper[FST_MAX_HYPER];
    int maximize;
    int lr_on_device, lr_is_double;
    int noisy; /* bf16 states are rounded by noise of this seed */
    uint64_t seed;
    int64_t code_rows;  /* states are in codes, in rows of so many elements; 0: they are not */
    int64_t code_begin; /* the first element, of parts of larger parameters */
} model_group;

/* Plain data but for `arrays`. */
typedef struct {
    param params[MAX_PARAMS];
    model_group groups[MAX_GROUPS];
    array *arrays[MAX_ARRAYS];
    double steps[MAX_PARAMS];                    /* counters: fp64, or fp32 in the first half */
    double numbers[MAX_PARAMS][FST_MAX_NUMBERS]; /* likewise, of any type */
    int param_count, group_count, array_count;
} model;

typedef struct {
    double scale, found_inf, max_norm; /* NaN: absent */
    int scale_is_double, found_is_double, norm_is_double;
    int measure_found_inf, write_grad;
    int negated; /* scalars are held with their signs flipped */
} options;

typedef struct {
    int skip;
    double norm, found_inf;
} outcome;

static inline int64_t scale_count_of(const param *p, uint32_t row)
{
    return fst_scale_count(p->begin + p->count, row) - fst_scales_before(p->begin, row);
}

/* The scales of a parameter's states lie with the codes of its first state. */
static inline void place_scales(model *m, const param *p)
{
    const array *first =
        p->count && p->array[FST_OP_STATE] >= 0 ? m->arrays[p->array[FST_OP_STATE]] : NULL;
    for (int k = FST_OP_STATE + 1; first && first->op.scales && k < FST_OP_COUNT; k++)
        if (p->array[k] >= 0 && m->arrays[p->array[k]]->op.scales)
            m->arrays[p->array[k]]->op.scales =
                first->op.scales + (k - FST_OP_STATE) * scale_count_of(p, first->op.row);
}

static inline model *model_clone(const model *from)
{
    model *m = must_copy(from, sizeof *from);
    for (int i = 0; i < m->array_count; i++)
        m->arrays[i] = array_clone(from->arrays[i]);
    for (int i = 0; i < m->param_count; i++)
        place_scales(m, &m->params[i]);
    return m;
}

static inline void model_free(model *m)
{
    for (int i = 0; i < m->array_count; i++)
        array_free(m->arrays[i]);
    free(m);
}

static inline double flipped(double value, int negated)
{
    return negated ? -value : value;
}

/* A scalar whose memory holds it with its sign flipped, or not. */
static inline fst_device_scalar scalar_held(void *memory, int is_double, int negated)
{
    fst_device_scalar scalar = scalar_at(memory, is_double);
    scalar.negated = negated;
    return scalar;
}

static inline double scalar_get(const void *at, int is_double)
{
    return load_value(at, is_double ? FST_F64 : FST_F32);
}

static inline void scalar_set(void *at, int is_double, double value)
{
    store_value(at, is_double ? FST_F64 : FST_F32, value);
}

/* The parameters with elements, sealed into a plan; spans are numbered like them. */
static inline void model_plan(const model *m, const options *o, fst_plan *plan)
{
    fst_status status = {0};
    fst_plan_init(plan, FST_OP_COUNT);
    fst_plan_begin(plan);
    for (int i = 0; i < m->param_count; i++) {
        if (!m->params[i].count)
            continue;
        const uint32_t span = (uint32_t)plan->span_count;
        const int64_t begin = m->params[i].begin;
        fst_operand *op = fst_plan_add_part(plan, begin, m->params[i].count, span, &status);
        for (int k = 0; k < FST_OP_COUNT; k++)
            if (m->params[i].array[k] >= 0) {
                op[k] = m->arrays[m->params[i].array[k]]->op;
                op[k].data = (char *)op[k].data - begin * (int64_t)fst_operand_size(op[k].dtype);
                if (op[k].scales)
                    op[k].scales -= fst_scales_before(begin, op[k].row);
            }
    }
    CHECK_INT(fst_plan_seal(plan, FST_OP_PARAM, o->write_grad ? 2 : 1, &status), FST_OK);
}

/* Moves the numbers of a parameter, and puts what its rule reads into `hyper`. */
static inline void cpu_move_numbers(model *m, int index, double step, double *hyper)
{
    const param *p = &m->params[index];
    const fst_rule rule = m->groups[p->group].rule;
    double *at = m->numbers[index];
    fst_numbers held = {.wide_step = p->is_double};
    for (unsigned k = 0; k < fst_numbers_count((int32_t)rule); k++) {
        held.value[k] = flipped(load_value(&at[k], p->number_dtype[k]), p->negated);
        held.dtype[k] = (int32_t)p->number_dtype[k];
    }
    const fst_numbers next = fst_rule_next_numbers(rule, held, hyper, step);
    for (unsigned k = 0; k < fst_numbers_count((int32_t)rule); k++)
        store_value(&at[k], p->number_dtype[k], flipped(next.value[k], p->negated));
}

static inline fst_noise noise_of(const model_group *g, int index, double step)
{
    return (fst_noise){
        {(uint32_t)g->seed, (uint32_t)(g->seed >> 32)}, fst_noise_step(step), (uint32_t)index};
}

/* As advance() in csrc/py/step/host_step.c. */
static inline void cpu_fill_args(model *m, fst_update_args *args, double coefficient)
{
    uint32_t span = 0;
    for (int i = 0; i < m->param_count; i++) {
        const param *p = &m->params[i];
        const model_group *g = &m->groups[p->group];
        const double step = p->counts
                                ? flipped(scalar_get(&m->steps[i], p->is_double), p->negated) + 1.0
                                : p->value;
        double hyper[FST_MAX_HYPER];
        memcpy(hyper, g->hyper, sizeof hyper);
        if (fst_numbers_count((int32_t)g->rule))
            cpu_move_numbers(m, i, step, hyper);
        if (p->count) {
            fst_update_args *a = &args[span++];
            *a = (fst_update_args){.clip_coefficient = coefficient,
                                   .sign = g->maximize ? -1.0 : 1.0,
                                   .rule = g->rule,
                                   .wide = p->wide,
                                   .noisy = g->noisy,
                                   .noise = noise_of(g, i, step)};
            fst_rule_fill_args(a, hyper, step);
        }
        if (p->counts)
            scalar_set(&m->steps[i], p->is_double, flipped(step, p->negated));
    }
}

/* As run and run_passes in csrc/py/step/step_plan.c. */
static inline outcome cpu_step(model *m, const options *o)
{
    fst_plan plan;
    fst_status status = {0};
    fst_measurement seen = {NAN, 0};
    fst_update_args args[MAX_PARAMS];
    outcome out = {0, NAN, o->found_inf};
    const double scale = o->scale_is_double ? o->scale : (double)(float)o->scale;
    const double inv_scale = isnan(o->scale)      ? 1.0
                             : o->scale_is_double ? 1.0 / scale
                                                  : (double)(float)(1.0 / scale);
    const int measure = o->measure_found_inf || !isnan(o->max_norm);
    double coefficient = 1.0;
    model_plan(m, o, &plan);
    out.skip = !o->measure_found_inf && !isnan(o->found_inf) && o->found_inf != 0.0;
    if (measure && !out.skip) {
        CHECK_INT(fst_measure(&plan, FST_OP_GRAD, inv_scale, &seen, &status), FST_OK);
        out.norm = sqrt(seen.square_sum);
        out.skip = o->measure_found_inf && seen.nonfinite;
    }
    if (o->measure_found_inf && out.skip)
        out.found_inf = 1.0;
    if (!out.skip) {
        if (!isnan(o->max_norm))
            coefficient = fst_clip_coefficient(out.norm, o->max_norm);
        cpu_fill_args(m, args, coefficient);
        CHECK_INT(fst_update(&plan, args, inv_scale, o->write_grad, &status), FST_OK);
    }
    fst_plan_free(&plan);
    return out;
}

/* The spans with elements come first, as in the plan. */
static inline void device_add_spans(device *d, model *m, const options *o, double *lr)
{
    size_t at = 0;
    for (int empty = 0; empty < 2; empty++)
        for (int i = 0; i < m->param_count; i++) {
            const param *p = &m->params[i];
            if ((p->count == 0) != empty)
                continue;
            d->spans[at] = (fst_device_span){.value = p->value,
                                             .group = p->group,
                                             .rule = (int32_t)m->groups[p->group].rule,
                                             .maximize = m->groups[p->group].maximize,
                                             .wide = p->wide,
                                             .noisy = m->groups[p->group].noisy,
                                             .noise = noise_of(&m->groups[p->group], i, 0.0)};
            if (p->count && p->array[FST_OP_STATE] >= 0) {
                const fst_operand *first = &m->arrays[p->array[FST_OP_STATE]]->op;
                d->spans[at].row = first->row;
                d->spans[at].scale_count = scale_count_of(p, first->row);
                if (first->scales)
                    d->spans[at].scales =
                        address_of(first->scales - fst_scales_before(p->begin, first->row));
            }
            if (p->counts)
                d->spans[at].step = scalar_held(&m->steps[i], p->is_double, p->negated);
            for (unsigned k = 0; k < fst_numbers_count((int32_t)m->groups[p->group].rule); k++)
                d->spans[at].numbers[k] = (fst_device_number){
                    address_of(&m->numbers[i][k]), (int32_t)p->number_dtype[k], p->negated};
            at++;
        }
    d->groups = must_alloc_poison((size_t)m->group_count * sizeof *d->groups);
    d->tables.groups = address_of(d->groups);
    for (int i = 0; i < m->group_count; i++) {
        const model_group *g = &m->groups[i];
        memcpy(d->groups[i].hyper, g->hyper, sizeof g->hyper);
        d->groups[i].lr = (fst_device_scalar){.data = 0};
        if (!g->lr_on_device)
            continue;
        scalar_set(&lr[i], g->lr_is_double, flipped(g->hyper[0], o->negated));
        d->groups[i].hyper[0] = NAN;
        d->groups[i].lr = scalar_held(&lr[i], g->lr_is_double, o->negated);
    }
}

static inline outcome device_step(model *m, const options *o, unsigned grid)
{
    device d;
    fst_plan plan;
    double lr[MAX_GROUPS], scale, found_inf, norm = -1.0;
    size_t empty = 0;
    model_plan(m, o, &plan);
    const fst_work work = fst_plan_work(&plan);
    for (int i = 0; i < m->param_count; i++)
        empty += m->params[i].count == 0;
    device_make(&d, &work, empty);
    device_add_spans(&d, m, o, lr);
    fst_begin_launch begin = {.tables = d.tables, .max_norm = o->max_norm};
    begin.measure_found_inf = o->measure_found_inf;
    begin.measure = o->measure_found_inf || !isnan(o->max_norm);
    for (int i = 0; i < m->group_count; i++)
        begin.has_numbers |= fst_numbers_count((int32_t)m->groups[i].rule) > 0;
    begin.norm = scalar_held(&norm, o->norm_is_double, o->negated);
    scalar_set(&scale, o->scale_is_double, flipped(o->scale, o->negated));
    scalar_set(&found_inf, o->found_is_double, flipped(o->found_inf, o->negated));
    if (!isnan(o->scale))
        begin.grad_scale = scalar_held(&scale, o->scale_is_double, o->negated);
    if (!isnan(o->found_inf))
        begin.found_inf = scalar_held(&found_inf, o->found_is_double, o->negated);
    device_launch(&d, "fst_begin", grid, &begin);
    for (size_t round = 0; round < work.round_count; round++) {
        fst_update_launch update = {.tables = device_round(&d, &work, round)};
        update.write_grad = o->write_grad;
        device_launch(&d, "fst_update", grid, &update);
    }
    const outcome out = {d.outcome->skip, d.outcome->norm,
                         isnan(o->found_inf)
                             ? NAN
                             : flipped(scalar_get(&found_inf, o->found_is_double), o->negated)};
    const double shown = o->norm_is_double ? out.norm : (double)(float)out.norm;
    CHECK(same_double(flipped(scalar_get(&norm, o->norm_is_double), o->negated), shown));
    device_free(&d);
    fst_plan_free(&plan);
    return out;
}

/* The same parameters, gradients, states, counters, norm and flag, bit for bit. */
static inline int same_step(const model *a, const outcome *x, const model *b, const outcome *y)
{
    int same = x->skip == y->skip && same_double(x->norm, y->norm) &&
               same_double(x->found_inf, y->found_inf) &&
               !memcmp(a->steps, b->steps, sizeof a->steps) &&
               !memcmp(a->numbers, b->numbers, sizeof a->numbers);
    for (int i = 0; i < a->array_count; i++)
        same = same && same_memory(a->arrays[i], b->arrays[i]);
    return same;
}
