#include "cpu/cpu_passes.h"

#include "cpu/job.h"

/* The first term of a sum of this many elements or more is written with non-temporal stores. */
enum { STREAM_FROM = 1 << 19 };

static void reduce_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->partial[index] = job->kernels->reduce(fst_job_operands(job, index), chunk->begin,
                                               chunk->count, job->norm, job->power, job->factor);
}

fst_code fst_cpu_reduce(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                        fst_norm_kind norm, double power, double factor, double *partial,
                        fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = reduce_chunk,
        .backwards = fst_job_turns(),
        .operand = operand,
        .operand_count = 1,
        .norm = norm,
        .power = power,
        .factor = factor,
        .partial = partial,
    };
    return fst_job_run(&job, status);
}

static void unscale_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    int nonfinite = 0;
    job->partial[index] = job->kernels->unscale(fst_job_operands(job, index), chunk->begin,
                                                chunk->count, job->factor, &nonfinite);
    if (nonfinite)
        __atomic_store_n(job->nonfinite, 1, __ATOMIC_RELAXED);
}

fst_code fst_cpu_unscale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                         double factor, double *partial, int *nonfinite, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = unscale_chunk,
        .backwards = fst_job_turns(),
        .operand = operand,
        .operand_count = 1,
        .factor = factor,
        .partial = partial,
        .nonfinite = nonfinite,
    };
    *nonfinite = 0;
    return fst_job_run(&job, status);
}

static void scale_by(const fst_job *job, size_t index, double factor)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->kernels->scale(fst_job_operands(job, index), chunk->begin, chunk->count, factor);
}

static void scale_chunk(const fst_job *job, size_t index)
{
    scale_by(job, index, job->factor);
}

fst_code fst_cpu_scale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double factor, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = scale_chunk,
        .backwards = fst_job_turns(),
        .operand = operand,
        .factor = factor,
    };
    return fst_job_run(&job, status);
}

static int is_expected(const fst_job *job, size_t index)
{
    return job->partial[index] == job->expected[index];
}

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

fst_code fst_cpu_scale_expected(const fst_work *work, const fst_cpu_kernels *kernels,
                                unsigned operand, const double *expected, double factor,
                                double *partial, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = scale_expected_chunk,
        .backwards = fst_job_turns(),
        .operand = operand,
        .norm = FST_NORM_SQUARES,
        .power = 2.0,
        .factor = 1.0,
        .again = factor,
        .partial = partial,
        .expected = expected,
    };
    return fst_job_run(&job, status);
}

fst_code fst_cpu_scale_rest(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                            const double *expected, double *partial, double again, double factor,
                            fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = scale_rest_chunk,
        .backwards = fst_job_turns(),
        .operand = operand,
        .factor = factor,
        .again = again,
        .partial = partial,
        .expected = expected,
    };
    return fst_job_run(&job, status);
}

static void clamp_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->kernels->clamp(fst_job_operands(job, index), chunk->begin, chunk->count, job->factor);
}

fst_code fst_cpu_clamp(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double limit, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
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
    job->kernels->accumulate(fst_job_operands(job, index), job->work->width - 1, chunk->begin,
                             chunk->count, job->factor, how);
}

fst_code fst_cpu_accumulate(const fst_work *work, const fst_cpu_kernels *kernels, double factor,
                            int start, fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
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
    job->kernels->update(fst_job_operands(job, index), chunk->begin, chunk->count, args,
                         job->factor, job->write_grad);
}

fst_code fst_cpu_update(const fst_work *work, const fst_cpu_kernels *kernels,
                        const fst_update_args *args, double inv_scale, int write_grad,
                        fst_status *status)
{
    const fst_job job = {
        .work = work,
        .kernels = kernels,
        .chunk = update_chunk,
        .backwards = fst_job_turns_last(),
        .operand_count = work->width,
        .factor = inv_scale,
        .args = args,
        .write_grad = write_grad,
    };
    return fst_job_run(&job, status);
}
