#include "cpu/run.h"

#include "cpu/parallel.h"

/* The cost of the smallest part worth a thread: some 0.2 ms. Waking threads takes microseconds, but
 * where the cores are busy with other programs, waiting for them takes milliseconds. */
enum { GRAIN = 1 << 18 };

/* Backwards, chunks go in groups of this many, each from its first to its last: what a measuring
 * pass read last is then met early, and the hardware's prefetchers still run from chunk to chunk.
 */
enum { GROUP = 32 };

/* Chunks of at most this many elements are asked for early. */
enum { FETCH_AHEAD = 8, FETCH_MOST = 256 };

typedef struct fst_job fst_job;
struct fst_job {
    const fst_work *work;
    const fst_cpu_kernels *kernels;
    void (*chunk)(const fst_job *job, size_t index);
    uint64_t cost_begin; /* of the round that runs */
    size_t first, last;  /* chunks of the round */
    int backwards;
    unsigned operand, operand_count; /* what the pass touches */
    fst_norm_kind norm;
    double power, factor;
    double *partial;
    int *nonfinite;
    const fst_update_args *args;
    int write_grad, start;
};

static const fst_operand *operands_of(const fst_job *job, size_t index)
{
    return job->work->operands + job->work->chunks[index].span * job->work->width + job->operand;
}

/* The first chunk of the round whose cost begins at `cost` or later. */
static size_t chunk_at(const fst_job *job, uint64_t cost)
{
    size_t low = job->first, high = job->last;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (job->work->chunks[middle].cost < cost)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Small tensors lie anywhere, and each is gone before a prefetcher could follow it. */
static void fetch(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    const fst_operand *ops = operands_of(job, index);
    if (chunk->count > FETCH_MOST)
        return;
    for (unsigned k = 0; k < job->operand_count; k++) {
        if (!ops[k].data || ops[k].layout)
            continue;
        const size_t size = fst_dtype_size(ops[k].dtype);
        const char *from = (const char *)ops[k].data + (size_t)chunk->begin * size;
        for (size_t at = 0; at < chunk->count * size; at += 64)
            __builtin_prefetch(from + at);
    }
}

/* The chunk that is worked on after `done` others. */
static size_t chunk_after(const fst_job *job, size_t first, size_t last, size_t done)
{
    if (!job->backwards)
        return first + done;
    const size_t in_group = done % GROUP, left = last - first - (done - in_group);
    return first + left - (left < GROUP ? left : GROUP) + in_group;
}

static void run_range(int64_t begin, int64_t end, void *context)
{
    const fst_job *job = context;
    const size_t first = chunk_at(job, job->cost_begin + (uint64_t)begin);
    const size_t last = chunk_at(job, job->cost_begin + (uint64_t)end);
    for (size_t done = 0; done < last - first; done++) {
        if (done + FETCH_AHEAD < last - first)
            fetch(job, chunk_after(job, first, last, done + FETCH_AHEAD));
        job->chunk(job, chunk_after(job, first, last, done));
    }
}

static fst_code run(fst_job *job, fst_status *status)
{
    const fst_work *work = job->work;
    for (size_t round = 0; round < work->round_count; round++) {
        job->first = work->rounds[round];
        job->last = work->rounds[round + 1];
        job->cost_begin = work->chunks[job->first].cost;
        const uint64_t cost = work->chunks[job->last].cost - job->cost_begin;
        const fst_code code = fst_parallel_for((int64_t)cost, GRAIN, run_range, job, status);
        if (code)
            return code;
    }
    return FST_OK;
}

static void reduce_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->partial[index] = job->kernels->reduce(operands_of(job, index), chunk->begin, chunk->count,
                                               job->norm, job->power, job->factor);
}

fst_code fst_cpu_reduce(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                        fst_norm_kind norm, double power, double factor, double *partial,
                        fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = reduce_chunk, .operand = operand};
    job.operand_count = 1;
    job.norm = norm;
    job.power = power;
    job.factor = factor;
    job.partial = partial;
    return run(&job, status);
}

static void unscale_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    int nonfinite = 0;
    job->partial[index] = job->kernels->unscale(operands_of(job, index), chunk->begin, chunk->count,
                                                job->factor, &nonfinite);
    if (nonfinite)
        __atomic_store_n(job->nonfinite, 1, __ATOMIC_RELAXED);
}

fst_code fst_cpu_unscale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                         double factor, double *partial, int *nonfinite, fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = unscale_chunk, .operand = operand};
    job.operand_count = 1;
    job.factor = factor;
    job.partial = partial;
    job.nonfinite = nonfinite;
    *nonfinite = 0;
    return run(&job, status);
}

static void scale_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->kernels->scale(operands_of(job, index), chunk->begin, chunk->count, job->factor);
}

fst_code fst_cpu_scale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double factor, fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = scale_chunk, .operand = operand};
    job.factor = factor;
    job.backwards = 1;
    return run(&job, status);
}

static void clamp_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->kernels->clamp(operands_of(job, index), chunk->begin, chunk->count, job->factor);
}

fst_code fst_cpu_clamp(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double limit, fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = clamp_chunk, .operand = operand};
    job.factor = limit;
    return run(&job, status);
}

static void accumulate_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    job->kernels->accumulate(operands_of(job, index), chunk->begin, chunk->count, job->factor,
                             job->start);
}

fst_code fst_cpu_accumulate(const fst_work *work, const fst_cpu_kernels *kernels, double factor,
                            int start, fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = accumulate_chunk};
    job.factor = factor;
    job.start = start;
    return run(&job, status);
}

static void update_chunk(const fst_job *job, size_t index)
{
    const fst_chunk *chunk = &job->work->chunks[index];
    const fst_update_args *args = &job->args[job->work->spans[chunk->span].args];
    job->kernels->update(operands_of(job, index), chunk->begin, chunk->count, args, job->factor,
                         job->write_grad);
}

fst_code fst_cpu_update(const fst_work *work, const fst_cpu_kernels *kernels,
                        const fst_update_args *args, double inv_scale, int write_grad,
                        fst_status *status)
{
    fst_job job = {.work = work, .kernels = kernels, .chunk = update_chunk};
    job.operand_count = work->width;
    job.args = args;
    job.factor = inv_scale;
    job.write_grad = write_grad;
    job.backwards = 1;
    return run(&job, status);
}
