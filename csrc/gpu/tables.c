#include "gpu/tables.h"

#include <stdlib.h>
#include <string.h>

#include "gpu/brief.h"
#include "gpu/driver.h"
#include "gpu/graph_memory.h"
#include "gpu/streams.h"

/* Bytes for tables in the launch structs of the passes that follow. */
static size_t room_of(const fst_gpu_rules *rules)
{
    return rules ? FST_DEVICE_STEP_ROOM : FST_DEVICE_LIST_ROOM;
}

static int lasts(const void *stream)
{
    return fst_gpu_stream_life(stream) == FST_STREAM_LASTS;
}

static fst_code new_event(fst_gpu_tables *tables, fst_status *status)
{
    if (fst_gpu_enter(tables->device, status))
        return status->code;
    fst_driver_new_event(tables->device->ordinal, &tables->done, status);
    if (fst_gpu_leave(tables->device, status) && tables->done)
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

/* Freeing memory of a device waits for the launches that read it, and for copies to it. */
static void free_inside(fst_gpu_tables *tables)
{
    for (size_t i = 0; i < tables->kept_count; i++)
        fst_driver_free(tables->kept[i]);
    fst_driver_free_event(tables->done);
    fst_gpu_ring_free(&tables->ring, 1);
    fst_graph_memory_sweep();
}

void fst_gpu_tables_free(fst_gpu_tables *tables)
{
    fst_status ignored = {0};
    int mode;
    if (!tables)
        return;
    if (!fst_gpu_enter_relaxed(tables->device, &mode, &ignored)) {
        free_inside(tables);
        fst_gpu_leave_relaxed(tables->device, mode, &ignored);
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

static fst_code mark_end(fst_gpu_tables *tables, fst_status *status)
{
    if (!fst_driver_record(tables->device->ordinal, tables->done, tables->stream, status))
        tables->end = FST_GPU_MARKED;
    return status->code;
}

/* Marks the end of earlier work, which nobody has waited for so far. That cannot be done on a
 * stream that may have been destroyed, nor on one that is captured by now: the event is then the
 * capture's. The work then counts as nothing, and the tables are given memory of their own. */
static fst_code mark_late(fst_gpu_tables *tables, fst_status *status)
{
    fst_status recorded = {0};
    uint64_t capture = 0;
    if (lasts(tables->stream)) {
        const fst_code code = mark_end(tables, &recorded);
        if (tables->stream &&
            fst_driver_capture(tables->device->ordinal, tables->stream, &capture, status)) {
            tables->end = FST_GPU_UNMARKED; /* it may be the capture's */
            return status->code;
        }
        if (!capture && code)
            *status = recorded;
        if (!capture)
            return code;
    }
    tables->end = FST_GPU_NOTHING;
    tables->eager.memory = 0;
    return FST_OK;
}

/* Whether earlier work of these tables is on another stream. */
static int comes_from_elsewhere(const fst_gpu_tables *tables, const void *stream, uint64_t id)
{
    return tables->end != FST_GPU_NOTHING && (tables->stream != stream || tables->stream_id != id);
}

/* Makes the stream wait for all earlier work of these tables on another stream. */
static fst_code follow(fst_gpu_tables *tables, void *stream, fst_status *status)
{
    const int device = tables->device->ordinal;
    uint64_t id = 0; /* no other stream ever has the handle of one that lasts */
    if (!lasts(stream) && fst_driver_stream_id(device, stream, &id, status))
        return status->code;
    if (comes_from_elsewhere(tables, stream, id)) {
        if (tables->end == FST_GPU_UNMARKED && mark_late(tables, status))
            return status->code;
        if (tables->end == FST_GPU_MARKED && fst_driver_wait(device, stream, tables->done, status))
            return status->code;
    }
    tables->stream = stream;
    tables->stream_id = id;
    return FST_OK;
}

/* Whether a launch can have all tables, some of them among its parameters. */
static int is_within_reach(const fst_gpu_copy *copy, const fst_gpu_rules *rules)
{
    return copy->memory && fst_gpu_mirror_short(&copy->mirror) <= room_of(rules);
}

static fst_code upload(fst_gpu_tables *tables, fst_status *status)
{
    fst_gpu_copy *copy = &tables->eager;
    fst_gpu_mirror *mirror = &copy->mirror;
    if (!copy->memory) {
        if (take(tables, copy, status))
            return status->code;
        fst_gpu_mirror_lost(mirror);
    }
    const size_t begin = mirror->changed_begin, size = mirror->changed_end - begin;
    tables->end = FST_GPU_UNMARKED;
    if (fst_gpu_ring_upload(&tables->ring, tables->device, copy->memory + begin,
                            mirror->bytes + begin, size, tables->stream, status))
        return status->code;
    fst_gpu_mirror_uploaded(mirror);
    return FST_OK;
}

/* Uploads as a part of a capture: the graph reads the pinned memory at every replay. Passes of one
 * capture, on one stream, share the tables while no more changes than goes with a launch. */
static fst_code upload_captured(fst_gpu_tables *tables, uint64_t capture, void *stream,
                                fst_status *status)
{
    fst_gpu_copy *copy = &tables->captured;
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
    copy->stream = stream;
    fst_gpu_mirror_uploaded(&copy->mirror);
    return FST_OK;
}

static fst_code fill(fst_gpu_copy *copy, const fst_work *work, const fst_gpu_rules *rules,
                     fst_status *status)
{
    int moved = 0;
    fst_gpu_mirror_fill(&copy->mirror, work, rules, &moved, status);
    if (moved)
        copy->memory = 0;
    return status->code;
}

/* What a step needs of the driver before its launches: the order of streams, memory, uploads.
 * `filled`: the copy for steps outside of captures is. */
static fst_code set_inside(fst_gpu_tables *tables, const fst_work *work, const fst_gpu_rules *rules,
                           void *stream, int filled, fst_status *status)
{
    const int device = tables->device->ordinal;
    uint64_t capture = 0;
    int mode;
    if (stream && fst_driver_capture(device, stream, &capture, status))
        return status->code;
    fst_gpu_copy *copy = capture ? &tables->captured : &tables->eager;
    if ((!filled && fill(copy, work, rules, status)) ||
        (!capture && follow(tables, stream, status)))
        return status->code;
    tables->set = copy;
    const int in_order = !capture || (copy->capture == capture && copy->stream == stream);
    if (in_order && is_within_reach(copy, rules))
        return FST_OK;
    if (fst_driver_relax(device, &mode, status))
        return status->code;
    if (capture)
        upload_captured(tables, capture, stream, status);
    else
        upload(tables, status);
    return fst_driver_restore(device, mode, status);
}

/* Starts a set without tables. */
static void unset(fst_gpu_tables *tables, const fst_work *work, void *stream)
{
    tables->set = NULL;
    tables->brief = 0;
    tables->set_stream = stream;
    tables->rounds = work->rounds;
    tables->round_count = work->round_count;
}

fst_code fst_gpu_tables_set(fst_gpu_tables *tables, const fst_work *work,
                            const fst_gpu_rules *rules, void *stream, fst_status *status)
{
    const int is_default = !stream; /* which is never captured */
    unset(tables, work, stream);
    if (fst_driver_open(status)) /* as below, for steps that go no further than that */
        return status->code;
    if (is_default && fill(&tables->eager, work, rules, status))
        return status->code;
    if (is_default && !comes_from_elsewhere(tables, stream, 0) &&
        is_within_reach(&tables->eager, rules)) {
        tables->set = &tables->eager;
        return FST_OK;
    }
    if (fst_gpu_enter(tables->device, status))
        return status->code;
    set_inside(tables, work, rules, stream, is_default, status);
    if (fst_gpu_leave(tables->device, status))
        tables->set = NULL;
    return status->code;
}

fst_code fst_gpu_tables_set_brief(fst_gpu_tables *tables, const fst_work *work, void *stream,
                                  fst_status *status)
{
    if (fst_gpu_brief_size(work, room_of(NULL)) > room_of(NULL))
        return fst_gpu_tables_set(tables, work, NULL, stream, status);
    unset(tables, work, stream);
    tables->work = *work;
    tables->brief = !fst_driver_open(status);
    return status->code;
}

fst_code fst_gpu_tables_end(fst_gpu_tables *tables, fst_status *status)
{
    return lasts(tables->stream) ? FST_OK : mark_end(tables, status);
}
