/* rules.h - the optimizer rules, once for float and once for double.
 *
 * A rule's header defines, for REAL and FST_T(name): a struct `<name>_args` with the scalars of
 * a step; a function `<name>_fill` that computes them in double from the hyper-parameters and
 * the step count; and a function `<name>_rule` from (p, g, states) to the new p and states.
 * Rules know nothing of gradient scale, clipping, maximize, master weights and dtypes, which the
 * loops handle. */
#ifndef FST_RULES_RULES_H
#define FST_RULES_RULES_H

#include "base/portable.h"

#define REAL float
#define FST_T(name) name##_f32
#define FST_SQRT sqrtf
#include "rules/adadelta.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/lion.h"
#include "rules/moments.h"
#include "rules/radam.h"
#include "rules/rmsprop.h"
#include "rules/rprop.h"
#include "rules/sgd.h"
#undef REAL
#undef FST_T
#undef FST_SQRT

#define REAL double
#define FST_T(name) name##_f64
#define FST_SQRT sqrt
#include "rules/adadelta.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/lion.h"
#include "rules/moments.h"
#include "rules/radam.h"
#include "rules/rmsprop.h"
#include "rules/rprop.h"
#include "rules/sgd.h"
#undef REAL
#undef FST_T
#undef FST_SQRT

typedef enum {
#define RULE(name, states, hyper) FST_RULE_##name,
#include "rules/rules.def"
#undef RULE
    FST_RULE_COUNT
} fst_rule;

typedef union {
#define RULE(name, states, hyper) \
    name##_args_f32 name##_f32;   \
    name##_args_f64 name##_f64;
#include "rules/rules.def"
#undef RULE
} fst_rule_args;

/* The arguments of an update pass, for all spans that share a group and a step count. */
typedef struct {
    fst_rule_args rule_args;
    double clip_coefficient; /* 1 where nothing is clipped */
    double sign;             /* -1 to maximize, else 1 */
    fst_rule rule;
    int wide; /* computed in double, for fp64 parameters */
} fst_update_args;

#endif
