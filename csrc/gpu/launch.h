/* launch.h - the passes on a CUDA device. Each is one launch on the stream that the tables were set
 * for, or one per round if it writes. None waits for the device.
 *
 * The caller fills in a launch struct (base/device.h) except for its tables. */
#pragma once

#include "base/device.h"
#include "base/image_sample.h"
#include "base/status.h"
#include "gpu/tables.h"

/* Measures if asked and decides what the update does. The update follows, unless it is NULL. */
fst_code fst_gpu_step(fst_gpu_tables *tables, const fst_begin_launch *begin,
                      const fst_update_launch *update, fst_status *status);

fst_code fst_gpu_unscale(fst_gpu_tables *tables, const fst_unscale_launch *launch,
                         fst_status *status);

/* With launch->tables.partial the chunks' sums are there, and not in the tables' own memory; with
 * `only_fold` launch->tables.chunk_count says how many. */
fst_code fst_gpu_norm(fst_gpu_tables *tables, const fst_norm_launch *launch, fst_status *status);

/* With `from_outcome` the norm is the one that an earlier pass over the same tables left. */
fst_code fst_gpu_scale(fst_gpu_tables *tables, const fst_scale_launch *launch, int from_outcome,
                       fst_status *status);

fst_code fst_gpu_clamp(fst_gpu_tables *tables, const fst_clamp_launch *launch, fst_status *status);

fst_code fst_gpu_accumulate(fst_gpu_tables *tables, const fst_accumulate_launch *launch,
                            fst_status *status);

/* The cross-entropy of rows, and their sums: two launches, which need no tables. */
fst_code fst_gpu_cross_entropy(int device, const fst_cross_entropy_launch *launch, void *stream,
                               fst_status *status);

/* The loss scale's update; needs no tables. */
fst_code fst_gpu_loss_scale(int device, const fst_loss_scale_launch *launch, void *stream,
                            fst_status *status);

/* Transforms a batch of images by one upload and one launch on `stream`, without waiting for the
 * device. The batch's addresses are of the device's memory; batch->samples receives a copy of
 * `samples`, which must have been checked. The stream must not be captured, as the upload's pinned
 * memory is reused. */
fst_code fst_gpu_image(fst_gpu_tables *tables, const fst_image_batch *batch,
                       const fst_image_sample *samples, void *stream, fst_status *status);
