#include "core/passes.h"

#include <string.h>

#include "cpu/cpu_passes.h"
#include "rules/loss_scale.h"

static const fst_cpu_kernels *kernels;

void fst_passes_use(const fst_cpu_kernels *chosen)
{
    kernels = chosen;
}

static int any_nonfinite(const fst_work *work, unsigned operand, const double *partial)
{
    for (size_t i = 0; i < work->chunk_count; i++) {
        const fst_chunk *chunk = &work->chunks[i];
        const fst_operand *op = &work->operands[chunk->span * work->width + operand];
        if (!isfinite(partial[i]) && kernels->nonfinite(op, chunk->begin, chunk->count))
            return 1;
    }
    return 0;
}

fst_code fst_measure(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    if (fst_cpu_reduce(&work, kernels, operand, FST_NORM_SQUARES, 2.0, inv_scale, plan->partial,
                       status))
        return status->code;
    out->square_sum = kernels->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES);
    /* The sum of squares of fp32 elements is finite in double. It overflows only for fp64
     * elements, or with inv_scale > 1: then the elements are checked themselves. */
    out->nonfinite = !isfinite(out->square_sum) && any_nonfinite(&work, operand, plan->partial);
    return FST_OK;
}

double fst_fold_squares(const double *sums, size_t count)
{
    return kernels->combine(sums, count, FST_NORM_SQUARES);
}

fst_code fst_unscale(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    if (fst_cpu_unscale(&work, kernels, operand, inv_scale, plan->partial, &out->nonfinite, status))
        return status->code;
    out->square_sum = kernels->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES);
    return FST_OK;
}

fst_norm_kind fst_norm_kind_of(double p)
{
    if (isinf(p))
        return p > 0 ? FST_NORM_MAX : FST_NORM_MIN;
    return p == 2.0   ? FST_NORM_SQUARES
           : p == 1.0 ? FST_NORM_ABS
           : p == 0.0 ? FST_NORM_NONZERO
                      : FST_NORM_POWER;
}

/* The number of spans with an element that is not zero. */
static double nonzero_spans(const fst_work *work, const double *partial)
{
    double count = 0.0;
    for (size_t i = 0; i < work->chunk_count;) {
        const uint32_t span = work->chunks[i].span;
        double elements = 0.0;
        for (; i < work->chunk_count && work->chunks[i].span == span; i++)
            elements += partial[i];
        count += elements != 0.0 ? 1.0 : 0.0;
    }
    return count;
}

fst_code fst_total_norm(fst_plan *plan, unsigned operand, double p, double *norm,
                        fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_norm_kind kind = fst_norm_kind_of(p);
    if (fst_cpu_reduce(&work, kernels, operand, kind, p, 1.0, plan->partial, status))
        return status->code;
    const double sum = kernels->combine(plan->partial, work.chunk_count, kind);
    if (kind == FST_NORM_NONZERO)
        *norm = nonzero_spans(&work, plan->partial);
    else if (kind == FST_NORM_SQUARES)
        *norm = sqrt(sum);
    else if (kind == FST_NORM_POWER)
        *norm = pow(sum, 1.0 / p);
    else
        *norm = sum;
    return FST_OK;
}

/* A smaller coefficient could make ordinary numbers subnormal, and the second pass could not
 * restore them. */
#define LEAST_COEFFICIENT 0x1p-24

fst_code fst_clip_expected(fst_plan *plan, unsigned operand, const double *expected,
                           double max_norm, double *norm, int *done, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const size_t size = work.chunk_count * sizeof *expected;
    const double square_sum = kernels->combine(expected, work.chunk_count, FST_NORM_SQUARES);
    const double factor = fst_clip_coefficient(sqrt(square_sum), max_norm);
    *done = factor >= LEAST_COEFFICIENT && factor < 1.0;
    if (!*done)
        return FST_OK;
    if (fst_cpu_scale_expected(&work, kernels, operand, expected, factor, plan->partial, status))
        return status->code;
    *norm = sqrt(kernels->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES));
    if (!memcmp(plan->partial, expected, size))
        return FST_OK;
    const double right = fst_clip_coefficient(*norm, max_norm);
    return fst_cpu_scale_rest(&work, kernels, operand, expected, plan->partial, right / factor,
                              right, status);
}

fst_code fst_scale(fst_plan *plan, unsigned operand, double factor, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    return fst_cpu_scale(&work, kernels, operand, factor, status);
}

fst_code fst_clamp(fst_plan *plan, unsigned operand, double limit, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    return fst_cpu_clamp(&work, kernels, operand, limit, status);
}

fst_code fst_accumulate(fst_plan *plan, double factor, int start, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    return fst_cpu_accumulate(&work, kernels, factor, start, status);
}

fst_code fst_update(fst_plan *plan, const fst_update_args *args, double inv_scale, int write_grad,
                    fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    return fst_cpu_update(&work, kernels, args, inv_scale, write_grad, status);
}
