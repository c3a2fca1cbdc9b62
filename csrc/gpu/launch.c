#include "gpu/launch.h"

#include <stddef.h>

#include "gpu/brief.h"

/* The tables are the first member of a launch struct: their offsets begin there. */
_Static_assert(!offsetof(fst_begin_launch, tables) && !offsetof(fst_update_launch, tables) &&
                   !offsetof(fst_unscale_launch, tables) && !offsetof(fst_norm_launch, tables) &&
                   !offsetof(fst_scale_launch, tables) && !offsetof(fst_clamp_launch, tables) &&
                   !offsetof(fst_accumulate_launch, tables),
               "the tables come first");
_Static_assert(sizeof(fst_begin_launch) <= FST_DEVICE_LAUNCH &&
                   sizeof(fst_unscale_launch) <= FST_DEVICE_LAUNCH &&
                   sizeof(fst_scale_launch) <= FST_DEVICE_LAUNCH,
               "every device takes parameters of that size");

/* Spans whose arguments a block of `begin` fills: few, as that takes long. */
enum { SPANS_PER_BLOCK = 32 };

/* In which order launches go over the chunks: a pass that writes goes round after round. */
typedef enum {
    ALL_AT_ONCE,
    BY_ROUNDS,
    BY_ROUNDS_AT_LEAST_ONE, /* it leaves an outcome even where there are no chunks */
} order;

static fst_code launch_rounds(fst_gpu_tables *tables, fst_kernel kernel, void *args,
                              fst_device_tables *view, int at_least_one, fst_status *status)
{
    const size_t rounds = tables->round_count;
    for (size_t r = 0; r < rounds || (r == 0 && at_least_one); r++) {
        const uint32_t first = rounds ? tables->rounds[r] : 0;
        const uint32_t last = rounds ? tables->rounds[r + 1] : 0;
        if (first == last && !at_least_one)
            continue;
        view->chunk_first = first;
        view->chunk_count = last - first;
        if (fst_gpu_launch(tables->device, kernel, last - first, tables->set_stream, args, status))
            return status->code;
    }
    return FST_OK;
}

static size_t blocks_of(fst_kernel kernel, const void *args, const fst_device_tables *view)
{
    const fst_begin_launch *begin = args;
    if (kernel != FST_KERNEL_BEGIN)
        return view->chunk_count;
    const size_t filling = (view->span_count + SPANS_PER_BLOCK - 1) / SPANS_PER_BLOCK;
    return begin->measure && view->chunk_count > filling ? view->chunk_count : filling;
}

/* Launches a kernel; within fst_gpu_enter. `args` is its launch struct, which begins with the
 * tables and has room for short ones from the byte `room` on. Where it has an address for the
 * chunks' sums, or a number of chunks, these take the place of the tables'. */
static fst_code run_inside(fst_gpu_tables *tables, fst_kernel kernel, void *args, size_t room,
                           order how, fst_status *status)
{
    const fst_gpu_copy *set = tables->set;
    fst_device_tables *view = args;
    const fst_device_tables asked = *view;
    if (tables->brief) {
        *view = fst_gpu_brief_put(&tables->work, args, room);
    } else {
        *view = fst_gpu_mirror_tables(&set->mirror, set->memory);
        fst_gpu_mirror_put(&set->mirror, args, room, view);
        if (set == &tables->eager)
            tables->end = FST_GPU_UNMARKED;
    }
    if (asked.partial)
        view->partial = asked.partial;
    if (asked.chunk_count)
        view->chunk_count = asked.chunk_count;
    if (how != ALL_AT_ONCE)
        return launch_rounds(tables, kernel, args, view, how == BY_ROUNDS_AT_LEAST_ONE, status);
    return fst_gpu_launch(tables->device, kernel, blocks_of(kernel, args, view), tables->set_stream,
                          args, status);
}

static fst_code not_set(const fst_gpu_tables *tables, fst_status *status)
{
    return fst_fail(status, FST_BAD_VALUE, "the tables of CUDA device %d are not set",
                    tables->device->ordinal);
}

/* Marks the end of what was launched, after an error too, and leaves the device. */
static fst_code end(fst_gpu_tables *tables, fst_status *status)
{
    fst_status ignored = {0};
    if (tables->set == &tables->eager)
        fst_gpu_tables_end(tables, status->code ? &ignored : status);
    return fst_gpu_leave(tables->device, status);
}

static fst_code run(fst_gpu_tables *tables, fst_kernel kernel, void *args, size_t room, order how,
                    fst_status *status)
{
    if (!tables->set && !tables->brief)
        return not_set(tables, status);
    if (fst_gpu_enter(tables->device, status))
        return status->code;
    run_inside(tables, kernel, args, room, how, status);
    return end(tables, status);
}

/* Of passes that leave something in the tables. */
static fst_code run_set(fst_gpu_tables *tables, fst_kernel kernel, void *args, size_t room,
                        order how, fst_status *status)
{
    return tables->set ? run(tables, kernel, args, room, how, status) : not_set(tables, status);
}

