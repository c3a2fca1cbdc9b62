#include "core/passes.h"

#include <string.h>

#include "cpu/job.h"
#include "rules/loss_scale.h"

/* The first term of a sum of this many elements or more is written with non-temporal stores. */
enum { STREAM_FROM = 1 << 19 };

static void reduce_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->partial[index] = fst_cpu->reduce(fst_job_operands(job, index), chunk->begin, chunk->count,
                                          job->norm, job->power, job->factor);
}

/* partial[c] = reduction of factor * operand over chunk c. */
static fst_code reduce(const fst_work *work, unsigned operand, fst_norm_kind norm, double power,
                       double factor, double *partial, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .chunk = reduce_chunk,
        .direction = FST_TURNS,
        .operand = operand,
        .operand_count = 1,
        .norm = norm,
        .power = power,
        .factor = factor,
        .partial = partial,
    };
    return fst_job_run(&job, status);
}

static int any_nonfinite(const fst_work *work, unsigned operand, const double *partial)
{
    for (size_t i = 0; i < work->chunk_count; i++) {
        const fst_chunk *chunk = &work->chunks[i];
        const fst_operand *op = &work->operands[chunk->span * work->width + operand];
        if (!isfinite(partial[i]) && fst_cpu->nonfinite(op, chunk->begin, chunk->count))
            return 1;
    }
    return 0;
}

fst_code fst_measure(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    if (reduce(&work, operand, FST_NORM_SQUARES, 2.0, inv_scale, plan->partial, status))
        return status->code;
    out->square_sum = fst_cpu->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES);
    /* The sum of squares of fp32 elements is finite in double. It overflows only for fp64
     * elements, or with inv_scale > 1: then the elements are checked themselves. */
    out->nonfinite = !isfinite(out->square_sum) && any_nonfinite(&work, operand, plan->partial);
    return FST_OK;
}

double fst_fold_squares(const double *sums, size_t count)
{
    return fst_cpu->combine(sums, count, FST_NORM_SQUARES);
}

static void unscale_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    int nonfinite = 0;
    job->partial[index] = fst_cpu->unscale(fst_job_operands(job, index), chunk->begin, chunk->count,
                                           job->factor, &nonfinite);
    if (nonfinite)
        __atomic_store_n(job->nonfinite, 1, __ATOMIC_RELAXED);
}

fst_code fst_unscale(fst_plan *plan, unsigned operand, double inv_scale, fst_measurement *out,
                     fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_job job = {
        .work = &work,
        .chunk = unscale_chunk,
        .direction = FST_TURNS,
        .operand = operand,
        .operand_count = 1,
        .factor = inv_scale,
        .partial = plan->partial,
        .nonfinite = &out->nonfinite,
    };
    out->nonfinite = 0;
    if (fst_job_run(&job, status))
        return status->code;
    out->square_sum = fst_cpu->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES);
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
    if (reduce(&work, operand, kind, p, 1.0, plan->partial, status))
        return status->code;
    const double sum = fst_cpu->combine(plan->partial, work.chunk_count, kind);
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

static void scale_by(const fst_job *job, size_t index, double factor)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    fst_cpu->scale(fst_job_operands(job, index), chunk->begin, chunk->count, factor);
}

static int is_expected(const fst_job *job, size_t index)
{
    return job->partial[index] == job->expected[index];
}

/* Measures a chunk, and scales it by `again` if its sum of squares is the expected one. */
static void scale_expected_chunk(const fst_job *job, size_t index)
{
    reduce_chunk(job, index);
    if (is_expected(job, index))
        scale_by(job, index, job->again);
}

static void scale_rest_chunk(const fst_job *job, size_t index)
{
    scale_by(job, index, is_expected(job, index) ? job->again : job->factor);
}

/* A smaller coefficient could make ordinary numbers subnormal, and the second pass could not
 * restore them. */
#define LEAST_COEFFICIENT 0x1p-24

