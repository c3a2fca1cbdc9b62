/* begin.h - the first launch of a step: measures, decides, and fills the arguments of the rules. */
#pragma once

/* Where chunks are few, a block takes this many at most, one by one. */
enum { FST_CHUNKS_OF_BLOCK = 2 };

/* As fst_reduce_chunks, of squares, but that a block takes a chunk: a warp alone would wait for
 * memory most of the time. */
FST_DEVICE int fst_square_few_chunks(fst_shared *shared, const fst_device_tables *tables,
                                     uint32_t operand, const fst_reduction *what)
{
    int seen = 0;
    for (uint32_t i = blockIdx.x; i < tables->chunk_count; i += gridDim.x) {
        const uint32_t at = tables->chunk_first + i;
        const fst_device_chunk chunk = fst_chunks_of(tables)[at];
        const fst_device_operand op = fst_operands_of(tables, chunk.span)[operand];
        const double lane = op.dtype == FST_F64 ? square_one_f64(tables, &op, &chunk, what, &seen)
                                                : square_one_f32(tables, &op, &chunk, what, &seen);
        __syncthreads(); /* all have read the lanes of the chunk before */
        const double result = fst_fold_block(shared, lane, FST_NORM_SQUARES);
        if (threadIdx.x == 0)
            fst_partial_of(tables)[at] = result;
    }
    return seen;
}

/* Reduces every chunk by a warp into the table of partial results. Returns whether the calling
 * thread met an infinity or NaN. */
FST_DEVICE int fst_reduce_chunks(fst_shared *shared, const fst_device_tables *tables,
                                 uint32_t operand, const fst_reduction *what)
{
    /* Neighbouring chunks go to different blocks, so that few chunks use many multiprocessors. */
    uint32_t i = threadIdx.x / FST_WARP * gridDim.x + blockIdx.x;
    int seen = 0;
    if (what->deep && tables->chunk_count <= gridDim.x * FST_CHUNKS_OF_BLOCK)
        return fst_square_few_chunks(shared, tables, operand, what);
    for (; i < tables->chunk_count; i += gridDim.x * FST_WARPS) {
        const fst_device_chunk chunk = fst_chunks_of(tables)[tables->chunk_first + i];
        const fst_device_operand op = fst_operands_of(tables, chunk.span)[operand];
        const double result = op.dtype == FST_F64 ? reduce_f64(tables, &op, &chunk, what, &seen)
                                                  : reduce_f32(tables, &op, &chunk, what, &seen);
        if (threadIdx.x % FST_WARP == 0)
            fst_partial_of(tables)[tables->chunk_first + i] = result;
    }
    return seen;
}

FST_DEVICE fst_reduction fst_squares(double factor, int write)
{
    fst_reduction what;
    what.kind = FST_NORM_SQUARES;
    what.power = 2.0;
    what.factor = factor;
    what.write = write;
    what.deep = 1;
    return what;
}

/* The inverse of a gradient scale. That of a fp32 scale is rounded to fp32, as in torch. */
FST_DEVICE double fst_inverse_scale(const fst_device_scalar *scale)
{
    const double inverse = scale->data ? 1.0 / fst_scalar_read(scale) : 1.0;
    return scale->is_double ? inverse : (double)(float)inverse;
}

/* The step count after this step, as the rule reads it. */
FST_DEVICE double fst_step_of(const fst_device_span *span)
{
    return span->step.data ? fst_scalar_read(&span->step) + 1.0 : span->value;
}

/* The numbers that a span has beside its step count. */
FST_DEVICE fst_numbers fst_numbers_held(const fst_device_span *span)
{
    fst_numbers held;
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_NUMBERS; k++) {
        held.value[k] = fst_number_read(&span->numbers[k]);
        held.dtype[k] = span->numbers[k].dtype;
    }
    held.wide_step = span->step.is_double;
    held.reserved = 0;
    return held;
}

/* The numbers after this step, of a span and its group by their addresses. Not inlined: it is long,
 * and few rules have numbers. */
FST_DEVICE_CALL fst_numbers fst_numbers_next(uint64_t span_at, uint64_t group_at)
{
    const fst_device_span span = *(const fst_device_span *)(uintptr_t)span_at;
    const fst_device_group *group = (const fst_device_group *)(uintptr_t)group_at;
    double hyper[FST_DEVICE_HYPER];
    FST_UNROLL
    for (unsigned i = 0; i < FST_DEVICE_HYPER; i++)
        hyper[i] = group->hyper[i];
    if (group->lr.data)
        hyper[0] = fst_scalar_read(&group->lr);
    return fst_numbers_after(span.rule, fst_numbers_held(&span), hyper, fst_step_of(&span));
}

FST_DEVICE uint64_t fst_span_at(const fst_device_tables *tables, uint32_t index)
{
    return (uint64_t)(uintptr_t)&fst_spans_of(tables)[index];
}

FST_DEVICE uint64_t fst_group_at(const fst_device_tables *tables, uint32_t index)
{
    return (uint64_t)(uintptr_t)&fst_groups_of(tables)[index];
}

