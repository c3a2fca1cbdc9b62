/* tile.h - which thread works on which elements of a chunk.
 *
 * If every operand is contiguous and aligned, the elements that fill whole 16-byte words come
 * first. A thread takes runs of 1 << shift elements, as many as 16 bytes of the narrowest type
 * hold; the next thread takes the next run. The other elements, and all of a chunk with any
 * other operand, are loaded one by one. */
#pragma once

#include "read_tables.h"

/* A thread's share of a chunk, which a group of threads (a warp or a block) works on. */
typedef struct {
    const fst_device_layout *layouts;
    int64_t begin;         /* of the chunk in its span */
    uint32_t count, whole; /* elements; how many of them are loaded by whole words */
    uint32_t thread, threads;
    unsigned shift;
} fst_share;

FST_DEVICE fst_share fst_share_of(const fst_device_tables *tables, const fst_device_chunk *chunk,
                                  uint32_t thread, uint32_t threads)
{
    fst_share share;
    share.layouts = fst_layouts_of(tables);
    share.begin = chunk->begin;
    share.count = share.whole = chunk->count;
    share.thread = thread;
    share.threads = threads;
    share.shift = 0;
    return share;
}

/* Completes a share when all operands have been taken into account. */
FST_DEVICE void fst_share_close(fst_share *share)
{
    share->whole &= ~((1u << share->shift) - 1u);
    if (!share->whole)
        share->shift = 0;
}

/* The offset of an element of the chunk in an operand. */
FST_DEVICE int64_t fst_share_place(const fst_share *share, const fst_device_operand *op,
                                   uint32_t element)
{
    const int64_t at = share->begin + element;
    return op->layout < 0 ? at : fst_offset(&share->layouts[op->layout], at);
}

/* Whether the operand's memory holds the elements with their signs flipped. */
FST_DEVICE int fst_share_flips(const fst_share *share, const fst_device_operand *op)
{
    return op->layout >= 0 && share->layouts[op->layout].negated;
}

/* The bits of an element of 16. */
FST_DEVICE uint16_t fst_half_get(const fst_share *share, const fst_device_operand *op,
                                 uint32_t element)
{
    const uint16_t *data = (const uint16_t *)fst_global(op->data);
    const uint16_t sign = fst_share_flips(share, op) ? 0x8000u : 0u;
    return (uint16_t)(data[fst_share_place(share, op, element)] ^ sign);
}

FST_DEVICE void fst_half_set(const fst_share *share, const fst_device_operand *op, uint32_t element,
                             uint16_t half)
{
    uint16_t *data = (uint16_t *)fst_global(op->data);
    const uint16_t sign = fst_share_flips(share, op) ? 0x8000u : 0u;
    data[fst_share_place(share, op, element)] = (uint16_t)(half ^ sign);
}

/* The number of the thread's element q among those that the group holds from `base` on. */
FST_DEVICE uint32_t fst_share_element(const fst_share *share, uint32_t base, uint32_t q)
{
    const uint32_t run = (q >> share->shift) * share->threads + share->thread;
    return base + (run << share->shift) + (q & ((1u << share->shift) - 1u));
}

/* A thread's elements of a tile: two runs, of which either may lie behind the words. */
typedef struct {
    uint32_t first, second; /* element of the chunk at which the run begins */
    int has_first, has_second;
} fst_tile;

/* An operand's elements of a chunk that are loaded by words. */
typedef struct {
    uint64_t at;   /* address of the first */
    int32_t dtype; /* negative: there is no operand */
} fst_place;

FST_DEVICE fst_place fst_place_of(const fst_share *share, const fst_device_operand *op)
{
    fst_place place;
    place.at = op->data + ((uint64_t)share->begin << fst_size_log2(op->dtype));
    place.dtype = op->data ? op->dtype : -1;
    return place;
}

/* Whether an operand's elements of the chunk begin at a multiple of 16 bytes. */
FST_DEVICE int fst_aligned(const fst_share *share, const fst_device_operand *op)
{
    return (fst_place_of(share, op).at & 15u) == 0;
}

/* Leaves a tile of 256 elements, that of a turn from an element on, to a slower way. */
FST_DEVICE void fst_leave(uint64_t *tiles, uint32_t element, uint32_t turn)
{
    *tiles |= (uint64_t)1 << (element / (8 * FST_WARP) + turn);
}
