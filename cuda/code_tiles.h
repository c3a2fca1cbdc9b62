/* code_tiles.h - updates tiles of 256 elements whose states are in codes, the first with signs, the
 * second roots, by one loop that asks for rule and types as it goes. Roots and quotients are taken
 * by quick_math.h.
 *
 * Eight lanes have a block and find its scales together. Where one of them is not sure of its
 * elements, or a scale is NaN, nothing of the block is stored, and its bit in `unsure` is set. */

/* Rules that have this loop: three states leave too few registers. */
#define FST_IN_TILES(rule, states) \
    ((rule) <= FST_LAST_KNOWN && (states) && (states) < FST_MAX_STATES)

/* Where a chunk's operands lie. */
typedef struct {
    fst_place param, grad, master;
    char *codes[2];
    uint16_t *scales[2];
    int two; /* states */
} fst_tile_places;

/* Elements of the chunk that are in whole tiles, if such tiles can be loaded by words. */
FST_DEVICE uint32_t fst_tiled(const fst_share *share, const fst_device_operand *op, int32_t rule)
{
    fst_share words = *share;
    words.whole = share->count;
    const fst_device_operand *state = &op[FST_OP_STATE];
    int known = state[0].dtype == FST_I8 && (!state[1].data || state[1].dtype == FST_U8);
    FST_UNROLL
    for (unsigned k = 0; k < FST_OP_STATE; k++)
        share_with_f32(&words, &op[k], k == FST_OP_GRAD);
    FST_UNROLL
    for (unsigned k = 0; k < 2; k++)
        known &= ((state[k].data + (uint64_t)share->begin) & 7u) == 0;
    switch (rule) {
#define RULE(name, states, hyper)                       \
    case FST_RULE_##name:                               \
        known &= FST_IN_TILES(FST_RULE_##name, states); \
        break;
#include "rules/rules.def"
#undef RULE
    default:
        break;
    }
    return known ? words.whole / (8 * FST_WARP) * (8 * FST_WARP) : 0;
}

FST_DEVICE void fst_of_eight(const fst_eight *codes, int k, float scale, float *state)
{
    const float factor = k ? fst_root_factor(scale) : fst_signed_factor(scale);
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++) {
        const uint8_t code = (uint8_t)(codes->word[q / 4] >> q % 4 * 8);
        state[q] = k ? fst_of_root(code, factor) : fst_quick_of_signed(code, factor);
    }
}

/* Replaces a state by its terms, and finds the scale of the block. */
FST_DEVICE uint16_t fst_scale_of_lanes(float *state, int k, int sure)
{
    uint32_t largest = 0;
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++) {
        state[q] = k ? fst_large_root(state[q]) : fst_signed_term(state[q]);
        const uint32_t size = k ? fst_root_size(state[q]) : fst_signed_size(state[q]);
        largest = size > largest ? size : largest;
    }
    largest = fst_largest(sure ? largest : UINT32_MAX, FST_CODE_LANES);
    return k ? fst_quick_root_scale(largest) : fst_signed_scale(largest);
}

FST_DEVICE fst_eight fst_to_eight(const float *terms, int k, float scale)
{
    const float unit = fst_quick_unit(scale);
    const float divisor = k ? fst_quick_root_divisor(scale) : fst_quick_signed_divisor(scale, unit);
    fst_eight codes = {{0, 0}};
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++) {
        const uint8_t code =
            k ? fst_quick_to_root(terms[q], divisor) : fst_quick_to_signed(terms[q], divisor, unit);
        codes.word[q / 4] |= (uint32_t)code << q % 4 * 8;
    }
    return codes;
}

