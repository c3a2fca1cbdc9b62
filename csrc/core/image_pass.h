/* image_pass.h - a batch of images, checked and transformed. */
#ifndef FST_CORE_IMAGE_PASS_H
#define FST_CORE_IMAGE_PASS_H

#include "base/image_sample.h"
#include "base/status.h"
#include "cpu/kernels.h"

/* Chooses the kernels once, at start-up. */
void fst_image_use(const fst_cpu_kernels *kernels);

/* Whether every sample reads only what is there; `samples` are the batch's, in the host's memory.
 */
fst_code fst_image_check(const fst_image_batch *batch, const fst_image_sample *samples,
                         fst_status *status);

/* `count` pixels of three bytes each, to three planes one after another; the two do not overlap. */
void fst_image_split(size_t count, uint8_t *planes, const uint8_t *pixels);

/* The whole batch, in the host's memory. */
fst_code fst_image_transform(const fst_image_batch *batch, fst_status *status);

#endif
