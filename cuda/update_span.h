/* update_span.h - updates a chunk by some warps: most of it by a loop that knows its types, or by
 * one for all types, and the rest one by one. Included once for float and once for double. */

FST_DEVICE void FST_T(update)(const fst_update_launch *launch, const fst_device_chunk *chunk,
                              const fst_device_span *span, const fst_device_outcome *outcome,
                              uint32_t warps)
{
    const fst_device_operand *op = fst_operands_of(&launch->tables, chunk->span);
    const uint32_t tile = FST_WARP * HELD, warp = threadIdx.x / FST_WARP % warps;
    fst_share share = fst_share_of(&launch->tables, chunk, threadIdx.x % FST_WARP, FST_WARP);
    FST_T(fst_step) step;
    fst_place at[FST_OP_COUNT];
    uint64_t again = 0; /* tiles that this thread is to compute once more */
    step.args = fst_args_of(&launch->tables, chunk->span);
    step.rule = span->rule;
    step.inv_scale = (REAL)outcome->inv_scale;
    step.coefficient = (REAL)outcome->clip_coefficient;
    step.sign = span->maximize ? (REAL)-1 : (REAL)1;
    step.warp = warp;
    step.warps = warps;
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        FST_T(share_with)(&share, &op[k]);
    fst_share_close(&share);
    uint32_t base = warp * tile;
    if (share.whole)
        base += FST_T(update_most)(&share, op, &step, launch->write_grad, &again);
    FST_T(places_of)(&share, op, at);
    for (; base < share.whole; base += warps * tile)
        FST_T(update_words)(&share, base, at, op, &step, launch->write_grad, &again);
    /* One by one: what is left of the tiles in `again`, and then what no words hold. */
    uint32_t left = 0, rest = share.whole + warp * FST_WARP + share.thread;
    while (left || again || rest < share.count) {
        uint32_t element = rest;
        if (left || again) {
            if (!left) {
                base = fst_lowest_bit(again) * tile;
                again &= again - 1;
                left = HELD;
            }
            element = fst_share_element(&share, base, --left);
            if (element >= share.whole)
                continue;
        } else {
            rest += warps * FST_WARP;
        }
        FST_T(update_one)(&share, element, op, &step, launch->write_grad);
    }
}
