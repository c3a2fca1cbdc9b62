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

static int are_in_codes(const fst_operand *op, unsigned states)
{
    for (unsigned k = FST_OP_STATE; k < FST_OP_STATE + states; k++)
        if (!op[k].scales)
            return 0;
    return 1;
}
