/* list_kernels.h - kernels over a list of tensors, for explicit unscaling, norms, clipping and
 * accumulation. */
#pragma once

/* Unscales one round. Each round adds to what the rounds before it found. Where the inverse is
 * given as 1, and nobody wants to know of overflows, there is nothing to do. */
FST_KERNEL(fst_unscale, fst_unscale_launch)
{
    FST_SHARED(fst_shared, shared);
    const fst_device_tables *tables = &launch.tables;
    fst_device_outcome *outcome = fst_outcome_of(tables);
    const double factor = !launch.scale.data ? launch.factor
                          : launch.inverse   ? fst_scalar_read(&launch.scale)
                                             : fst_inverse_scale(&launch.scale);
    if (launch.inverse && factor == 1.0 && !launch.found_inf.data)
        return;
    const fst_reduction squares = fst_squares(factor, 1);
    const int seen = fst_reduce_chunks(shared, tables, launch.operand, &squares);
    if (!fst_is_last_block(shared, outcome, seen))
        return;
    const double sum =
        fst_fold_partial(shared, fst_partial_of(tables), tables->chunk_first + tables->chunk_count,
                         FST_NORM_SQUARES);
    if (threadIdx.x)
        return;
    const int found = fst_any_seen(outcome) || (tables->chunk_first && outcome->nonfinite);
    outcome->square_sum = sum;
    outcome->norm = sqrt(sum);
    outcome->clip_coefficient = 1.0;
    outcome->inv_scale = factor;
    outcome->nonfinite = found;
    if (found)
        fst_scalar_write(&launch.found_inf, 1.0);
}

/* The number of spans with an element that is not zero, counted at the first chunk of each. */
FST_DEVICE double fst_count_spans(const fst_device_tables *tables)
{
    const fst_device_chunk *chunks = fst_chunks_of(tables);
    const double *partial = fst_partial_of(tables);
    double spans = 0.0;
    for (uint32_t i = threadIdx.x; i < tables->chunk_count; i += FST_DEVICE_BLOCK) {
        const uint32_t span = chunks[i].span;
        uint32_t at = i;
        if (i > 0 && chunks[i - 1].span == span)
            continue;
        while (at < tables->chunk_count && chunks[at].span == span && partial[at] == 0.0)
            at++;
        spans += at < tables->chunk_count && chunks[at].span == span ? 1.0 : 0.0;
    }
    return spans;
}

FST_KERNEL(fst_norm, fst_norm_launch)
{
    FST_SHARED(fst_shared, shared);
    const fst_device_tables *tables = &launch.tables;
    fst_device_outcome *outcome = fst_outcome_of(tables);
    const fst_norm_kind kind = (fst_norm_kind)launch.kind;
    fst_reduction what = fst_squares(1.0, 0);
    what.kind = kind;
    what.power = launch.power;
    what.deep = 0;
    const double factor = fst_inverse_scale(&launch.scale);
    const fst_reduction squares = fst_squares(factor, 0);
    int seen = 0;
    if (!launch.only_fold)
        seen = kind == FST_NORM_SQUARES
                   ? fst_reduce_chunks(shared, tables, launch.operand, &squares)
                   : fst_reduce_chunks(shared, tables, launch.operand, &what);
    if (!fst_is_last_block(shared, outcome, seen))
        return;
    const double result =
        kind == FST_NORM_NONZERO
            ? fst_fold_block(shared, fst_count_spans(tables), FST_NORM_NONZERO)
            : fst_fold_partial(shared, fst_partial_of(tables), tables->chunk_count, kind);
    if (threadIdx.x)
        return;
    const double norm = kind == FST_NORM_SQUARES ? sqrt(result)
                        : kind == FST_NORM_POWER ? fst_power(result, 1.0 / launch.power)
                                                 : result;
    outcome->nonfinite = fst_any_seen(outcome);
    outcome->square_sum = kind == FST_NORM_SQUARES ? result : (double)NAN;
    outcome->norm = norm;
    outcome->clip_coefficient = 1.0;
    outcome->inv_scale = factor;
    fst_scalar_write(&launch.norm, norm);
    if (outcome->nonfinite)
        fst_scalar_write(&launch.found_inf, 1.0);
}

/* Changes every chunk by a block, from last to first: what was measured last is still in the
 * cache. */
FST_DEVICE void fst_change_chunks(const fst_device_tables *tables, uint32_t operand, double factor,
                                  int clamp)
{
    const uint32_t last = tables->chunk_first + tables->chunk_count - 1;
    for (uint32_t i = blockIdx.x; i < tables->chunk_count; i += gridDim.x) {
        const fst_device_chunk chunk = fst_chunk_at(tables, last - i);
        const fst_device_operand op = fst_operands_of(tables, chunk.span)[operand];
        if (op.dtype == FST_F64)
            change_f64(tables, &op, &chunk, factor, clamp);
        else
            change_f32(tables, &op, &chunk, (float)factor, clamp);
    }
}

FST_KERNEL(fst_scale, fst_scale_launch)
{
    double factor = launch.factor;
    if (launch.norm.data)
        factor = fst_clip_coefficient(fst_scalar_read(&launch.norm), launch.max_norm);
    if (launch.norm.data && factor >= 1.0)
        return;
    fst_change_chunks(&launch.tables, launch.operand, factor, 0);
}

FST_KERNEL(fst_clamp, fst_clamp_launch)
{
    fst_change_chunks(&launch.tables, launch.operand, launch.limit, 1);
}

FST_KERNEL(fst_accumulate, fst_accumulate_launch)
{
    const fst_device_tables *tables = &launch.tables;
    for (uint32_t i = blockIdx.x; i < tables->chunk_count; i += gridDim.x) {
        const fst_device_chunk chunk = fst_chunk_at(tables, tables->chunk_first + i);
        const fst_device_operand *op = fst_operands_of(tables, chunk.span);
        const int two = launch.terms > 1;
        if (op[0].dtype == FST_F64 || op[1].dtype == FST_F64 || (two && op[2].dtype == FST_F64))
            accumulate_f64(tables, op, two, &chunk, launch.factor, launch.start);
        else
            accumulate_f32(tables, op, two, &chunk, (float)launch.factor, launch.start);
    }
}