fst_code fst_clip_expected(fst_plan *plan, unsigned operand, const double *expected,
                           double max_norm, double *norm, int *done, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const size_t size = work.chunk_count * sizeof *expected;
    const double square_sum = fst_cpu->combine(expected, work.chunk_count, FST_NORM_SQUARES);
    const double factor = fst_clip_coefficient(sqrt(square_sum), max_norm);
    *done = factor >= LEAST_COEFFICIENT && factor < 1.0;
    if (!*done)
        return FST_OK;
    fst_job job = {
        .work = &work,
        .chunk = scale_expected_chunk,
        .direction = FST_TURNS,
        .operand = operand,
        .norm = FST_NORM_SQUARES,
        .power = 2.0,
        .factor = 1.0,
        .again = factor,
        .partial = plan->partial,
        .expected = expected,
    };
    if (fst_job_run(&job, status))
        return status->code;
    *norm = sqrt(fst_cpu->combine(plan->partial, work.chunk_count, FST_NORM_SQUARES));
    if (!memcmp(plan->partial, expected, size))
        return FST_OK;
    const double right = fst_clip_coefficient(*norm, max_norm);
    job.chunk = scale_rest_chunk;
    job.factor = right;
    job.again = right / factor;
    return fst_job_run(&job, status);
}

static void scale_chunk(const fst_job *job, size_t index)
{
    scale_by(job, index, job->factor);
}

fst_code fst_scale(fst_plan *plan, unsigned operand, double factor, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_job job = {
        .work = &work,
        .chunk = scale_chunk,
        .direction = FST_TURNS,
        .operand = operand,
        .factor = factor,
    };
    return fst_job_run(&job, status);
}

static void clamp_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    fst_cpu->clamp(fst_job_operands(job, index), chunk->begin, chunk->count, job->factor);
}

fst_code fst_clamp(fst_plan *plan, unsigned operand, double limit, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_job job = {
        .work = &work,
        .chunk = clamp_chunk,
        .operand = operand,
        .factor = limit,
    };
    return fst_job_run(&job, status);
}

static void accumulate_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    const int large = job->work->spans[chunk->span].count >= STREAM_FROM;
    const fst_sum_kind how = !job->start ? FST_SUM_ADD : large ? FST_SUM_STREAM : FST_SUM_START;
    fst_cpu->accumulate(fst_job_operands(job, index), job->work->width - 1, chunk->begin,
                        chunk->count, job->factor, how);
}

fst_code fst_accumulate(fst_plan *plan, double factor, int start, fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_job job = {
        .work = &work,
        .chunk = accumulate_chunk,
        .factor = factor,
        .start = start,
    };
    return fst_job_run(&job, status);
}

static void update_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    const fst_update_args *args = &job->args[job->work->spans[chunk->span].args];
    fst_cpu->update(fst_job_operands(job, index), chunk->begin, chunk->count, args, job->factor,
                    job->write_grad);
}

fst_code fst_update(fst_plan *plan, const fst_update_args *args, double inv_scale, int write_grad,
                    fst_status *status)
{
    const fst_work work = fst_plan_work(plan);
    const fst_job job = {
        .work = &work,
        .chunk = update_chunk,
        .direction = FST_TURNS_LAST,
        .operand_count = work.width,
        .factor = inv_scale,
        .args = args,
        .write_grad = write_grad,
    };
    return fst_job_run(&job, status);
}

double fst_chunk_squares(const fst_operand *op, int64_t begin, size_t count, double inv_scale)
{
    return fst_cpu->reduce(op, begin, count, FST_NORM_SQUARES, 2.0, inv_scale);
}

void fst_update_span(const fst_operand *op, int64_t begin, int64_t end, const fst_update_args *args,
                     double inv_scale, int write_grad)
{
    for (int64_t next; begin < end; begin = next) {
        next = (begin / FST_CHUNK + 1) * FST_CHUNK;
        next = next < end ? next : end;
        fst_cpu->update(op, begin, (size_t)(next - begin), args, inv_scale, write_grad);
    }
}
