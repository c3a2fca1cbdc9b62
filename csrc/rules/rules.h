/* rules.h - the optimizer rules, once for float and once for double.
 *
 * A rule's header defines, for REAL and FST_T(name): a struct `<name>_args` with the scalars of
 * a step; a function `<name>_fill` that computes them in double from the hyper-parameters and
 * the step count; and a function `<name>_rule` from (p, g, states) to the new p and states.
 * The loops handle gradient scale, clipping, maximize, master weights and dtypes. They also add
 * the scalar l2 times p to g: weight decay that is not decoupled.
 *
 * The kernels have quick ways for roots and quotients, and must notice where these are not sure
 * (cuda/quick_math.h). So FST_SQRT and FST_DIVIDE reach p by sums and products alone. What
 * FST_DESCEND returns is the new p, and its x is 0 if g and the first state, as it is then, are. */
#pragma once

#include "base/noise.h"
#include "base/portable.h"
#include "rules/numbers.h"

#define FST_DESCEND(p, size, x, v, eps) ((p) - (size) * FST_DIVIDE(x, FST_SQRT(v) + (eps)))

/* Defines the arguments of a rule as those of another one. */
#define FST_ARGS_OF(name, other)                                                            \
    typedef FST_T(other##_args) FST_T(name##_args);                                         \
    FST_FN void FST_T(name##_fill)(FST_T(name##_args) *a, const double *hyper, double step) \
    {                                                                                       \
        FST_T(other##_fill)(a, hyper, step);                                                \
    }

#define REAL float
#define FST_T(name) name##_f32
#define FST_SQRT sqrtf
#define FST_SIZE fabsf
#define FST_DIVIDE(x, y) ((x) / (y))
#include "rules/each.h"
#undef REAL
#undef FST_T
#undef FST_SQRT
#undef FST_SIZE

#define REAL double
#define FST_T(name) name##_f64
#define FST_SQRT sqrt
#define FST_SIZE fabs
#include "rules/each.h"
#undef REAL
#undef FST_T
#undef FST_SQRT
#undef FST_SIZE
#undef FST_DIVIDE

typedef enum {
#define RULE(name, states, hyper) FST_RULE_##name,
#include "rules/rules.def"
#undef RULE
    FST_RULE_COUNT
} fst_rule;

/* How many numbers a rule has beside the step count. */
FST_FN unsigned fst_numbers_count(int32_t rule)
{
    switch (rule) {
#define NUMBERS(name, count, after) \
    case FST_RULE_##name:           \
        return count;
#include "rules/numbers.def"
#undef NUMBERS
    default:
        return 0;
    }
}

/* The numbers after step `step`, as they are held. */
FST_FN fst_numbers fst_numbers_after(int32_t rule, fst_numbers held, const double *hyper,
                                     double step)
{
    switch (rule) {
#define NUMBERS(name, count, after)                \
    case FST_RULE_##name:                          \
        held = name##_next_f64(held, hyper, step); \
        break;
#include "rules/numbers.def"
#undef NUMBERS
    default:
        break;
    }
    for (unsigned k = 0; k < FST_MAX_NUMBERS; k++)
        held.value[k] = fst_number_rounded(held.value[k], held.dtype[k]);
    return held;
}

/* Puts the numbers that the rule's `fill` reads behind its hyper-parameters. */
FST_FN void fst_numbers_put(int32_t rule, fst_numbers held, fst_numbers next, double *hyper)
{
    switch (rule) {
#define NUMBERS(name, count, after)                                       \
    case FST_RULE_##name:                                                 \
        hyper[FST_NUMBER(0)] = after ? next.value[0] : held.value[0];     \
        if (count > 1)                                                    \
            hyper[FST_NUMBER(1)] = after ? next.value[1] : held.value[1]; \
        break;
#include "rules/numbers.def"
#undef NUMBERS
    default:
        break;
    }
}

typedef union {
#define RULE(name, states, hyper) \
    name##_args_f32 name##_f32;   \
    name##_args_f64 name##_f64;
#include "rules/rules.def"
#undef RULE
} fst_rule_args;

/* The arguments of an update pass, for all spans that share a group and a step count; those with
 * noise are for one span. */
typedef struct {
    fst_rule_args rule_args;
    double clip_coefficient; /* 1 where nothing is clipped */
    double sign;             /* -1 to maximize, else 1 */
    fst_rule rule;
    int wide;  /* computed in double, for fp64 parameters */
    int noisy; /* bf16 states are rounded by this noise, which is one parameter's */
    fst_noise noise;
} fst_update_args;
