#include "core/overlap.h"

#include <stdlib.h>

typedef struct {
    uintptr_t begin, end;
    uint32_t span;
} range;

static range range_of(const fst_operand *op, const fst_span *span, size_t index)
{
    int64_t last = span->count - 1;
    if (op->layout) {
        last = 0;
        for (int d = 0; d < op->layout->ndim; d++)
            last += (op->layout->shape[d] - 1) * op->layout->stride[d];
    }
    const uintptr_t begin = (uintptr_t)op->data;
    const uintptr_t end = begin + ((uintptr_t)last + 1) * fst_dtype_size(op->dtype);
    return (range){begin, end, (uint32_t)index};
}

static int by_begin(const void *left, const void *right)
{
    const range *a = left, *b = right;
    return (a->begin > b->begin) - (a->begin < b->begin);
}

static int meet(const range *ranges, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (ranges[i].begin < ranges[i - 1].end)
            return 1;
    return 0;
}

static int ascending(const range *ranges, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (ranges[i].begin < ranges[i - 1].begin)
            return 0;
    return 1;
}

/* Rare, so quadratic in the spans: each one follows the last round that holds memory of its own. */
static size_t assign(const range *ranges, size_t count, uint32_t *round_of, size_t span_count)
{
    uint32_t last = 0;
    for (size_t span = 0; span < span_count; span++) {
        uint32_t round = 0;
        for (size_t i = 0; i < count; i++) {
            if (ranges[i].span != span)
                continue;
            for (size_t k = 0; k < count; k++)
                if (ranges[k].span < span && ranges[k].begin < ranges[i].end &&
                    ranges[i].begin < ranges[k].end && round_of[ranges[k].span] >= round)
                    round = round_of[ranges[k].span] + 1;
        }
        round_of[span] = round;
        last = round > last ? round : last;
    }
    return last + 1;
}

fst_code fst_overlap_rounds(const fst_work *work, unsigned first, unsigned how_many, uint32_t **round_of,
                            size_t *round_count, fst_status *status)
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
            if (op->data)
                ranges[count++] = range_of(op, &work->spans[i], i);
        }
    if (!ascending(ranges, count))
        qsort(ranges, count, sizeof *ranges, by_begin);
    if (meet(ranges, count)) {
        *round_of = malloc(work->span_count * sizeof **round_of);
        if (*round_of)
            *round_count = assign(ranges, count, *round_of, work->span_count);
        else
            fst_fail(status, FST_NO_MEMORY, "no memory for %zu spans", work->span_count);
    }
    free(ranges);
    return status->code;
}
