/* code_strips.h - strips of states in 8 bits, which end with blocks. */
#pragma once

#include "rules/codes.h"

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

/* Bytes of an element of an operand without a layout, and where one lies; NULL: there is no such
 * operand. */
static size_t size_of(const fst_operand *op)
{
    return op->scales ? 1 : fst_dtype_size(op->dtype);
}

static void *element(const fst_operand *op, int64_t at)
{
    return op->data ? (char *)op->data + at * (int64_t)size_of(op) : NULL;
}

/* Elements of the next strip of states that are all in codes: whole blocks or, of fewer than
 * FST_BLOCK, one. */
static size_t codes_strip(int64_t of_segment, size_t left)
{
    const size_t n = of_segment < (int64_t)left ? (size_t)of_segment : left;
    return n < FST_BLOCK ? n : n < FST_CODES_STRIP ? n / FST_BLOCK * FST_BLOCK : FST_CODES_STRIP;
}

/* Room for an operand's part of a block that is made whole by zeros. */
typedef char strip_room[FST_OP_COUNT][FST_BLOCK * sizeof(float)] ALIGNED;

/* An operand's elements of a strip: in place, or as a whole block. */
static void *whole_strip(const fst_operand *op, char *room, int64_t at, size_t n)
{
    const size_t size = size_of(op);
    if (!op->data || n >= FST_BLOCK)
        return element(op, at);
    memset(room, 0, FST_BLOCK * size);
    return memcpy(room, element(op, at), n * size);
}

/* Writes them back where they are not in place. */
static void write_strip(const fst_operand *op, const void *strip, int64_t at, size_t n)
{
    if (op->data && n < FST_BLOCK)
        memcpy(element(op, at), strip, n * size_of(op));
}

/* Prefetches one of the parts of what comes PREFETCH elements behind a strip: all at once would
 * fill the processor's queue of loads, and stop it. */
static void prefetch_part(const fst_operand *op, int64_t at, size_t n, size_t left, size_t part,
                          size_t parts)
{
    const size_t from = n * part / parts / FST_BLOCK * FST_BLOCK;
    const size_t to = n * (part + 1) / parts / FST_BLOCK * FST_BLOCK;
    for (unsigned k = 0; left >= PREFETCH + n && k < FST_OP_COUNT; k++) {
        const char *begin = element(&op[k], at + (int64_t)(PREFETCH + from));
        const size_t size = size_of(&op[k]);
        for (size_t line = 0; begin && line < (to - from) * size; line += 64)
            __builtin_prefetch(begin + line);
    }
}

/* Of each block of a strip, in bits as rules/codes.h compares them. */
typedef uint32_t largest_sizes[FST_STRIP_BLOCKS];
