#include "gpu/tables.h"

#include <stdlib.h>
#include <string.h>

#include "gpu/driver.h"
#include "gpu/graph_memory.h"

static fst_code new_event(fst_gpu_tables *tables, fst_status *status)
{
    int mode;
    if (fst_gpu_enter(tables->device, &mode, status))
        return status->code;
    fst_driver_new_event(tables->device->ordinal, &tables->done, status);
    if (fst_gpu_leave(tables->device, mode, status) && tables->done)
        fst_driver_free_event(tables->done);
    return status->code;
}

fst_gpu_tables *fst_gpu_tables_new(int device, fst_status *status)
{
    fst_gpu_device *found = fst_gpu_device_get(device, status);
    fst_gpu_tables *tables = found ? calloc(1, sizeof *tables) : NULL;
    if (!found)
        return NULL;
    if (!tables) {
        fst_fail(status, FST_NO_MEMORY, "no memory for the tables of a device");
        return NULL;
    }
    tables->device = found;
    if (new_event(tables, status)) {
        free(tables);
        return NULL;
    }
    return tables;
}

static void free_inside(fst_gpu_tables *tables)
{
    if (tables->done) {
        fst_driver_synchronize(tables->done); /* launches may still read the tables */
        fst_driver_free_event(tables->done);
    }
    fst_gpu_ring_free(&tables->ring, 1);
    for (size_t i = 0; i < tables->kept_count; i++)
        fst_driver_free(tables->kept[i]);
    fst_graph_memory_sweep();
}

void fst_gpu_tables_free(fst_gpu_tables *tables)
{
    fst_status ignored = {0};
    int mode;
    if (!tables)
        return;
    if (!fst_gpu_enter(tables->device, &mode, &ignored)) {
        free_inside(tables);
        fst_gpu_leave(tables->device, mode, &ignored);
    } else {
        fst_gpu_ring_free(&tables->ring, 0);
    }
    fst_gpu_mirror_free(&tables->eager.mirror);
    fst_gpu_mirror_free(&tables->captured.mirror);
    free(tables->kept);
    free(tables);
}

/* Allocates memory for the tables, which stays until they are freed, as launches may read it. */
static fst_code take(fst_gpu_tables *tables, fst_gpu_copy *copy, fst_status *status)
{
    uint64_t *kept = realloc(tables->kept, (tables->kept_count + 1) * sizeof *kept);
    if (!kept)
        return fst_fail(status, FST_NO_MEMORY, "no memory for the tables of a device");
    tables->kept = kept;
    fst_graph_memory_sweep();
    if (!fst_driver_alloc(tables->device->ordinal, fst_gpu_mirror_total(&copy->mirror),
                          &copy->memory, status))
        kept[tables->kept_count++] = copy->memory;
    return status->code;
}

/* Makes the stream wait for all earlier work of these tables on another stream. */
static fst_code follow(fst_gpu_tables *tables, void *stream, fst_status *status)
{
    const int device = tables->device->ordinal;
    uint64_t id = 0; /* the default stream is always the same one */
    if (stream && fst_driver_stream_id(device, stream, &id, status))
        return status->code;
    if (tables->used && (tables->stream != stream || tables->stream_id != id)) {
        if (tables->unrecorded && fst_gpu_tables_mark_end(tables, status))
            return status->code;
        if (fst_driver_wait(device, stream, tables->done, status))
            return status->code;
    }
    tables->stream = stream;
    tables->stream_id = id;
    tables->used = 1;
    return FST_OK;
}

static fst_code upload(fst_gpu_tables *tables, int moved, fst_status *status)
{
    fst_gpu_copy *copy = &tables->eager;
    fst_gpu_mirror *mirror = &copy->mirror;
    if (moved)
        copy->memory = 0;
    if (!copy->memory) {
        if (take(tables, copy, status))
            return status->code;
        fst_gpu_mirror_lost(mirror);
    }
    if (fst_gpu_mirror_is_current(mirror))
        return FST_OK;
    const size_t begin = mirror->changed_begin, size = mirror->changed_end - begin;
    tables->unrecorded = 1;
    if (fst_gpu_ring_upload(&tables->ring, tables->device, copy->memory + begin,
                            mirror->bytes + begin, size, tables->stream, status))
        return status->code;
    fst_gpu_mirror_uploaded(mirror);
    return FST_OK;
}

/* Uploads as a part of a capture: the graph reads the pinned memory at every replay. Passes of
 * one capture share the tables, and so the outcome, while nothing changes. */
static fst_code upload_captured(fst_gpu_tables *tables, uint64_t capture, void *stream,
                                fst_status *status)
{
    fst_gpu_copy *copy = &tables->captured;
    if (copy->capture == capture && fst_gpu_mirror_is_current(&copy->mirror))
        return FST_OK;
    const size_t size = fst_gpu_mirror_size(&copy->mirror);
    uint64_t memory;
    void *pinned;
    fst_graph_memory_sweep();
    if (fst_graph_memory_take(tables->device->ordinal, stream, fst_gpu_mirror_total(&copy->mirror),
                              size, &memory, &pinned, status))
        return status->code;
    memcpy(pinned, copy->mirror.bytes, size);
    if (fst_gpu_upload(tables->device, memory, pinned, size, stream, status))
        return status->code;
    copy->memory = memory;
    copy->capture = capture;
    fst_gpu_mirror_uploaded(&copy->mirror);
    return FST_OK;
}

static fst_code set_inside(fst_gpu_tables *tables, const fst_work *work, const fst_gpu_rules *rules,
                           void *stream, fst_status *status)
{
    uint64_t capture = 0;
    int moved = 0;
    if (fst_driver_capture(tables->device->ordinal, stream, &capture, status))
        return status->code;
    fst_gpu_copy *copy = capture ? &tables->captured : &tables->eager;
    if (!capture && follow(tables, stream, status))
        return status->code;
    if (fst_gpu_mirror_fill(&copy->mirror, work, rules, &moved, status)) {
        if (moved)
            copy->memory = 0;
        return status->code;
    }
    if (capture ? upload_captured(tables, capture, stream, status) : upload(tables, moved, status))
        return status->code;
    tables->set = copy;
    tables->set_stream = stream;
    tables->rounds = work->rounds;
    tables->round_count = work->round_count;
    return FST_OK;
}

fst_code fst_gpu_tables_set(fst_gpu_tables *tables, const fst_work *work,
                            const fst_gpu_rules *rules, void *stream, fst_status *status)
{
    int mode;
    tables->set = NULL;
    if (fst_gpu_enter(tables->device, &mode, status))
        return status->code;
    set_inside(tables, work, rules, stream, status);
    if (fst_gpu_leave(tables->device, mode, status))
        tables->set = NULL;
    return status->code;
}

fst_code fst_gpu_tables_mark_end(fst_gpu_tables *tables, fst_status *status)
{
    if (!fst_driver_record(tables->device->ordinal, tables->done, tables->stream, status))
        tables->unrecorded = 0;
    return status->code;
}
