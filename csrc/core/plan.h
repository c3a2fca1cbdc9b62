/* plan.h - a plan: the list of spans of a pass, and the chunk list and rounds derived from it.
 *
 * A plan is filled again for every step that differs: begin, add each span and set its operands,
 * seal. While the number of elements of every span stays the same, sealing keeps the chunk list. */
#pragma once

#include "base/status.h"
#include "base/work.h"
#include "core/overlap.h"

typedef struct {
    fst_span *spans;
    fst_operand *operands;
    fst_chunk *chunks;
    uint32_t *rounds;
    double *partial;     /* one per chunk */
    fst_extent *written; /* the memory that the rounds are for */
    size_t span_count, span_capacity, sealed_count;
    size_t chunk_count, chunk_capacity, round_count;
    size_t written_count, written_capacity;
    uint64_t serial; /* of the chunk list */
    unsigned width;
    unsigned sealed_first, sealed_many; /* operands that were written, for the last seal */
    int stale;                          /* the chunk list no longer fits the spans */
    int sealed;                         /* sealed, and not begun since */
} fst_plan;

void fst_plan_init(fst_plan *plan, unsigned width);
void fst_plan_free(fst_plan *plan);

void fst_plan_begin(fst_plan *plan);

/* Adds a span of `count` > 0 elements with absent operands. Returns the operands, which the next
 * call may move, or NULL without memory. */
fst_operand *fst_plan_add(fst_plan *plan, int64_t count, uint32_t args, fst_status *status);

/* The same for a part of a larger span, in which chunks end where that's would. */
fst_operand *fst_plan_add_part(fst_plan *plan, int64_t begin, int64_t count, uint32_t args,
                               fst_status *status);

/* Makes the chunk list. Operands `first` to `first + how_many - 1` of each span will be written;
 * spans that overlap there go into different rounds. Sealing again costs nothing if only
 * operands that are not written have changed. */
fst_code fst_plan_seal(fst_plan *plan, unsigned first, unsigned how_many, fst_status *status);

/* Says that an operand has moved to other memory. The plan is then sealed anew if it is written. */
static inline void fst_plan_moved(fst_plan *plan, unsigned operand)
{
    if (operand - plan->sealed_first < plan->sealed_many)
        plan->sealed = 0;
}

/* The plan as passes read it. Valid until the plan changes. */
static inline fst_work fst_plan_work(const fst_plan *plan)
{
    return (fst_work){
        .spans = plan->spans,
        .operands = plan->operands,
        .chunks = plan->chunks,
        .rounds = plan->rounds,
        .span_count = plan->span_count,
        .chunk_count = plan->chunk_count,
        .round_count = plan->round_count,
        .serial = plan->serial,
        .width = plan->width,
    };
}
