#include "gpu/mirror.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 256, SMALL = 16, IN_LAUNCH = 16 };

static const size_t sizes[FST_SECTION_COUNT] = {
    [FST_SECTION_OUTCOME] = sizeof(fst_device_outcome),
    [FST_SECTION_SPANS] = sizeof(fst_device_span),
    [FST_SECTION_GROUPS] = sizeof(fst_device_group),
    [FST_SECTION_OPERANDS] = sizeof(fst_device_operand),
    [FST_SECTION_LAYOUTS] = sizeof(fst_device_layout),
    [FST_SECTION_CHUNKS] = sizeof(fst_device_chunk),
    [FST_SECTION_ARGS] = FST_DEVICE_ARGS,
    [FST_SECTION_PARTIAL] = sizeof(double),
};

_Static_assert(sizeof(fst_device_operand) == SMALL && sizeof(fst_device_chunk) == SMALL,
               "compared as two words");

/* Makes room. Old contents need not be moved, as every section is filled again. */
static fst_code reserve(fst_gpu_mirror *mirror, const size_t *needed, int *moved,
                        fst_status *status)
{
    fst_gpu_mirror grown = {0};
    int fits = mirror->bytes != NULL;
    size_t offset = 0;
    for (unsigned s = 0; s < FST_SECTION_COUNT; s++) {
        const size_t old = mirror->capacity[s];
        const int enough = needed[s] <= old;
        fits = fits && enough;
        grown.capacity[s] = enough || needed[s] > 2 * old ? needed[s] : 2 * old;
        if (enough)
            grown.capacity[s] = old;
        grown.offset[s] = offset;
        offset += (grown.capacity[s] * sizes[s] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    if (fits)
        return FST_OK;
    grown.offset[FST_SECTION_COUNT] = offset;
    grown.bytes = calloc(1, fst_gpu_mirror_size(&grown));
    if (!grown.bytes)
        return fst_fail(status, FST_NO_MEMORY, "no memory for the tables of %zu tensors",
                        needed[FST_SECTION_SPANS]);
    free(mirror->bytes);
    *mirror = grown;
    fst_gpu_mirror_lost(mirror);
    *moved = 1;
    return FST_OK;
}

static void changed(fst_gpu_mirror *mirror, size_t begin, size_t end)
{
    if (fst_gpu_mirror_is_current(mirror)) {
        mirror->changed_begin = begin;
        mirror->changed_end = end;
    }
    if (begin < mirror->changed_begin)
        mirror->changed_begin = begin;
    if (end > mirror->changed_end)
        mirror->changed_end = end;
}

static void put(fst_gpu_mirror *mirror, size_t at, const void *value, size_t size)
{
    memcpy(mirror->bytes + at, value, size);
    changed(mirror, at, at + size);
}

static void put_array(fst_gpu_mirror *mirror, unsigned section, const void *values, size_t count)
{
    const unsigned char *value = values;
    const size_t size = sizes[section];
    size_t at = mirror->offset[section];
    if (!count || !memcmp(mirror->bytes + at, values, count * size))
        return;
    for (size_t i = 0; i < count; i++, at += size, value += size)
        if (memcmp(mirror->bytes + at, value, size))
            put(mirror, at, value, size);
}

static inline void put_small(fst_gpu_mirror *mirror, size_t at, const void *value)
{
    if (memcmp(mirror->bytes + at, value, SMALL))
        put(mirror, at, value, SMALL);
}

fst_device_layout fst_gpu_layout(const fst_layout *layout)
{
    fst_device_layout value = {.ndim = layout->ndim, .negated = layout->negated};
    for (int d = 0; d < layout->ndim; d++) {
        value.shape[d] = layout->shape[d];
        value.stride[d] = layout->stride[d];
    }
    return value;
}

static fst_code put_layout(fst_gpu_mirror *mirror, size_t index, const fst_layout *layout,
                           fst_status *status)
{
    if (layout->ndim > FST_DEVICE_MAX_DIMS)
        return fst_fail(status, FST_UNSUPPORTED,
                        "a tensor is laid out in %d dimensions that cannot be merged, at most %d "
                        "are supported on CUDA: make it contiguous",
                        layout->ndim, FST_DEVICE_MAX_DIMS);
    if (index >= mirror->capacity[FST_SECTION_LAYOUTS])
        return FST_OK; /* counted; the next round has room for it */
    const fst_device_layout value = fst_gpu_layout(layout);
    const size_t at = mirror->offset[FST_SECTION_LAYOUTS] + index * sizeof value;
    if (memcmp(mirror->bytes + at, &value, sizeof value))
        put(mirror, at, &value, sizeof value);
    return FST_OK;
}

/* Fills in the operands. *layouts becomes the number of layouts, which may be more than there is
 * room for. */
static fst_code put_operands(fst_gpu_mirror *mirror, const fst_work *work, size_t *layouts,
                             fst_status *status)
{
    const size_t count = work->span_count * work->width;
    const fst_layout *last = NULL;
    size_t at = mirror->offset[FST_SECTION_OPERANDS];
    *layouts = 0;
    for (size_t i = 0; i < count; i++, at += sizeof(fst_device_operand)) {
        const fst_operand *op = &work->operands[i];
        fst_device_operand value = {(uint64_t)(uintptr_t)op->data, -1, (int32_t)op->dtype};
        if (op->data && op->layout) {
            if (op->layout != last && put_layout(mirror, (*layouts)++, op->layout, status))
                return status->code;
            last = op->layout;
            value.layout = (int32_t)*layouts - 1;
        }
        put_small(mirror, at, &value);
    }
    return FST_OK;
}

static void put_chunks(fst_gpu_mirror *mirror, const fst_work *work)
{
    size_t at = mirror->offset[FST_SECTION_CHUNKS];
    if (work->serial && work->serial == mirror->serial)
        return;
    for (size_t i = 0; i < work->chunk_count; i++, at += sizeof(fst_device_chunk)) {
        const fst_chunk *chunk = &work->chunks[i];
        const fst_device_chunk value = {chunk->begin, chunk->span, chunk->count};
        put_small(mirror, at, &value);
    }
    mirror->serial = work->serial;
}

/* Fills in the gradients' addresses; the rest of the operands is known. */
static void put_gradients(fst_gpu_mirror *mirror, const fst_work *work)
{
    const size_t first = mirror->offset[FST_SECTION_OPERANDS];
    for (size_t i = 0; i < work->span_count; i++) {
        const size_t operand = i * work->width + FST_OP_GRAD;
        const size_t at = first + operand * sizeof(fst_device_operand);
        const uint64_t data = (uint64_t)(uintptr_t)work->operands[operand].data;
        if (memcmp(mirror->bytes + at, &data, sizeof data))
            put(mirror, at, &data, sizeof data);
    }
}

static fst_code put_all(fst_gpu_mirror *mirror, const fst_work *work, const fst_gpu_rules *r,
                        int *moved, fst_status *status)
{
    size_t layouts = mirror->capacity[FST_SECTION_LAYOUTS];
    do {
        const size_t needed[FST_SECTION_COUNT] = {
            [FST_SECTION_OUTCOME] = 1,
            [FST_SECTION_SPANS] = r->span_count,
            [FST_SECTION_GROUPS] = r->group_count,
            [FST_SECTION_OPERANDS] = work->span_count * work->width,
            [FST_SECTION_LAYOUTS] = layouts,
            [FST_SECTION_CHUNKS] = work->chunk_count,
            [FST_SECTION_ARGS] = r->span_count,
            [FST_SECTION_PARTIAL] = work->chunk_count,
        };
        if (reserve(mirror, needed, moved, status) || put_operands(mirror, work, &layouts, status))
            return status->code;
    } while (layouts > mirror->capacity[FST_SECTION_LAYOUTS]);
    put_array(mirror, FST_SECTION_SPANS, r->spans, r->span_count);
    mirror->used[FST_SECTION_OPERANDS] = work->span_count * work->width;
    mirror->used[FST_SECTION_LAYOUTS] = layouts;
    return FST_OK;
}

fst_code fst_gpu_mirror_fill(fst_gpu_mirror *mirror, const fst_work *work,
                             const fst_gpu_rules *rules, int *moved, fst_status *status)
{
    const fst_gpu_rules none = {0};
    const fst_gpu_rules *r = rules ? rules : &none;
    const int known = r->bound && r->bound == mirror->bound;
    *moved = 0;
    mirror->bound = 0; /* until all is filled in */
    if (!known && put_all(mirror, work, r, moved, status))
        return status->code;
    if (known && r->moved != mirror->moved)
        put_gradients(mirror, work);
    mirror->bound = r->bound;
    mirror->moved = r->moved;
    put_array(mirror, FST_SECTION_GROUPS, r->groups, r->group_count);
    put_chunks(mirror, work);
    mirror->used[FST_SECTION_OUTCOME] = 1;
    mirror->used[FST_SECTION_SPANS] = r->span_count;
    mirror->used[FST_SECTION_GROUPS] = r->group_count;
    mirror->used[FST_SECTION_CHUNKS] = work->chunk_count;
    mirror->width = work->width;
    return FST_OK;
}

size_t fst_gpu_mirror_size(const fst_gpu_mirror *mirror)
{
    return mirror->offset[FST_SECTION_MIRRORED];
}

size_t fst_gpu_mirror_total(const fst_gpu_mirror *mirror)
{
    return mirror->offset[FST_SECTION_COUNT];
}

int fst_gpu_mirror_is_current(const fst_gpu_mirror *mirror)
{
    return mirror->changed_begin == mirror->changed_end;
}

void fst_gpu_mirror_uploaded(fst_gpu_mirror *mirror)
{
    mirror->changed_begin = mirror->changed_end = 0;
}

void fst_gpu_mirror_lost(fst_gpu_mirror *mirror)
{
    mirror->changed_begin = 0;
    mirror->changed_end = fst_gpu_mirror_size(mirror);
}

fst_device_tables fst_gpu_mirror_tables(const fst_gpu_mirror *mirror, uint64_t memory)
{
    return (fst_device_tables){
        .operands = memory + mirror->offset[FST_SECTION_OPERANDS],
        .layouts = memory + mirror->offset[FST_SECTION_LAYOUTS],
        .spans = memory + mirror->offset[FST_SECTION_SPANS],
        .groups = memory + mirror->offset[FST_SECTION_GROUPS],
        .chunks = memory + mirror->offset[FST_SECTION_CHUNKS],
        .args = memory + mirror->offset[FST_SECTION_ARGS],
        .partial = memory + mirror->offset[FST_SECTION_PARTIAL],
        .outcome = memory + mirror->offset[FST_SECTION_OUTCOME],
        .span_count = (uint32_t)mirror->used[FST_SECTION_SPANS],
        .width = mirror->width,
        .chunk_count = (uint32_t)mirror->used[FST_SECTION_CHUNKS],
    };
}

static int has_changed(const fst_gpu_mirror *mirror, unsigned section)
{
    const size_t begin = mirror->offset[section];
    return mirror->changed_begin < begin + mirror->used[section] * sizes[section] &&
           mirror->changed_end > begin;
}

static size_t bytes_in_launch(const fst_gpu_mirror *mirror, unsigned section)
{
    return (mirror->used[section] * sizes[section] + IN_LAUNCH - 1) / IN_LAUNCH * IN_LAUNCH;
}

size_t fst_gpu_mirror_short(const fst_gpu_mirror *mirror)
{
    size_t size = 0;
    if (has_changed(mirror, FST_SECTION_OUTCOME)) /* kernels write it */
        return SIZE_MAX;
    for (unsigned s = FST_SECTION_SPANS; s < FST_SECTION_MIRRORED; s++)
        if (has_changed(mirror, s))
            size += bytes_in_launch(mirror, s);
    return size;
}

void fst_gpu_mirror_put(const fst_gpu_mirror *mirror, void *launch, size_t at,
                        fst_device_tables *tables)
{
    uint64_t *const address[FST_SECTION_MIRRORED] = {
        [FST_SECTION_SPANS] = &tables->spans,       [FST_SECTION_GROUPS] = &tables->groups,
        [FST_SECTION_OPERANDS] = &tables->operands, [FST_SECTION_LAYOUTS] = &tables->layouts,
        [FST_SECTION_CHUNKS] = &tables->chunks,
    };
    for (unsigned s = FST_SECTION_SPANS; s < FST_SECTION_MIRRORED; s++) {
        if (!has_changed(mirror, s))
            continue;
        memcpy((char *)launch + at, mirror->bytes + mirror->offset[s], mirror->used[s] * sizes[s]);
        *address[s] = at;
        at += bytes_in_launch(mirror, s);
    }
}

void fst_gpu_mirror_free(fst_gpu_mirror *mirror)
{
    free(mirror->bytes);
    *mirror = (fst_gpu_mirror){0};
}
