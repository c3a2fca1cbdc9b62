/* overlap.h - finds spans that write the same memory, so that they do not run at the same time. */
#pragma once

#include "base/status.h"
#include "base/work.h"

/* The range of memory that an operand reaches over. */
typedef struct {
    uintptr_t begin, end;
} fst_extent;

static inline int fst_extents_meet(fst_extent a, fst_extent b)
{
    return a.begin < b.end && b.begin < a.end;
}

fst_extent fst_overlap_extent(const fst_operand *op, int64_t count);

/* The same for an operand of a span, which may be a part of a larger one. */
fst_extent fst_span_extent(const fst_operand *op, const fst_span *span);

/* Gives every span a round. Spans of one round write disjoint memory with their operands `first`
 * to `first + how_many - 1`, and overlapping spans keep their order. *round_of is NULL where one
 * round is enough; else the caller frees it. */
fst_code fst_overlap_rounds(const fst_work *work, unsigned first, unsigned how_many,
                            uint32_t **round_of, size_t *round_count, fst_status *status);
