/* image_launch.h - a CUDA device's pass over a batch of images. */
#ifndef FST_GPU_IMAGE_LAUNCH_H
#define FST_GPU_IMAGE_LAUNCH_H

#include "base/image_sample.h"
#include "gpu/tables.h"

/* One upload and one launch on `stream`, and nothing is waited for. The batch's addresses are of
 * the device's memory; batch->samples is where a copy of `samples` goes, which are checked already.
 * Not for a stream that is captured: the pinned memory of the upload is used again. */
fst_code fst_gpu_image(fst_gpu_tables *tables, const fst_image_batch *batch,
                       const fst_image_sample *samples, void *stream, fst_status *status);

#endif
