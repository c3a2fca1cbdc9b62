#include "gpu/launch.h"

#include <stddef.h>

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

/* Launches a kernel. `view` is the part of `args` with the tables' addresses. Where it has an
 * address for the chunks' sums, or a number of chunks, these take the place of the tables'. */
static fst_code run(fst_gpu_tables *tables, fst_kernel kernel, void *args, fst_device_tables *view,
                    order how, fst_status *status)
{
    const fst_gpu_device *device = tables->device;
    int mode;
    if (!tables->set)
        return fst_fail(status, FST_BAD_VALUE, "the tables of CUDA device %d are not set",
                        device->ordinal);
    const fst_device_tables asked = *view;
    *view = fst_gpu_mirror_tables(&tables->set->mirror, tables->set->memory);
    if (asked.partial)
        view->partial = asked.partial;
    if (asked.chunk_count)
        view->chunk_count = asked.chunk_count;
    if (fst_gpu_enter(device, &mode, status))
        return status->code;
    const int captured = tables->set == &tables->captured;
    if (!captured)
        tables->unrecorded = 1;
    if (how == ALL_AT_ONCE)
        fst_gpu_launch(device, kernel, blocks_of(kernel, args, view), tables->set_stream, args,
                       status);
    else
        launch_rounds(tables, kernel, args, view, how == BY_ROUNDS_AT_LEAST_ONE, status);
    if (!status->code && !captured && kernel != FST_KERNEL_BEGIN) /* an update follows that one */
        fst_gpu_tables_mark_end(tables, status);
    return fst_gpu_leave(device, mode, status);
}

fst_code fst_gpu_begin(fst_gpu_tables *tables, const fst_begin_launch *launch, fst_status *status)
{
    fst_begin_launch args = *launch;
    return run(tables, FST_KERNEL_BEGIN, &args, &args.tables, ALL_AT_ONCE, status);
}

fst_code fst_gpu_update(fst_gpu_tables *tables, const fst_update_launch *launch, fst_status *status)
{
    fst_update_launch args = *launch;
    return run(tables, FST_KERNEL_UPDATE, &args, &args.tables, BY_ROUNDS, status);
}

fst_code fst_gpu_unscale(fst_gpu_tables *tables, const fst_unscale_launch *launch,
                         fst_status *status)
{
    fst_unscale_launch args = *launch;
    return run(tables, FST_KERNEL_UNSCALE, &args, &args.tables, BY_ROUNDS_AT_LEAST_ONE, status);
}

fst_code fst_gpu_norm(fst_gpu_tables *tables, const fst_norm_launch *launch, fst_status *status)
{
    fst_norm_launch args = *launch; /* its `partial` and `chunk_count` too, if they are set */
    return run(tables, FST_KERNEL_NORM, &args, &args.tables, ALL_AT_ONCE, status);
}

fst_code fst_gpu_scale(fst_gpu_tables *tables, const fst_scale_launch *launch, int from_outcome,
                       fst_status *status)
{
    fst_scale_launch args = *launch;
    if (from_outcome && tables->set) {
        const fst_gpu_copy *set = tables->set;
        const uint64_t outcome = fst_gpu_mirror_tables(&set->mirror, set->memory).outcome;
        args.norm = (fst_device_scalar){.data = outcome + offsetof(fst_device_outcome, norm),
                                        .is_double = 1};
    }
    return run(tables, FST_KERNEL_SCALE, &args, &args.tables, BY_ROUNDS, status);
}

fst_code fst_gpu_clamp(fst_gpu_tables *tables, const fst_clamp_launch *launch, fst_status *status)
{
    fst_clamp_launch args = *launch;
    return run(tables, FST_KERNEL_CLAMP, &args, &args.tables, BY_ROUNDS, status);
}

fst_code fst_gpu_accumulate(fst_gpu_tables *tables, const fst_accumulate_launch *launch,
                            fst_status *status)
{
    fst_accumulate_launch args = *launch;
    return run(tables, FST_KERNEL_ACCUMULATE, &args, &args.tables, BY_ROUNDS, status);
}

fst_code fst_gpu_loss_scale(int device, const fst_loss_scale_launch *launch, void *stream,
                            fst_status *status)
{
    fst_loss_scale_launch args = *launch;
    const fst_gpu_device *found = fst_gpu_device_get(device, status);
    int mode;
    if (!found || fst_gpu_enter(found, &mode, status))
        return status->code;
    fst_gpu_launch(found, FST_KERNEL_LOSS_SCALE, 1, stream, &args, status);
    return fst_gpu_leave(found, mode, status);
}
