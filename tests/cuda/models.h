/* models.h - parameters of all kinds to step. */
#pragma once

#include "step.h"

typedef enum {
    ALIGNED,
    MISALIGNED,
    GRAD_MISALIGNED,
    BY_STRIDES,
    BY_COLUMNS,
    BY_SIGNS,
    BY_SIGNS_AND_COLUMNS,
    MIXED,
    PLACEMENTS,
} placement;

static const double usual[FST_RULE_COUNT][FST_MAX_HYPER] = {
    [FST_RULE_adam] = {0.0078125, 0.9, 0.999, 1e-8, 0.1, 1.0},
    [FST_RULE_amsgrad] = {0.0078125, 0.9, 0.999, 1e-8, 0.1, 0.0},
    [FST_RULE_sgd] = {0.125, 0.0, 0.0, 0.01, 0.0},
    [FST_RULE_momentum] = {0.125, 0.9, 0.3, 0.01, 1.0},
    [FST_RULE_lion] = {0.0009765625, 0.9, 0.99, 0.1},
    [FST_RULE_adagrad] = {0.0078125, 0.3, 0.01, 1e-8},
    [FST_RULE_rmsprop] = {0.0078125, 0.9, 1e-8, 0.01, 0.0},
    [FST_RULE_rmsprop_momentum] = {0.0078125, 0.9, 1e-8, 0.01, 0.8},
    [FST_RULE_rmsprop_centered] = {0.0078125, 0.9, 1e-8, 0.01, 0.0},
    [FST_RULE_rmsprop_centered_momentum] = {0.0078125, 0.9, 1e-8, 0.01, 0.8},
    [FST_RULE_adamax] = {0.0078125, 0.9, 0.999, 1e-8, 0.1},
    [FST_RULE_adadelta] = {0.5, 0.9, 1e-6, 0.01},
    [FST_RULE_radam] = {0.0078125, 0.9, 0.3, 1e-8, 0.1, 1.0},
    [FST_RULE_rprop] = {0.0078125, 0.5, 1.2, 1e-6, 50.0},
    [FST_RULE_nadam] = {0.0078125, 0.9, 0.999, 1e-8, 0.1, 1.0, 0.3},
    [FST_RULE_asgd] = {0.0078125, 0.3, 0.75, 2.0, 0.1},
};

static inline array *new_array(fst_dtype dtype, placement how, int64_t count)
{
    if (how == MIXED)
        how = (placement)random_below(MIXED);
    static const arrangement arrangements[] = {
        [MISALIGNED] = FLAT,    [GRAD_MISALIGNED] = FLAT,
        [BY_STRIDES] = STRIDED, [BY_COLUMNS] = TRANSPOSED,
        [BY_SIGNS] = NEGATED,   [BY_SIGNS_AND_COLUMNS] = NEGATED_TRANSPOSED,
    };
    return how == ALIGNED ? array_new_aligned(dtype, count)
                          : array_new(dtype, arrangements[how], count);
}

static inline void add_operand(model *m, param *p, int role, fst_dtype dtype, placement how,
                               double (*value)(void))
{
    if (how == GRAD_MISALIGNED)
        how = role == FST_OP_GRAD ? MISALIGNED : ALIGNED;
    array *a = new_array(dtype, how, p->count);
    array_fill(a, value);
    p->array[role] = m->array_count;
    m->arrays[m->array_count++] = a;
}

typedef struct {
    fst_dtype dtype, grad_dtype, state_dtype;
    placement how;
    double (*grad_value)(void);
    int master;            /* -1, or its type */
    double (*value)(void); /* of the other operands; NULL: random_value */
} kind;

/* Codes of all kinds, or none yet, beside scales that are mostly of one size. */
static inline void fill_codes(array *a, size_t scales)
{
    const int fresh = random_below(4) == 0;
    for (size_t i = 0; i < (size_t)a->count; i++)
        a->memory[a->lead + i] = (unsigned char)(fresh ? 0 : random_bits());
    for (size_t i = 0; i < scales; i++) {
        const float size = (float)ldexp(1.0 + fabs(random_unit()), (int)random_below(4) - 12);
        const float any = (float)ldexp(1.0, (int)random_below(200) - 126);
        a->op.scales[i] = fresh                   ? 0
                          : random_below(50) == 0 ? 0x7FC0
                          : random_below(20) == 0 ? 0
                          : random_below(20) == 0 ? fst_f32_to_bf16(any)
                                                  : fst_f32_to_bf16(size);
    }
}

/* Adds state k in codes; the first has the scales of all behind its own codes. */
static inline void add_codes(model *m, param *p, unsigned k, unsigned states, int64_t row_length)
{
    const uint32_t row = fst_code_row(row_length);
    const size_t scales = k ? 0 : states * (size_t)scale_count_of(p, row);
    const size_t codes = ((size_t)p->count + 15) / 16 * 16;
    array *a = array_new_aligned(FST_F32, 1);
    free(a->memory);
    a->count = p->count;
    a->size = a->lead + codes + scales * sizeof(uint16_t);
    a->memory = must_alloc(a->size);
    memset(a->memory, 0x55, a->size);
    a->op = (fst_operand){.data = a->memory + a->lead, .dtype = k ? FST_U8 : FST_I8, .row = row};
    a->op.scales = (uint16_t *)(void *)(a->memory + a->lead + codes);
    fill_codes(a, scales);
    p->array[FST_OP_STATE + k] = m->array_count;
    m->arrays[m->array_count++] = a;
}

