/* passes.h - what is done with a sealed plan. Backends meet here: a pass looks at the plan's data
 * only. */
#ifndef FST_CORE_PASSES_H
#define FST_CORE_PASSES_H

#include "core/plan.h"
#include "cpu/kernels.h"

typedef struct {
    double square_sum; /* of all elements times inv_scale */
    int nonfinite;     /* whether an element was infinite or NaN before that */
} fst_measurement;

/* Chooses the kernels once, at start-up. */
void fst_passes_use(const fst_cpu_kernels *kernels);

/* Sum of squares and finite check of an operand in one read. */
fst_code fst_measure(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status);

/* What fst_measure makes of the chunks' sums of squares, where plan->partial holds them already. */
void fst_conclude(const fst_plan *plan, unsigned operand, fst_measurement *out);

/* The same as fst_measure, and writes the operand times inv_scale back, rounded to its type. */
fst_code fst_unscale(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status);

/* What a norm of order p sums or compares. */
fst_norm_kind fst_norm_kind_of(double p);

/* The norm of order p of all elements, in double: of the norms of the spans, as torch has it, which
 * differs from the norm of all elements for p = 0 alone. */
fst_code fst_total_norm(fst_plan *plan, unsigned operand, double p, double *norm,
                        fst_status *status);

/* Clips to `max_norm` by the 2-norm in one pass, where each chunk's sum of squares is expected
 * already: each chunk is measured again, and scaled while it is in the cache if its sum is as
 * expected. If one is not, *norm is still the norm of what was there, and a second pass makes
 * up the difference: chunks that were as expected are then rounded twice. Leaves everything as it
 * is, with *done = 0, where the expected norm does not clip, or clips to next to nothing. */
fst_code fst_clip_expected(fst_plan *plan, unsigned operand, const double *expected,
                           double max_norm, double *norm, int *done, fst_status *status);

fst_code fst_scale(fst_plan *plan, unsigned operand, double factor, fst_status *status);
fst_code fst_clamp(fst_plan *plan, unsigned operand, double limit, fst_status *status);

/* On spans of two or three operands: the first += factor * each of the others, one after the other;
 * with `start` what was there is not read. */
fst_code fst_accumulate(fst_plan *plan, double factor, int start, fst_status *status);

/* One optimizer step on spans with FST_OP_COUNT operands; see cpu/kernels.h. */
fst_code fst_update(fst_plan *plan, const fst_update_args *args, double inv_scale, int write_grad,
                    fst_status *status);

#endif
