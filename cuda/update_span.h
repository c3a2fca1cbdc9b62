/* update_span.h - updates a chunk, most of it by a loop that knows its types; included once for
 * float and once for double. */

FST_DEVICE void FST_T(update)(const fst_update_launch *launch, const fst_device_chunk *chunk,
                              const fst_device_span *span, const fst_device_outcome *outcome)
{
    const fst_device_operand *op = fst_operands_of(&launch->tables, chunk->span);
    fst_share share = fst_share_of(&launch->tables, chunk, threadIdx.x, FST_DEVICE_BLOCK);
    FST_T(fst_step) step;
    step.args = fst_args_of(&launch->tables, chunk->span);
    step.rule = span->rule;
    step.inv_scale = (REAL)outcome->inv_scale;
    step.coefficient = (REAL)outcome->clip_coefficient;
    step.sign = span->maximize ? (REAL)-1 : (REAL)1;
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        FST_T(share_with)(&share, &op[k]);
    fst_share_close(&share);
    uint32_t base = share.whole ? FST_T(update_most)(&share, op, &step, launch->write_grad) : 0;
    for (; base < share.whole; base += FST_DEVICE_BLOCK * HELD)
        if (fst_share_element(&share, base, 0) - (share.thread % FST_WARP << share.shift) <
            share.whole) /* else the whole warp has nothing to do */
            FST_T(update_words)(&share, base, op, &step, launch->write_grad);
    for (uint32_t i = share.whole + threadIdx.x; i < share.count; i += FST_DEVICE_BLOCK)
        FST_T(update_one)(&share, i, op, &step, launch->write_grad);
}
