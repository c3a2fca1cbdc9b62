/* image_launch.h - transforms a batch of images on a CUDA device. */
#pragma once

#include "base/image_sample.h"
#include "gpu/tables.h"

/* One upload and one launch on `stream`, without waiting for the device. The batch's addresses
 * are of the device's memory; batch->samples receives a copy of `samples`, which must have been
 * checked. The stream must not be captured, as the upload's pinned memory is reused. */
fst_code fst_gpu_image(fst_gpu_tables *tables, const fst_image_batch *batch,
                       const fst_image_sample *samples, void *stream, fst_status *status);
