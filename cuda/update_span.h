/* update_span.h - updates a chunk by some warps: most of it by a loop that knows its types, what
 * that leaves by one for all types, and the rest one by one. States in codes go by code_tiles.h,
 * and what that leaves block by block. Included once for float and once for double. */

FST_DEVICE FST_T(fst_step)
    FST_T(step_of)(const fst_update_launch *launch, uint32_t index, const fst_device_span *span,
                   const fst_device_outcome *outcome, uint32_t warps)
{
    FST_T(fst_step) step;
    step.args = fst_args_of(&launch->tables, index);
    step.rule = span->rule;
    step.inv_scale = (REAL)outcome->inv_scale;
    step.coefficient = (REAL)outcome->clip_coefficient;
    step.sign = span->maximize ? (REAL)-1 : (REAL)1;
    step.warp = threadIdx.x / FST_WARP % warps;
    step.warps = warps;
    step.noisy = span->noisy;
    step.span = &fst_spans_of(&launch->tables)[index];
    return step;
}

FST_DEVICE void FST_T(update)(const fst_update_launch *launch, const fst_device_chunk *chunk,
                              const fst_device_span *span, const fst_device_outcome *outcome,
                              uint32_t warps, fst_walks *walks)
{
    const fst_device_operand *op = fst_operands_of(&launch->tables, chunk->span);
    const uint32_t tile = FST_WARP * HELD, warp = threadIdx.x / FST_WARP % warps;
    fst_share share = fst_share_of(&launch->tables, chunk, threadIdx.x % FST_WARP, FST_WARP);
    FST_T(fst_step) step = FST_T(step_of)(launch, chunk->span, span, outcome, warps);
    fst_place at[FST_OP_COUNT];
    uint64_t unsure = 0; /* tiles that a quicker loop has left out */
    fst_walk *walk = &walks->of[threadIdx.x];
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        FST_T(share_with)(&share, &op[k], k == FST_OP_GRAD && sizeof(REAL) == sizeof(float));
    fst_share_close(&share);
    uint32_t base = warp * tile, rest = share.whole + warp * FST_WARP + share.thread;
    uint32_t here = 0, left = 0; /* elements of a tile that are taken one by one */
    if (span->scales) {
        unsure = FST_T(update_tiles)(&share, op, &step, launch->write_grad);
        fst_walk_begin(walk, &share, step.span->row, unsure);
    } else if (share.whole)
        base += FST_T(update_most)(&share, op, &step, launch->write_grad, &unsure);
    /* Found again, so that the loops above need not hold them in registers. */
    const uint32_t index = (uint32_t)fst_hidden((int32_t)chunk->span);
    op = fst_operands_of(&launch->tables, index);
    step.args = fst_args_of(&launch->tables, index);
    FST_T(places_of)(&share, op, at);
    step.span = &fst_spans_of(&launch->tables)[index];
    for (;;) {
        const int coded = step.span->scales != 0;
        uint32_t element = rest, end = share.count;
        float states[FST_MAX_STATES] = {0.0f, 0.0f, 0.0f};
        if (coded) {
            if (!fst_walk_on(walk, &share, step.span->row, unsure, warp, warps))
                break;
            element = fst_walk_element(walk, &share);
            end = walk->end;
        } else if (left) {
            element = fst_share_element(&share, here, --left);
            if (element >= share.whole)
                continue;
        } else if (unsure || base < share.whole) {
            here = unsure ? fst_lowest_bit(unsure) * tile : base;
            base += unsure ? 0 : warps * tile;
            unsure &= unsure - 1;
            left = FST_T(update_words)(&share, here, at, op, &step, launch->write_grad) ? 0 : HELD;
            continue;
        } else if (rest < share.count) { /* what no words hold */
            rest += warps * FST_WARP;
        } else {
            break;
        }
        if (element < end)
            FST_T(update_one)(&share, element, op, &step, launch->write_grad, walk->halves / 2u,
                              states);
        if (coded)
            fst_walk_store(walk, &share, op, step.span, states);
    }
}
