/* reference.h - slow and obvious versions of what the core computes, written without its rules and
 * without its tree.
 *
 * Arithmetic in fp32 is done in double and rounded to fp32 after each operation. For +, -, *, / and
 * sqrt that gives exactly what fp32 arithmetic gives, since a double has more than twice the bits
 * of a float and two to spare (Figueroa 1995): results are expected to be equal, not merely close.
 */
#pragma once

#include "common.h"
#include "core/rule_args.h"

typedef struct {
    fst_rule rule;
    int wide; /* in double */
    double hyper[FST_MAX_HYPER], step;
    double inv_scale, clip, sign;
    int write_grad;
    int noisy; /* bf16 states are rounded by this noise */
    fst_noise noise;
} update_case;

/* To the precision of the update. */
static inline double narrowed(double x)
{
    return (double)(float)x;
}

#define R(x) (c->wide ? (x) : narrowed(x))

/* By repeated multiplication: for up to three factors the same bits as any other order. */
static inline double power(double base, double exponent)
{
    double result = base;
    for (double i = 1.0; i < exponent; i += 1.0)
        result *= base;
    return result;
}

#include "reference_rules.h"

/* The bits of a number in halves: its bf16 half is the upper 16 with the highest of the lower
 * added. No number has halves that would give a NaN: then somebody has written the bf16 half. */
static inline double of_halves(const fst_operand *op, int64_t i)
{
    const float alone = (float)get(&op[FST_OP_PARAM], i);
    const uint32_t lower = (uint32_t)(int32_t)get(&op[FST_OP_MASTER], i) & 0xFFFFu;
    const uint32_t upper = (fst_bits_of_f32(alone) >> 16) - (lower >> 15);
    const float both = fst_f32_of_bits(upper << 16 | lower);
    return isnan(alone) || isnan(both) ? (double)alone : (double)both;
}

static inline void set_halves(const fst_operand *op, int64_t i, float value)
{
    const uint32_t bits = isnan(value) ? 0x7FC00000u : fst_bits_of_f32(value);
    const uint32_t upper = (bits >> 16) + (bits >> 15 & 1u);
    set(&op[FST_OP_PARAM], i, (double)fst_f32_of_bits(upper << 16));
    set(&op[FST_OP_MASTER], i, (double)(int16_t)(bits & 0xFFFFu));
}

/* What the rule begins with: the master, unless the parameter was written since. */
static inline double value_of(const fst_operand *op, int64_t i, const update_case *c)
{
    if (!op[FST_OP_MASTER].data)
        return R(get(&op[FST_OP_PARAM], i));
    if (fst_is_remainder(&op[FST_OP_MASTER]))
        return of_halves(op, i);
    const double master = R(get(&op[FST_OP_MASTER], i)), now = R(get(&op[FST_OP_PARAM], i));
    double rounded;
    store_value(&rounded, op[FST_OP_PARAM].dtype, master);
    return R(load_value(&rounded, op[FST_OP_PARAM].dtype)) == now ? master : now;
}

