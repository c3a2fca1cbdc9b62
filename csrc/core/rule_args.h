/* rule_args.h - the table of rules, and the arguments that a rule reads: computed from
 * hyper-parameters and a step count. */
#pragma once

#include "rules/rules.h"

/* Adafactor stands behind the rules: its step is no formula of one element (factored_step.h). */
#define FST_FACTORED FST_RULE_COUNT

enum { FST_MAX_HYPER = FST_NUMBER(0) + 1 }; /* the numbers of a tensor included */

typedef struct {
    const char *name;
    unsigned states; /* per element */
    unsigned hyper_count;
    const char *hyper[FST_MAX_HYPER]; /* their names */
} fst_rule_entry;

extern const fst_rule_entry fst_rules[FST_RULE_COUNT + 1]; /* by fst_rule */

/* The numbers of a tensor after step `step`. `hyper` then has those that the rule reads. */
fst_numbers fst_rule_next_numbers(fst_rule rule, fst_numbers held, double *hyper, double step);

/* Fills args->rule_args for step `step` (the count after this step: 1 at first) from args->rule,
 * args->wide and the rule's hyper-parameters in their order. */
void fst_rule_fill_args(fst_update_args *args, const double *hyper, double step);