FST_DEVICE void fst_apply_in_tiles(fst_held_f32 *x, const fst_step_f32 *step)
{
    switch (step->rule) {
#define RULE(name, states, hyper)                                               \
    case FST_RULE_##name:                                                       \
        if (FST_IN_TILES(FST_RULE_##name, states)) {                            \
            const name##_args_known a = *(const name##_args_known *)step->args; \
            name##_apply_known(x, &a, fst_uniform(a.l2 != 0.0f));               \
        }                                                                       \
        break;
#include "rules/rules.def"
#undef RULE
    default:
        break;
    }
}

/* Stores a thread's elements: terms of states, with their scales, and parameters. */
FST_DEVICE void fst_store_tile(const fst_tile *tile, uint32_t thread, const fst_tile_places *at,
                               const fst_step_f32 *step, fst_held_f32 *x,
                               fst_words words[FST_OP_STATE][2], const uint16_t *scales,
                               int write_grad)
{
    FST_UNROLL
    for (int k = 0; k < 2; k++)
        if (!k || at->two) {
            *(fst_eight *)(at->codes[k] + tile->first) =
                fst_to_eight(x->state[k], k, fst_bf16_to_f32(scales[k]));
            if (thread % FST_CODE_LANES == 0)
                at->scales[k][tile->first / FST_BLOCK] = scales[k];
        }
    if (write_grad) {
        widen_f32(words[FST_OP_GRAD], at->grad.dtype, x->g);
        scale_grad_f32(x, 8, step);
        store_items_f32(tile, &at->grad, x->g, 1);
    }
    if (fst_hidden(at->master.dtype) == FST_I16) {
        store_halves_f32(tile, &at->param, &at->master, x->p);
        return;
    }
    store_f32(tile, &at->param, x->p, 0);
    if (at->master.dtype >= 0)
        store_f32(tile, &at->master, x->p, 0);
}

/* Updates a thread's elements of the tile at `base`. Returns 0 where it has left its block. */
FST_DEVICE int fst_update_tile(const fst_share *share, uint32_t base, const fst_tile_places *at,
                               const fst_step_f32 *step, int write_grad)
{
    const uint32_t first = base + share->thread * 8;
    const fst_tile tile = {first, first + 4, 1, 1};
    fst_words words[FST_OP_STATE][2];
    fst_eight codes[2];
    uint16_t scales[2];
    fst_held_f32 x;
    fetch_f32(&tile, &at->param, words[FST_OP_PARAM]);
    fetch_f32(&tile, &at->master, words[FST_OP_MASTER]);
    FST_UNROLL
    for (unsigned k = 0; k < 2; k++) {
        codes[k] = *(fst_eight *)(at->codes[k] + first);
        scales[k] = at->scales[k][first / FST_BLOCK];
    }
    fetch_items_f32(&tile, &at->grad, words[FST_OP_GRAD]);
    __syncwarp(); /* nvcc moves no load past it */
    pack_f32(&at->grad, words[FST_OP_GRAD]);
    widen_f32(words[FST_OP_PARAM], at->param.dtype, x.p);
    if (fst_hidden(at->master.dtype) == FST_I16)
        join_f32(words[FST_OP_PARAM], words[FST_OP_MASTER], x.p);
    else if (at->master.dtype >= 0)
        take_newer_f32(words[FST_OP_MASTER], at->master.dtype, at->param.dtype, x.p);
    widen_f32(words[FST_OP_GRAD], at->grad.dtype, x.g);
    FST_UNROLL
    for (int k = 0; k < 2; k++)
        fst_of_eight(&codes[k], k, fst_bf16_to_f32(scales[k]), x.state[k]);
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++) {
        x.g[q] = x.g[q] * step->inv_scale * (step->sign * step->coefficient);
        x.state[2][q] = 0.0f;
    }
    fst_apply_in_tiles(&x, step);
    const int sure = fst_all_large(x.p, 1) || fst_others_zero(x.p, x.g, x.state[0]);
    scales[0] = fst_scale_of_lanes(x.state[0], 0, sure);
    scales[1] = fst_scale_of_lanes(x.state[1], 1, 1);
    if (scales[0] == FST_SCALE_NAN || (at->two && scales[1] == FST_SCALE_NAN))
        return 0;
    fst_store_tile(&tile, share->thread, at, step, &x, words, scales, write_grad);
    return 1;
}

/* Updates tiles of a chunk that is in one segment, and leaves those whose bits it returns. */
FST_DEVICE uint64_t update_tiles_f32(const fst_share *share, const fst_device_operand *op,
                                     const fst_step_f32 *step, int write_grad)
{
    const uint32_t segment = (uint32_t)fst_segment_from(share->begin, step->span->row) & 0xFFFFu;
    const uint32_t known = segment < share->count ? 0 : fst_tiled(share, op, step->rule);
    const uint32_t tile = 8 * FST_WARP;
    uint64_t unsure = known / tile < 64 ? UINT64_MAX << known / tile : 0;
    fst_tile_places at;
    at.param = fst_place_of(share, &op[FST_OP_PARAM]);
    at.grad = fst_place_of(share, &op[FST_OP_GRAD]);
    at.master = fst_place_of(share, &op[FST_OP_MASTER]);
    at.two = op[FST_OP_STATE + 1].data != 0;
    FST_UNROLL
    for (unsigned k = 0; k < 2; k++) { /* those of the first where there is no second */
        const unsigned there = at.two ? k : 0;
        at.codes[k] = (char *)fst_code_at(share, &op[FST_OP_STATE + there], 0);
        at.scales[k] = fst_scale_at(share, step->span, 0, there);
    }
    for (uint32_t base = step->warp * tile; base < known; base += step->warps * tile)
        if (!fst_update_tile(share, base, &at, step, write_grad))
            fst_leave(&unsure, base, 0);
    return unsure;
}

FST_DEVICE uint64_t update_tiles_f64(const fst_share *share, const fst_device_operand *op,
                                     const fst_step_f64 *step, int write_grad)
{
    (void)share, (void)op, (void)step, (void)write_grad;
    return UINT64_MAX;
}