FST_DEVICE void fst_fill_args(const fst_device_tables *tables, uint32_t index)
{
    const fst_device_span span = fst_spans_of(tables)[index];
    const uint64_t group_at = fst_group_at(tables, span.group);
    const fst_device_group *group = (const fst_device_group *)(uintptr_t)group_at;
    const double step = fst_step_of(&span);
    fst_rule_args *args = (fst_rule_args *)fst_args_of(tables, index);
    double hyper[FST_DEVICE_HYPER];
    FST_UNROLL
    for (unsigned i = 0; i < FST_DEVICE_HYPER; i++)
        hyper[i] = group->hyper[i];
    if (group->lr.data)
        hyper[0] = fst_scalar_read(&group->lr);
    if (span.numbers[0].data)
        fst_numbers_put(span.rule, fst_numbers_held(&span),
                        fst_numbers_next(fst_span_at(tables, index), group_at), hyper);
    switch (span.rule) {
#define RULE(name, states, HYPER)                            \
    case FST_RULE_##name:                                    \
        if (span.wide)                                       \
            name##_fill_f64(&args->name##_f64, hyper, step); \
        else                                                 \
            name##_fill_f32(&args->name##_f32, hyper, step); \
        break;
#include "rules/rules.def"
#undef RULE
    default:
        break;
    }
}

/* Fills the arguments of all spans, spread over the grid. If the step is skipped nobody reads
 * them. Step counters are advanced later, when every block has read them. */
FST_DEVICE void fst_fill_all_args(const fst_device_tables *tables)
{
    for (uint64_t i = (uint64_t)threadIdx.x * gridDim.x + blockIdx.x; i < tables->span_count;
         i += (uint64_t)FST_DEVICE_BLOCK * gridDim.x)
        fst_fill_args(tables, (uint32_t)i);
}

/* Advances all step counters. Called by the last block; each thread loads several at a time. */
FST_DEVICE void fst_advance_counters(const fst_device_tables *tables)
{
    const fst_device_span *spans = fst_spans_of(tables);
    for (uint32_t base = threadIdx.x; base < tables->span_count;
         base += FST_DEVICE_BLOCK * FST_AT_ONCE) {
        double step[FST_AT_ONCE];
        FST_UNROLL
        for (uint32_t k = 0; k < FST_AT_ONCE; k++) {
            const uint32_t i = base + k * FST_DEVICE_BLOCK;
            step[k] = i < tables->span_count ? fst_step_of(&spans[i]) : 0.0;
        }
        FST_UNROLL
        for (uint32_t k = 0; k < FST_AT_ONCE; k++) {
            const uint32_t i = base + k * FST_DEVICE_BLOCK;
            if (i < tables->span_count)
                fst_scalar_write(&spans[i].step, step[k]);
        }
    }
}

/* Moves the numbers that some spans have beside their step counters, which have not been advanced.
 * Called by the last block. */
FST_DEVICE void fst_move_numbers(const fst_device_tables *tables)
{
    for (uint32_t i = threadIdx.x; i < tables->span_count; i += FST_DEVICE_BLOCK) {
        const fst_device_span *span = &fst_spans_of(tables)[i];
        if (!span->numbers[0].data)
            continue;
        const fst_numbers next =
            fst_numbers_next(fst_span_at(tables, i), fst_group_at(tables, span->group));
        FST_UNROLL
        for (unsigned k = 0; k < FST_MAX_NUMBERS; k++)
            fst_number_write(&span->numbers[k], next.value[k]);
    }
}

/* Writes the outcome of a step. Called by one thread, with the sum of squares if it was
 * measured. */
FST_DEVICE void fst_decide(const fst_begin_launch *launch, fst_device_outcome *outcome,
                           int measured, int skip, double sum, double inv_scale)
{
    const int seen = fst_any_seen(outcome);
    const int may_clip = launch->max_norm == launch->max_norm;
    const int given = !launch->measure && may_clip;
    const double norm = measured ? sqrt(sum) : given ? fst_scalar_read(&launch->norm) : (double)NAN;
    const int clips = (measured || given) && may_clip;
    outcome->square_sum = sum;
    outcome->norm = norm;
    outcome->clip_coefficient = clips ? fst_clip_coefficient(norm, launch->max_norm) : 1.0;
    outcome->inv_scale = inv_scale;
    outcome->nonfinite = seen;
    outcome->skip = skip || (launch->measure_found_inf && seen);
    if (!given)
        fst_scalar_write(&launch->norm, norm);
    if (launch->measure_found_inf && seen)
        fst_scalar_write(&launch->found_inf, 1.0);
}

FST_KERNEL(fst_begin, fst_begin_launch)
{
    FST_SHARED(fst_shared, shared);
    const fst_device_tables *tables = &launch.tables;
    fst_device_outcome *outcome = fst_outcome_of(tables);
    const double inv_scale = fst_inverse_scale(&launch.grad_scale);
    const int skip = !launch.measure_found_inf && launch.found_inf.data &&
                     fst_scalar_read(&launch.found_inf) != 0.0;
    const int measured = launch.measure && !skip;
    const uint32_t end = tables->chunk_first + tables->chunk_count;
    const fst_reduction squares = fst_squares(inv_scale, 0);
    double sum = (double)NAN;
    int seen = 0;
    if (!skip && !launch.only_measure)
        fst_fill_all_args(tables);
    if (measured)
        seen = fst_reduce_chunks(shared, tables, FST_OP_GRAD, &squares);
    if (!fst_is_last_block(shared, outcome, seen))
        return;
    if (measured)
        sum = fst_fold_partial(shared, fst_partial_of(tables), end, FST_NORM_SQUARES);
    if (threadIdx.x == 0) {
        fst_decide(&launch, outcome, measured, skip, sum, inv_scale);
        shared->skip = outcome->skip;
    }
    __syncthreads();
    if (shared->skip || launch.only_measure)
        return;
    if (launch.has_numbers)
        fst_move_numbers(tables);
    fst_advance_counters(tables); /* each thread those of the spans whose numbers it has moved */
}
