/* rule_args.h - the table of rules, and the arguments that a rule reads: computed from
 * hyper-parameters and a step count. */
#ifndef FST_CORE_RULE_ARGS_H
#define FST_CORE_RULE_ARGS_H

#include "rules/rules.h"

enum { FST_MAX_HYPER = 8 };

const char *fst_rule_name(fst_rule rule);

/* States per element. */
unsigned fst_rule_states(fst_rule rule);

/* Number of hyper-parameters; the name of hyper-parameter `index`, or NULL past the end. */
unsigned fst_rule_hyper_count(fst_rule rule);
const char *fst_rule_hyper_name(fst_rule rule, unsigned index);

/* Fills args->rule_args for step `step` (the count after this step: 1 at first) from args->rule,
 * args->wide and the rule's hyper-parameters in their order. */
void fst_rule_fill_args(fst_update_args *args, const double *hyper, double step);

#endif