/* Philox4x32-10, as its paper has it. */
static inline void expected_philox(const uint32_t counter[4], const uint32_t key[2],
                                   uint32_t out[4])
{
    uint32_t c[4], k[2] = {key[0], key[1]};
    memcpy(c, counter, sizeof c);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = UINT64_C(0xD2511F53) * c[0], b = UINT64_C(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b,
                                  (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}

/* Element i of state k, rounded to bf16 away from zero where its noise and the bits that do not fit
 * add up to 2^16. */
static inline void set_by_noise(const fst_operand *op, int64_t i, double value, unsigned k,
                                const fst_noise *noise)
{
    const uint64_t eight = (uint64_t)i / 8;
    const uint32_t counter[4] = {(uint32_t)eight, (uint32_t)(eight >> 32) + (k << 30), noise->step,
                                 noise->param};
    const uint32_t bits = fst_bits_of_f32((float)value);
    uint32_t words[4];
    expected_philox(counter, noise->seed, words);
    const uint32_t random = words[i % 8 / 2] >> i % 2 * 16 & 0xFFFFu;
    const uint32_t away = (bits & 0xFFFFu) + random >= 0x10000u;
    const float rounded = fst_f32_of_bits(((bits >> 16) + away) << 16);
    set(op, i, isnan(value) ? (double)NAN : (double)rounded);
}

/* What fst_cpu_kernels.update is meant to do, one element after another. */
static inline void expected_update(const fst_operand *op, int64_t begin, int64_t count,
                                   const update_case *c)
{
    const fst_operand *value = &op[op[FST_OP_MASTER].data ? FST_OP_MASTER : FST_OP_PARAM];
    for (int64_t i = begin; i < begin + count; i++) {
        double s[FST_MAX_STATES] = {0.0};
        for (unsigned k = 0; k < fst_rules[c->rule].states; k++)
            s[k] = R(get(&op[FST_OP_STATE + k], i));
        double p = value_of(op, i, c), g = R(R(get(&op[FST_OP_GRAD], i)) * R(c->inv_scale));
        g = R(g * R(c->clip));
        if (c->write_grad)
            set(&op[FST_OP_GRAD], i, g);
        g *= c->sign;
        p = expected_rule(c, p, g, s);
        for (unsigned k = 0; k < fst_rules[c->rule].states; k++)
            if (c->noisy && op[FST_OP_STATE + k].dtype == FST_BF16)
                set_by_noise(&op[FST_OP_STATE + k], i, s[k], k, &c->noise);
            else
                set(&op[FST_OP_STATE + k], i, s[k]);
        if (fst_is_remainder(&op[FST_OP_MASTER])) {
            set_halves(op, i, (float)p);
            continue;
        }
        set(value, i, p);
        if (op[FST_OP_MASTER].data)
            set(&op[FST_OP_PARAM], i, p);
    }
}

#undef R

/* The rule's arguments for a case. */
static inline fst_update_args args_of(const update_case *c)
{
    fst_update_args args = {.clip_coefficient = c->clip, .sign = c->sign};
    args.noisy = c->noisy;
    args.noise = c->noise;
    args.rule = c->rule;
    args.wide = c->wide;
    fst_rule_fill_args(&args, c->hyper, c->step);
    return args;
}

static inline double folded(double a, double b, fst_norm_kind norm)
{
    if (norm != FST_NORM_MAX && norm != FST_NORM_MIN)
        return a + b;
    if (isnan(a) || isnan(b))
        return (double)NAN;
    return norm == FST_NORM_MAX ? fmax(a, b) : fmin(a, b);
}

/* The tree of rules/tree.h over values that are terms already: element i goes to lane i % 256, then
 * lane j takes lane j + 128, j + 64, ... j + 1. */
static inline double expected_tree(const double *terms, size_t count, fst_norm_kind norm)
{
    double lanes[256];
    for (size_t j = 0; j < 256; j++)
        lanes[j] = norm == FST_NORM_MIN ? (double)INFINITY : 0.0;
    for (size_t i = 0; i < count; i++)
        lanes[i % 256] = folded(lanes[i % 256], terms[i], norm);
    for (size_t half = 128; half > 0; half /= 2)
        for (size_t j = 0; j < half; j++)
            lanes[j] = folded(lanes[j], lanes[j + half], norm);
    return lanes[0];
}

/* What a norm sums or compares of element i times the factor. */
static inline double expected_term(const fst_operand *op, int64_t i, fst_norm_kind norm, double p,
                                   double factor)
{
    const double raw = get(op, i);
    const double x = op->dtype == FST_F64 ? raw * factor : narrowed(raw * narrowed(factor));
    switch (norm) {
    case FST_NORM_SQUARES:
        return x * x;
    case FST_NORM_NONZERO:
        return x == 0.0 ? 0.0 : 1.0;
    case FST_NORM_POWER:
        return pow(fabs(x), p);
    case FST_NORM_ABS:
    case FST_NORM_MAX:
    case FST_NORM_MIN:
    default:
        return fabs(x);
    }
}
