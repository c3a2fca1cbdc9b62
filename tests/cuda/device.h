/* device.h - a plan's tables as a device would have them, in the host's memory: every table ends
 * where its memory ends, and what a kernel has to write starts as NaN. */
#pragma once

#include "base/device.h"
#include "common.h"
#include "core/plan.h"
#include "simt.h"

typedef struct {
    fst_device_tables tables;
    fst_device_operand *operands;
    fst_device_layout *layouts;
    fst_device_chunk *chunks;
    fst_device_span *spans;
    fst_device_group *groups;
    void *args;
    double *partial;
    fst_device_outcome *outcome;
} device;

static inline uint64_t address_of(const void *memory)
{
    return (uint64_t)(uintptr_t)memory;
}

static inline fst_device_scalar scalar_at(void *memory, int is_double)
{
    return (fst_device_scalar){.data = address_of(memory), .is_double = is_double};
}

static inline void *must_alloc_poison(size_t size)
{
    return memset(must_alloc(size), 0xFF, size);
}

static inline int32_t device_add_layout(device *d, int32_t *count, const fst_layout *from)
{
    fst_device_layout *to = &d->layouts[*count];
    memset(to, 0xFF, sizeof *to);
    to->ndim = from->ndim;
    to->negated = from->negated;
    memcpy(to->shape, from->shape, (size_t)from->ndim * sizeof(int64_t));
    memcpy(to->stride, from->stride, (size_t)from->ndim * sizeof(int64_t));
    return (*count)++;
}

/* The tables of a piece of work, followed by `empty` spans without chunks. */
static inline void device_make(device *d, const fst_work *work, size_t empty)
{
    const size_t operands = work->span_count * work->width, spans = work->span_count + empty;
    int32_t layouts = 0;
    for (size_t i = 0; i < operands; i++)
        layouts += work->operands[i].layout != NULL;
    d->operands = must_alloc_poison(operands * sizeof *d->operands);
    d->layouts = must_alloc_poison((size_t)layouts * sizeof *d->layouts);
    layouts = 0;
    for (size_t i = 0; i < operands; i++) {
        const fst_operand *op = &work->operands[i];
        d->operands[i] = (fst_device_operand){address_of(op->data), -1, (int32_t)op->dtype};
        if (op->data && op->layout)
            d->operands[i].layout = device_add_layout(d, &layouts, op->layout);
    }
    d->chunks = must_alloc_poison(work->chunk_count * sizeof *d->chunks);
    for (size_t i = 0; i < work->chunk_count; i++) {
        const fst_chunk *chunk = &work->chunks[i];
        d->chunks[i] = (fst_device_chunk){chunk->begin, chunk->span, chunk->count};
    }
    d->spans = must_alloc_poison(spans * sizeof *d->spans);
    d->groups = NULL;
    d->args = must_alloc_poison(spans * FST_DEVICE_ARGS);
    d->partial = must_alloc_poison(work->chunk_count * sizeof *d->partial);
    d->outcome = must_alloc(sizeof *d->outcome);
    memset(d->outcome, 0, sizeof *d->outcome);
    d->tables = (fst_device_tables){
        .operands = address_of(d->operands),
        .layouts = address_of(d->layouts),
        .spans = address_of(d->spans),
        .chunks = address_of(d->chunks),
        .args = address_of(d->args),
        .partial = address_of(d->partial),
        .outcome = address_of(d->outcome),
        .span_count = (uint32_t)spans,
        .width = work->width,
        .chunk_count = (uint32_t)work->chunk_count,
    };
}

/* A plan of one list of tensors that holds one array, and its tables. */
static inline void device_make_of(device *d, fst_plan *plan, const array *a)
{
    fst_status status = {0};
    fst_plan_init(plan, 1);
    fst_plan_begin(plan);
    *fst_plan_add(plan, a->count, 0, &status) = a->op;
    CHECK_INT(fst_plan_seal(plan, 0, 1, &status), FST_OK);
    const fst_work work = fst_plan_work(plan);
    device_make(d, &work, 0);
}

static inline void device_free(device *d)
{
    free(d->operands);
    free(d->layouts);
    free(d->chunks);
    free(d->spans);
    free(d->groups);
    free(d->args);
    free(d->partial);
    free(d->outcome);
}

/* The tables for a launch that runs one round. */
static inline fst_device_tables device_round(const device *d, const fst_work *work, size_t round)
{
    fst_device_tables tables = d->tables;
    tables.chunk_first = work->rounds[round];
    tables.chunk_count = work->rounds[round + 1] - work->rounds[round];
    return tables;
}

/* Every launch leaves the outcome ready for the next one. */
static inline void device_launch(const device *d, const char *name, unsigned grid,
                                 const void *launch)
{
    const simt_kernel *kernel = simt_find(name);
    if (!CHECK(kernel != NULL))
        return;
    if (!CHECK(!simt_launch(kernel, grid, FST_DEVICE_BLOCK, launch)))
        fprintf(stderr, "    %s\n", simt_error());
    if (d)
        CHECK(d->outcome->ticket == 0 && d->outcome->seen == 0);
}
