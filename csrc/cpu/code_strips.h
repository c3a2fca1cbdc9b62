/* code_strips.h - strips of states in 8 bits, which end with blocks. */
#pragma once

#include "cpu/code_blocks.h"

/* How many elements from the beginning of a block on, at most `n`, end with a block; `left`
 * elements of the chunk are left. */
static size_t whole_blocks(const fst_operand *op, int64_t at, size_t n, size_t left)
{
    if (n >= left)
        return left;
    if (!op->row)
        return n;
    const int64_t end = at + (int64_t)n;
    return n - (size_t)((end - fst_segment_at(end, op->row).begin) % FST_BLOCK);
}

/* A state in codes, with whose blocks strips have to end; NULL: there is none. */
static const fst_operand *state_in_codes(const fst_operand *op, unsigned states)
{
    for (unsigned k = FST_OP_STATE; k < FST_OP_STATE + states; k++)
        if (op[k].scales)
            return &op[k];
    return NULL;
}

/* In place of the states' type, where all are in codes. */
enum { IN_CODES = -1 };

static int is_in_codes(const fst_operand *op, int is_signed)
{
    return op->scales && op->dtype == (is_signed ? FST_I8 : FST_U8);
}

/* Whole blocks, one after another: in place, or in rooms to which they are copied. So many have
 * others far behind them, which are prefetched. */
typedef struct {
    char *data[FST_OP_COUNT];
    uint16_t *scales[FST_MAX_STATES];
    size_t blocks, far;
} code_strip;

/* Whole blocks from one on to the end of its segment. So many and more are worked on in place. */
enum { FEWEST_BLOCKS = 4 };

static size_t whole_in_row(code_block block)
{
    return (size_t)(block.segment_end - block.at) / FST_BLOCK;
}

/* Rooms for shorter blocks, which are made whole by zeros, and for few between them. */
enum { ROOM_BLOCKS = 16 };
typedef struct {
    char data[FST_OP_COUNT][ROOM_BLOCKS * FST_BLOCK * sizeof(float)] ALIGNED;
    uint16_t scales[FST_MAX_STATES][ROOM_BLOCKS];
} strip_rooms;

static size_t element_size(const fst_operand *op)
{
    return op->scales ? 1 : fst_dtype_size(op->dtype);
}

/* Copies a block to the rooms, or back. Gradients go back if they are written. */
static void copy_block(strip_rooms *rooms, size_t b, const fst_operand *op, code_block block,
                       int back, int write_grad)
{
    for (unsigned k = 0; k < FST_OP_COUNT; k++) {
        const size_t size = element_size(&op[k]);
        char *room = rooms->data[k] + b * FST_BLOCK * size;
        char *data = (char *)op[k].data + block.at * (int64_t)size;
        if (!op[k].data || (back && k == FST_OP_GRAD && !write_grad))
            continue;
        if (!back)
            memset(room + block.n * size, 0, (FST_BLOCK - block.n) * size);
        memcpy(back ? data : room, back ? room : data, block.n * size);
        if (!op[k].scales)
            continue;
        uint16_t *scale = &rooms->scales[k - FST_OP_STATE][b], *own = &op[k].scales[block.scale];
        *(back ? own : scale) = *(back ? scale : own);
    }
}

/* Strips of blocks in place, from one on, and of those that are copied. */
static code_strip strip_from(const fst_operand *op, code_block first, size_t blocks)
{
    code_strip strip = {.blocks = blocks};
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        if (op[k].data)
            strip.data[k] = (char *)op[k].data + first.at * (int64_t)element_size(&op[k]);
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (op[FST_OP_STATE + k].data)
            strip.scales[k] = op[FST_OP_STATE + k].scales + first.scale;
    return strip;
}

static code_strip strip_in(strip_rooms *rooms, size_t blocks)
{
    code_strip strip = {.blocks = blocks};
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        strip.data[k] = rooms->data[k];
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        strip.scales[k] = rooms->scales[k];
    return strip;
}

static void prefetch_lines(const void *from, size_t bytes)
{
    for (size_t line = 0; line < bytes; line += 64)
        __builtin_prefetch((const char *)from + line);
}
