/* image_pass.h - checks and transforms a batch of images. */
#pragma once

#include "base/image_sample.h"
#include "base/status.h"
#include "cpu/kernels.h"

/* Checks that every sample reads only pixels that exist. `samples` are in the host's memory. */
fst_code fst_image_check(const fst_image_batch *batch, const fst_image_sample *samples,
                         fst_status *status);

/* Splits `count` pixels of three bytes into three consecutive planes, which must not overlap
 * them. */
void fst_image_split(size_t count, uint8_t *planes, const uint8_t *pixels);

/* Transforms the whole batch, in the host's memory. */
fst_code fst_image_transform(const fst_image_batch *batch, fst_status *status);
