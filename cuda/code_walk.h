/* code_walk.h - the blocks of a chunk whose states are in codes, one by one: those that
 * code_tiles.h leaves. A warp takes a block, and each thread two elements of it. */
#pragma once

#include "code_words.h"

/* Where a thread is, in memory that it shares with none: registers are few. */
typedef struct {
    uint16_t halves;             /* of blocks before, with an odd number in a block's second half */
    uint16_t begin, end;         /* elements of the block */
    uint16_t segment;            /* where it ends */
    float first[FST_MAX_STATES]; /* new states of the first half */
} fst_walk;

typedef struct {
    fst_walk of[FST_DEVICE_BLOCK];
    uint32_t chunk[FST_DEVICE_BLOCK]; /* at which a thread is */
} fst_walks;

/* Begins before the first tile of 256 elements that has a bit in `left` of some lane; these are
 * blocks of the lane, or all behind what tiles hold. */
FST_DEVICE void fst_walk_begin(fst_walk *walk, const fst_share *share, uint32_t row, uint64_t left)
{
    const uint32_t low = left ? fst_lowest_bit(left) : FST_CHUNK / (8 * FST_WARP);
    const uint32_t tile = ~fst_largest(~low, FST_WARP);
    walk->segment = (uint16_t)fst_segment_from(share->begin, row);
    walk->end = (uint16_t)(tile * 8 * FST_WARP);
    walk->halves = (uint16_t)(tile * 2 * FST_TILE_BLOCKS - 1);
}

/* Goes to the next elements of this warp, of so many; 0: there are none. All lanes call it. */
FST_DEVICE int fst_walk_on(fst_walk *walk, const fst_share *share, uint32_t row, uint64_t left,
                           uint32_t warp, uint32_t warps)
{
    fst_read_again();
    int own = ++walk->halves & 1;
    while (!own) {
        const uint32_t begin = walk->end, tile = begin / (8 * FST_WARP), n = begin / FST_BLOCK;
        const int here = share->thread / FST_CODE_LANES == n % FST_TILE_BLOCKS;
        uint32_t end = begin + FST_BLOCK;
        if (begin >= share->count)
            return 0;
        if (begin == walk->segment)
            walk->segment = (uint16_t)(row < FST_CHUNK ? begin + row : FST_CHUNK);
        end = end < walk->segment ? end : walk->segment;
        walk->begin = (uint16_t)begin;
        walk->end = (uint16_t)(end < share->count ? end : share->count);
        own = (int)fst_largest(here && left >> tile & 1 && tile % warps == warp, FST_WARP);
        walk->halves = (uint16_t)(walk->halves + (own ? 0 : 2));
    }
    return 1;
}

/* The element of the chunk that the thread has. */
FST_DEVICE uint32_t fst_walk_element(const fst_walk *walk, const fst_share *share)
{
    return walk->begin + (walk->halves & 1u) * FST_WARP + share->thread;
}

/* Keeps the new states of a half and, when all lanes have the block's, stores its codes and scales.
 */
FST_DEVICE void fst_walk_store(fst_walk *walk, const fst_share *share, const fst_device_operand *op,
                               const fst_device_span *span, const float *states)
{
    const uint32_t i = walk->begin + share->thread;
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++) {
        const fst_device_operand *state = &op[FST_OP_STATE + k];
        if (!fst_is_coded(state))
            continue;
        if (walk->halves % 2 == 0) {
            walk->first[k] = states[k];
            continue;
        }
        const uint32_t made = fst_to_codes(walk->first[k], states[k], fst_has_signs(state));
        if (share->thread == 0)
            *fst_scale_at(share, span, walk->halves / 2, k) = (uint16_t)(made >> 16);
        if (i < walk->end)
            *fst_code_at(share, state, i) = (uint8_t)made;
        if (i + FST_WARP < walk->end)
            *fst_code_at(share, state, i + FST_WARP) = (uint8_t)(made >> 8);
    }
}
