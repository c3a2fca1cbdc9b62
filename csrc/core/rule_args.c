#include "core/rule_args.h"

#define NAME(field) #field,
static const struct {
    const char *name;
    unsigned states;
    const char *hyper[FST_MAX_HYPER + 1];
} rules[FST_RULE_COUNT + 1] = {
#define RULE(name, states, HYPER) [FST_RULE_##name] = {#name, states, {HYPER(NAME) NULL}},
#include "rules/rules.def"
#undef RULE
    [FST_FACTORED] = {"adafactor",
                      3,
                      {"lr", "beta2_decay", "eps[0]", "eps[1]", "d", "weight_decay"}},
};
#undef NAME

const char *fst_rule_name(fst_rule rule)
{
    return rules[rule].name;
}

unsigned fst_rule_states(fst_rule rule)
{
    return rules[rule].states;
}

unsigned fst_rule_hyper_count(fst_rule rule)
{
    unsigned count = 0;
    while (rules[rule].hyper[count])
        count++;
    return count;
}

const char *fst_rule_hyper_name(fst_rule rule, unsigned index)
{
    return index < fst_rule_hyper_count(rule) ? rules[rule].hyper[index] : NULL;
}

unsigned fst_rule_numbers(fst_rule rule)
{
    return fst_numbers_count((int32_t)rule);
}

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
