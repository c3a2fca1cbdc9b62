/* passes.h - the passes over a sealed plan. A pass reads the plan's data and nothing else, so
 * CPU and GPU backends can share plans. */
#pragma once

#include "core/plan.h"
#include "cpu/kernels.h"

typedef struct {
    double square_sum; /* of all elements times inv_scale */
    int nonfinite;     /* whether an element was infinite or NaN before that */
} fst_measurement;

/* Measures an operand in one read: its sum of squares, and whether all elements are finite. */
fst_code fst_measure(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status);

/* The sum of chunks' sums of squares, in the order of every norm. */
double fst_fold_squares(const double *sums, size_t count);

/* Measures like fst_measure and writes the operand times inv_scale back, rounded to its dtype. */
fst_code fst_unscale(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status);

/* The kind of reduction for a norm of order p. */
fst_norm_kind fst_norm_kind_of(double p);

/* The norm of order p of the spans' norms of order p, in double, as torch defines it. For p = 0
 * it counts spans with an element that is not zero; for other p it is the norm of all elements. */
fst_code fst_total_norm(fst_plan *plan, unsigned operand, double p, double *norm,
                        fst_status *status);

/* Clips to `max_norm` by the 2-norm in one pass, given each chunk's expected sum of squares.
 * Each chunk is measured again, and scaled while it is in the cache if the sum matches. If one
 * does not match, *norm is still the true norm, and a second pass makes up the difference:
 * chunks that matched are then rounded twice. Does nothing, with *done = 0, where the expected
 * norm does not clip or would scale to nearly nothing. */
fst_code fst_clip_expected(fst_plan *plan, unsigned operand, const double *expected,
                           double max_norm, double *norm, int *done, fst_status *status);

fst_code fst_scale(fst_plan *plan, unsigned operand, double factor, fst_status *status);
fst_code fst_clamp(fst_plan *plan, unsigned operand, double limit, fst_status *status);

/* On spans of two or three operands: first += factor * each of the others in turn. With `start`
 * the first is overwritten, not read. */
fst_code fst_accumulate(fst_plan *plan, double factor, int start, fst_status *status);

/* One optimizer step on spans with FST_OP_COUNT operands; see cpu/kernels.h. `args` is indexed by
 * span.args. */
fst_code fst_update(fst_plan *plan, const fst_update_args *args, double inv_scale, int write_grad,
                    fst_status *status);

/* The sum of squares of elements [begin, begin + count) of an operand, times inv_scale: of a chunk,
 * as fst_measure takes it. */
double fst_chunk_squares(const fst_operand *op, int64_t begin, size_t count, double inv_scale);

/* fst_update of elements [begin, end) of one span, chunk by chunk; `begin` is where a chunk
 * begins. */
void fst_update_span(const fst_operand *op, int64_t begin, int64_t end, const fst_update_args *args,
                     double inv_scale, int write_grad);
