#include "core/plan.h"

#include <stdlib.h>

void fst_plan_init(fst_plan *plan, unsigned width)
{
    *plan = (fst_plan){.width = width, .stale = 1};
}

void fst_plan_free(fst_plan *plan)
{
    free(plan->spans);
    free(plan->operands);
    free(plan->chunks);
    free(plan->rounds);
    free(plan->partial);
    free(plan->written);
    fst_plan_init(plan, plan->width);
}

void fst_plan_begin(fst_plan *plan)
{
    plan->span_count = 0;
    plan->sealed = 0;
}

/* Grows an array to `count` elements. The array stays as it is without memory. */
static int grow(void *array, size_t count, size_t size)
{
    void *moved = realloc(*(void **)array, count * size);
    if (moved)
        *(void **)array = moved;
    return moved != NULL;
}

fst_operand *fst_plan_add(fst_plan *plan, int64_t count, uint32_t args, fst_status *status)
{
    return fst_plan_add_part(plan, 0, count, args, status);
}

fst_operand *fst_plan_add_part(fst_plan *plan, int64_t begin, int64_t count, uint32_t args,
                               fst_status *status)
{
    const size_t at = plan->span_count;
    if (at == plan->span_capacity) {
        const size_t capacity = at ? 2 * at : 64;
        if (!grow(&plan->spans, capacity, sizeof *plan->spans) ||
            !grow(&plan->operands, capacity * plan->width, sizeof *plan->operands)) {
            fst_fail(status, FST_NO_MEMORY, "no memory for %zu spans", capacity);
            return NULL;
        }
        plan->span_capacity = capacity;
    }
    if (at >= plan->sealed_count || plan->spans[at].count != count ||
        plan->spans[at].begin != begin)
        plan->stale = 1;
    plan->spans[at] = (fst_span){.begin = begin, .count = count, .args = args};
    plan->span_count++;
    fst_operand *operands = plan->operands + at * plan->width;
    for (unsigned k = 0; k < plan->width; k++)
        operands[k] = (fst_operand){.data = NULL};
    return operands;
}

static size_t chunks_of(const fst_span *span)
{
    const int64_t end = span->begin + span->count;
    return (size_t)((end + FST_CHUNK - 1) / FST_CHUNK - span->begin / FST_CHUNK);
}

static fst_code reserve_chunks(fst_plan *plan, fst_status *status)
{
    size_t count = 0;
    for (size_t i = 0; i < plan->span_count; i++)
        count += chunks_of(&plan->spans[i]);
    if (count >= UINT32_MAX || plan->span_count >= UINT32_MAX)
        return fst_fail(status, FST_UNSUPPORTED, "more than 2^32 chunks of %d elements", FST_CHUNK);
    if (count + 1 > plan->chunk_capacity) {
        if (!grow(&plan->chunks, count + 1, sizeof *plan->chunks) ||
            !grow(&plan->partial, count + 1, sizeof *plan->partial))
            return fst_fail(status, FST_NO_MEMORY, "no memory for %zu chunks", count);
        plan->chunk_capacity = count + 1;
    }
    return FST_OK;
}

/* Lists the chunks of the spans, round after round. */
static fst_code list_chunks(fst_plan *plan, const uint32_t *round_of, size_t round_count,
                            fst_status *status)
{
    if (reserve_chunks(plan, status))
        return status->code;
    if (!grow(&plan->rounds, round_count + 1, sizeof *plan->rounds))
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu rounds", round_count);
    static uint64_t lists;
    size_t at = 0;
    uint64_t cost = 0;
    plan->serial = __atomic_add_fetch(&lists, 1, __ATOMIC_RELAXED);
    for (size_t round = 0; round < round_count; round++) {
        plan->rounds[round] = (uint32_t)at;
        for (size_t i = 0; i < plan->span_count; i++) {
            const fst_span *span = &plan->spans[i];
            const int64_t end = span->begin + span->count;
            if (round_of && round_of[i] != round)
                continue;
            for (int64_t begin = span->begin, next; begin < end; begin = next) {
                next = (begin / FST_CHUNK + 1) * FST_CHUNK;
                const uint32_t size = (uint32_t)((next < end ? next : end) - begin);
                plan->chunks[at++] = (fst_chunk){begin, cost, (uint32_t)i, size};
                cost += size + FST_CHUNK_COST;
            }
        }
    }
    plan->rounds[round_count] = (uint32_t)at;
    plan->chunks[at] = (fst_chunk){.cost = cost};
    plan->chunk_count = at;
    plan->round_count = round_count;
    return FST_OK;
}

/* Remembers the memory that is written. Returns 1 if it is the same as before. */
static int same_memory(fst_plan *plan, unsigned first, unsigned how_many)
{
    int same = !plan->stale && plan->written_count == plan->span_count * how_many;
    size_t at = 0;
    for (size_t i = 0; i < plan->span_count; i++)
        for (unsigned k = 0; k < how_many; k++, at++) {
            const fst_operand *op = &plan->operands[i * plan->width + first + k];
            const fst_extent extent = fst_span_extent(op, &plan->spans[i]);
            same = same && plan->written[at].begin == extent.begin &&
                   plan->written[at].end == extent.end;
            plan->written[at] = extent;
        }
    plan->written_count = at;
    return same;
}

static fst_code make_rounds(fst_plan *plan, unsigned first, unsigned how_many, fst_status *status)
{
    if (plan->span_count != plan->sealed_count)
        plan->stale = 1;
    const size_t written = plan->span_count * how_many;
    if (written > plan->written_capacity) {
        if (!grow(&plan->written, written, sizeof *plan->written))
            return fst_fail(status, FST_NO_MEMORY, "no memory for %zu spans", plan->span_count);
        plan->written_capacity = written;
    }
    if (same_memory(plan, first, how_many))
        return FST_OK;
    uint32_t *round_of = NULL;
    size_t round_count = 1;
    const fst_work work = fst_plan_work(plan);
    plan->stale = 1; /* until the list is whole */
    if (fst_overlap_rounds(&work, first, how_many, &round_of, &round_count, status))
        return status->code;
    list_chunks(plan, round_of, round_count, status);
    free(round_of);
    if (status->code)
        return status->code;
    plan->sealed_count = plan->span_count;
    plan->stale = 0;
    return FST_OK;
}

fst_code fst_plan_seal(fst_plan *plan, unsigned first, unsigned how_many, fst_status *status)
{
    if (plan->sealed && plan->sealed_first == first && plan->sealed_many == how_many)
        return FST_OK;
    plan->sealed = 0;
    if (make_rounds(plan, first, how_many, status))
        return status->code;
    plan->sealed_first = first;
    plan->sealed_many = how_many;
    plan->sealed = 1;
    return FST_OK;
}