static inline void add_param(model *m, unsigned group, int64_t count, const kind *k)
{
    const fst_rule rule = m->groups[group].rule;
    param *p = &m->params[m->param_count];
    *p = (param){.count = count, .group = group, .wide = k->dtype == FST_F64};
    p->begin = m->groups[group].code_begin;
    for (int i = 0; i < FST_OP_COUNT; i++)
        p->array[i] = -1;
    p->counts = rule == FST_RULE_adam || rule == FST_RULE_amsgrad ||
                fst_numbers_count((int32_t)rule) || random_below(4) == 0 || m->groups[group].noisy;
    p->is_double = (int)random_below(2);
    p->negated = (int)random_below(2);
    p->value = 1.0 + (double)random_below(2);
    scalar_set(&m->steps[m->param_count++], p->is_double,
               flipped((double)random_below(5), p->negated));
    for (unsigned i = 0; i < fst_numbers_count((int32_t)rule); i++) {
        p->number_dtype[i] = (fst_dtype)random_below(FST_DTYPE_COUNT);
        store_value(
            &m->numbers[m->param_count - 1][i], p->number_dtype[i],
            flipped(random_below(3) ? 0.25 * (1.0 + (double)random_below(3)) : 1.0, p->negated));
    }
    if (!count)
        return;
    double (*const value)(void) = k->value ? k->value : random_value;
    add_operand(m, p, FST_OP_PARAM, k->dtype, k->how, value);
    add_operand(m, p, FST_OP_GRAD, k->grad_dtype, k->how, k->grad_value);
    const int64_t rows = m->groups[group].code_rows;
    for (unsigned i = 0; i < fst_rules[rule].states && rows; i++)
        add_codes(m, p, i, fst_rules[rule].states, rows);
    place_scales(m, p);
    for (unsigned i = 0; i < fst_rules[rule].states && !rows; i++)
        add_operand(m, p, FST_OP_STATE + (int)i, k->state_dtype, k->how,
                    k->value ? value
                    : i      ? random_positive
                             : random_value);
    if (k->master == FST_I16)
        add_operand(m, p, FST_OP_MASTER, (fst_dtype)FST_I16, k->how, random_remainder);
    if (k->master >= 0 && k->master != FST_I16) {
        add_operand(m, p, FST_OP_MASTER, (fst_dtype)k->master, k->how, random_value);
        const fst_operand *of = &m->arrays[p->array[FST_OP_MASTER]]->op;
        for (int64_t i = 0; i < count; i++) /* a third was written since the last step */
            if (i % 3)
                set(&m->arrays[p->array[FST_OP_PARAM]]->op, i, get(of, i));
    }
}

static inline model *new_model(fst_rule rule)
{
    model *m = must_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->group_count = 3;
    for (int i = 0; i < m->group_count; i++) {
        model_group *g = &m->groups[i];
        g->rule = i == 2 ? (fst_rule)random_below(FST_RULE_COUNT) : rule;
        memcpy(g->hyper, usual[g->rule], sizeof g->hyper);
        g->maximize = (int)random_below(2);
        g->lr_on_device = (int)random_below(2);
        g->lr_is_double = (int)random_below(2);
        g->noisy = random_below(3) == 0;
        g->seed = random_bits();
        if (random_below(3) == 0) /* no weight decay */
            g->hyper[rule == FST_RULE_adam || rule == FST_RULE_amsgrad ? 4 : 3] = 0.0;
    }
    return m;
}

static inline void describe(const char *level, const kind *k, const options *o, const model *m)
{
    fprintf(stderr,
            "    %s, %s: %s, gradient %s, state %s, master %d, placement %d, %" PRId64
            " elements; scale %g, found %g, measured %d, max_norm %g, write_grad %d\n",
            level, fst_rules[m->groups[0].rule].name, dtype_names[k->dtype],
            dtype_names[k->grad_dtype], dtype_names[k->state_dtype], k->master, k->how,
            m->params[0].count, o->scale, o->found_inf, o->measure_found_inf, o->max_norm,
            o->write_grad);
}

/* Checks that the kernels have the bits of the CPU at every level, in two steps, so that what the
 * first leaves behind is used. */
static inline void compare(const model *start, const options *o, const kind *k)
{
    const fst_cpu_kernels *levels[MAX_LEVELS];
    const size_t level_count = supported_levels(levels);
    model *got = model_clone(start);
    const unsigned grid = 1 + (unsigned)random_below(4);
    simt_shuffle_by(random_below(3));
    outcome seen = {0};
    for (int step = 0; step < 2; step++)
        seen = device_step(got, o, grid);
    for (size_t i = 0; i < level_count; i++) {
        model *want = model_clone(start);
        outcome expected = {0};
        fst_cpu = levels[i];
        for (int step = 0; step < 2; step++)
            expected = cpu_step(want, o);
        if (!CHECK(same_step(got, &seen, want, &expected)))
            describe(levels[i]->name, k, o, start);
        model_free(want);
    }
    model_free(got);
}
