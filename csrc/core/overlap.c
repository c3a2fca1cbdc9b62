#include "core/overlap.h"

#include <stdlib.h>

typedef struct {
    uintptr_t begin, end;
    size_t slot;        /* index before sorting: how_many * span + operand */
    size_t first, last; /* the run of ranges that overlap, directly or through others */
} range;

fst_extent fst_overlap_extent(const fst_operand *op, int64_t count)
{
    int64_t last = count - 1;
    if (op->layout) {
        last = 0;
        for (int d = 0; d < op->layout->ndim; d++)
            last += (op->layout->shape[d] - 1) * op->layout->stride[d];
    }
    const uintptr_t begin = (uintptr_t)op->data;
    return (fst_extent){begin, begin + ((uintptr_t)last + 1) * fst_operand_size(op->dtype)};
}

fst_extent fst_span_extent(const fst_operand *op, const fst_span *span)
{
    const uintptr_t before = (uintptr_t)span->begin * fst_operand_size(op->dtype);
    const fst_extent extent = fst_overlap_extent(op, span->count);
    return (fst_extent){extent.begin + before, extent.end + before};
}

static int by_begin(const void *left, const void *right)
{
    const range *a = left, *b = right;
    return (a->begin > b->begin) - (a->begin < b->begin);
}

static int ascending(const range *ranges, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (ranges[i].begin < ranges[i - 1].begin)
            return 0;
    return 1;
}

/* Finds the runs in sorted ranges. Returns whether any has more than one range. */
static int find_runs(range *ranges, size_t count)
{
    int meet = 0;
    for (size_t first = 0, last; first < count; first = last) {
        uintptr_t end = ranges[first].end;
        for (last = first + 1; last < count && ranges[last].begin < end; last++)
            end = ranges[last].end > end ? ranges[last].end : end;
        for (size_t i = first; i < last; i++) {
            ranges[i].first = first;
            ranges[i].last = last;
        }
        meet |= last - first > 1;
    }
    return meet;
}

/* The round of a span: one after all earlier spans that it overlaps. `place` maps an index
 * before sorting to a range. */
static uint32_t round_for(const range *ranges, const size_t *place, size_t span, unsigned how_many,
                          const uint32_t *round_of)
{
    uint32_t round = 0;
    for (unsigned k = 0; k < how_many; k++) {
        const size_t at = place[span * how_many + k];
        if (at == SIZE_MAX)
            continue; /* an absent operand */
        const range *mine = &ranges[at];
        for (size_t i = mine->first; i < mine->last; i++) {
            const size_t other = ranges[i].slot / how_many;
            if (other < span && ranges[i].begin < mine->end && mine->begin < ranges[i].end &&
                round_of[other] >= round)
                round = round_of[other] + 1;
        }
    }
    return round;
}

static size_t assign(const range *ranges, size_t count, unsigned how_many, size_t span_count,
                     uint32_t *round_of, size_t *place)
{
    uint32_t last = 0;
    for (size_t slot = 0; slot < span_count * how_many; slot++)
        place[slot] = SIZE_MAX;
    for (size_t i = 0; i < count; i++)
        place[ranges[i].slot] = i;
    for (size_t span = 0; span < span_count; span++) {
        round_of[span] = round_for(ranges, place, span, how_many, round_of);
        last = round_of[span] > last ? round_of[span] : last;
    }
    return last + 1;
}

fst_code fst_overlap_rounds(const fst_work *work, unsigned first, unsigned how_many,
                            uint32_t **round_of, size_t *round_count, fst_status *status)
{
    *round_of = NULL;
    *round_count = 1;
    range *ranges = malloc((work->span_count * how_many + 1) * sizeof *ranges);
    if (!ranges)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu spans", work->span_count);
    size_t count = 0;
    for (size_t i = 0; i < work->span_count; i++)
        for (unsigned k = 0; k < how_many; k++) {
            const fst_operand *op = &work->operands[i * work->width + first + k];
            if (!op->data)
                continue;
            const fst_extent extent = fst_span_extent(op, &work->spans[i]);
            ranges[count++] = (range){extent.begin, extent.end, i * how_many + k, 0, 0};
        }
    if (!ascending(ranges, count))
        qsort(ranges, count, sizeof *ranges, by_begin);
    if (find_runs(ranges, count)) {
        size_t *place = malloc(work->span_count * how_many * sizeof *place);
        *round_of = malloc(work->span_count * sizeof **round_of);
        if (place && *round_of)
            *round_count = assign(ranges, count, how_many, work->span_count, *round_of, place);
        else
            fst_fail(status, FST_NO_MEMORY, "no memory for %zu spans", work->span_count);
        free(place);
    }
    free(ranges);
    if (status->code) {
        free(*round_of);
        *round_of = NULL;
    }
    return status->code;
}