fst_code fst_gpu_step(fst_gpu_tables *tables, const fst_begin_launch *begin,
                      const fst_update_launch *update, fst_status *status)
{
    fst_begin_launch first = *begin;
    fst_update_launch second = {0};
    if (!tables->set)
        return not_set(tables, status);
    if (fst_gpu_enter(tables->device, status))
        return status->code;
    if (update)
        second = *update;
    if (!run_inside(tables, FST_KERNEL_BEGIN, &first, offsetof(fst_begin_launch, room), ALL_AT_ONCE,
                    status) &&
        update)
        run_inside(tables, FST_KERNEL_UPDATE, &second, offsetof(fst_update_launch, room), BY_ROUNDS,
                   status);
    return end(tables, status);
}

fst_code fst_gpu_unscale(fst_gpu_tables *tables, const fst_unscale_launch *launch,
                         fst_status *status)
{
    fst_unscale_launch args = *launch;
    return run_set(tables, FST_KERNEL_UNSCALE, &args, offsetof(fst_unscale_launch, room),
                   BY_ROUNDS_AT_LEAST_ONE, status);
}

fst_code fst_gpu_norm(fst_gpu_tables *tables, const fst_norm_launch *launch, fst_status *status)
{
    fst_norm_launch args = *launch; /* its `partial` and `chunk_count` too, if they are set */
    return run_set(tables, FST_KERNEL_NORM, &args, offsetof(fst_norm_launch, room), ALL_AT_ONCE,
                   status);
}

fst_code fst_gpu_scale(fst_gpu_tables *tables, const fst_scale_launch *launch, int from_outcome,
                       fst_status *status)
{
    fst_scale_launch args = *launch;
    const fst_gpu_copy *set = tables->set;
    if (from_outcome && !set)
        return not_set(tables, status);
    if (from_outcome) {
        const uint64_t outcome = fst_gpu_mirror_tables(&set->mirror, set->memory).outcome;
        args.norm = (fst_device_scalar){.data = outcome + offsetof(fst_device_outcome, norm),
                                        .is_double = 1};
    }
    return run(tables, FST_KERNEL_SCALE, &args, offsetof(fst_scale_launch, room), BY_ROUNDS,
               status);
}

fst_code fst_gpu_clamp(fst_gpu_tables *tables, const fst_clamp_launch *launch, fst_status *status)
{
    fst_clamp_launch args = *launch;
    return run(tables, FST_KERNEL_CLAMP, &args, offsetof(fst_clamp_launch, room), BY_ROUNDS,
               status);
}

fst_code fst_gpu_accumulate(fst_gpu_tables *tables, const fst_accumulate_launch *launch,
                            fst_status *status)
{
    fst_accumulate_launch args = *launch;
    return run(tables, FST_KERNEL_ACCUMULATE, &args, offsetof(fst_accumulate_launch, room),
               BY_ROUNDS, status);
}

fst_code fst_gpu_cross_entropy(int device, const fst_cross_entropy_launch *launch, void *stream,
                               fst_status *status)
{
    fst_cross_entropy_launch args = *launch;
    const fst_gpu_device *found = fst_gpu_device_get(device, status);
    if (!found || fst_gpu_enter(found, status))
        return status->code;
    args.only_result = !args.rows;
    const fst_code failed = fst_gpu_launch(
        found, FST_KERNEL_CROSS_ENTROPY, args.rows ? (size_t)args.rows : 1, stream, &args, status);
    if (!failed && args.rows) {
        args.only_result = 1;
        fst_gpu_launch(found, FST_KERNEL_CROSS_ENTROPY, 1, stream, &args, status);
    }
    return fst_gpu_leave(found, status);
}

fst_code fst_gpu_loss_scale(int device, const fst_loss_scale_launch *launch, void *stream,
                            fst_status *status)
{
    fst_loss_scale_launch args = *launch;
    const fst_gpu_device *found = fst_gpu_device_get(device, status);
    if (!found || fst_gpu_enter(found, status))
        return status->code;
    fst_gpu_launch(found, FST_KERNEL_LOSS_SCALE, 1, stream, &args, status);
    return fst_gpu_leave(found, status);
}

fst_code fst_gpu_image(fst_gpu_tables *tables, const fst_image_batch *batch,
                       const fst_image_sample *samples, void *stream, fst_status *status)
{
    fst_image_batch args = *batch;
    const fst_gpu_device *device = tables->device;
    const size_t pixels = (size_t)batch->height * (size_t)batch->width;
    const size_t blocks = (pixels + FST_DEVICE_BLOCK - 1) / FST_DEVICE_BLOCK * (size_t)batch->count;
    const fst_kernel kernel = batch->antialias ? FST_KERNEL_IMAGE_SMOOTH : FST_KERNEL_IMAGE;
    int mode;
    if (!blocks || !batch->channels)
        return FST_OK;
    if (fst_gpu_enter_relaxed(device, &mode, status))
        return status->code;
    if (!fst_gpu_ring_upload(&tables->ring, device, batch->samples, samples,
                             (size_t)batch->count * sizeof *samples, stream, status))
        fst_gpu_launch(device, kernel, blocks, stream, &args, status);
    return fst_gpu_leave_relaxed(device, mode, status);
}
