/* update_span.h - updates a chunk by some warps, most of it by a loop that knows its types;
 * included once for float and once for double. */

FST_DEVICE void FST_T(update)(const fst_update_launch *launch, const fst_device_chunk *chunk,
                              const fst_device_span *span, const fst_device_outcome *outcome,
                              uint32_t warps)
{
    const fst_device_operand *op = fst_operands_of(&launch->tables, chunk->span);
    const uint32_t tile = FST_WARP * HELD, warp = threadIdx.x / FST_WARP % warps;
    fst_share share = fst_share_of(&launch->tables, chunk, threadIdx.x % FST_WARP, FST_WARP);
    FST_T(fst_step) step;
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
    uint32_t next = warp * tile;
    if (share.whole)
        next += FST_T(update_most)(&share, op, &step, launch->write_grad, &again);
    while (again || next < share.whole) {
        const uint32_t base = again ? fst_lowest_bit(again) * tile : next;
        if (again)
            again &= again - 1;
        else
            next += warps * tile;
        FST_T(update_words)(&share, base, op, &step, launch->write_grad);
    }
    for (uint32_t i = share.whole + warp * FST_WARP + share.thread; i < share.count;
         i += warps * FST_WARP)
        FST_T(update_one)(&share, i, op, &step, launch->write_grad);
}
