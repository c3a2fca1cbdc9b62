#include "core/rule_args.h"

#define NAME(field) #field,
#define ONE(field) +1
const fst_rule_entry fst_rules[FST_RULE_COUNT + 1] = {
#define RULE(name, states, HYPER) [FST_RULE_##name] = {#name, states, 0 HYPER(ONE), {HYPER(NAME)}},
#include "rules/rules.def"
#undef RULE
    [FST_FACTORED] = {"adafactor",
                      3,
                      6,
                      {"lr", "beta2_decay", "eps[0]", "eps[1]", "d", "weight_decay"}},
};
#undef NAME
#undef ONE

fst_numbers fst_rule_next_numbers(fst_rule rule, fst_numbers held, double *hyper, double step)
{
    const fst_numbers next = fst_numbers_after((int32_t)rule, held, hyper, step);
    fst_numbers_put((int32_t)rule, held, next, hyper);
    return next;
}

void fst_rule_fill_args(fst_update_args *args, const double *hyper, double step)
{
    switch (args->rule) {
#define RULE(name, states, HYPER)                                      \
    case FST_RULE_##name:                                              \
        if (args->wide)                                                \
            name##_fill_f64(&args->rule_args.name##_f64, hyper, step); \
        else                                                           \
            name##_fill_f32(&args->rule_args.name##_f32, hyper, step); \
        break;
#include "rules/rules.def"
#undef RULE
    case FST_RULE_COUNT:
        break;
    }
}
