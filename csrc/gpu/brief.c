#include "gpu/brief.h"

#include <string.h>

#include "gpu/mirror.h"

/* Structs that are copied into the launch struct one after another stay aligned. */
_Static_assert(sizeof(fst_device_operand) == 16 && sizeof(fst_device_run) == 16 &&
                   sizeof(fst_device_layout) % 8 == 0,
               "operands and runs come first, layouts last");

size_t fst_gpu_brief_size(const fst_work *work, size_t most)
{
    const fst_layout *last = NULL;
    size_t size =
        work->span_count * (work->width * sizeof(fst_device_operand) + sizeof(fst_device_run));
    if (work->round_count > 1) /* chunks are not in the order of the spans */
        return SIZE_MAX;
    for (size_t i = 0; size <= most && i < work->span_count * work->width; i++) {
        const fst_layout *layout = work->operands[i].layout;
        if (layout && layout->ndim > FST_DEVICE_MAX_DIMS)
            return SIZE_MAX;
        if (layout && layout != last)
            size += sizeof(fst_device_layout);
        last = layout ? layout : last;
    }
    return size <= most ? size : SIZE_MAX;
}

static void put(char **at, const void *value, size_t size)
{
    memcpy(*at, value, size);
    *at += size;
}

fst_device_tables fst_gpu_brief_put(const fst_work *work, void *launch, size_t at)
{
    const size_t count = work->span_count * work->width;
    const size_t runs_at = at + count * sizeof(fst_device_operand);
    const size_t layouts_at = runs_at + work->span_count * sizeof(fst_device_run);
    char *operands = (char *)launch + at, *runs = (char *)launch + runs_at,
         *layouts = (char *)launch + layouts_at;
    const fst_layout *last = NULL;
    int32_t layout_count = 0;
    uint32_t first = 0;
    for (size_t i = 0; i < count; i++) {
        const fst_operand *op = &work->operands[i];
        if (op->layout && op->layout != last) {
            const fst_device_layout layout = fst_gpu_layout(op->layout);
            put(&layouts, &layout, sizeof layout);
            layout_count++;
            last = op->layout;
        }
        const fst_device_operand value = {(uint64_t)(uintptr_t)op->data,
                                          op->layout ? layout_count - 1 : -1, (int32_t)op->dtype};
        put(&operands, &value, sizeof value);
    }
    for (size_t i = 0; i < work->span_count; i++) {
        const fst_device_run run = {.count = work->spans[i].count, .first = first};
        first += (uint32_t)((run.count + FST_CHUNK - 1) / FST_CHUNK);
        put(&runs, &run, sizeof run);
    }
    return (fst_device_tables){
        .operands = at,
        .layouts = layouts_at,
        .chunks = runs_at,
        .width = work->width,
        .chunk_count = first,
        .run_count = (uint32_t)work->span_count,
    };
}
