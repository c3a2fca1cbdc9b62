/* image_threads.h - the CPU's pass over a batch of images. */
#ifndef FST_CPU_IMAGE_THREADS_H
#define FST_CPU_IMAGE_THREADS_H

#include <stddef.h>

#include "base/image_sample.h"
#include "base/status.h"
#include "cpu/kernels.h"

/* Writes the whole batch; the struct's addresses are of the host's memory. */
fst_code fst_cpu_image(const fst_image_batch *batch, const fst_cpu_kernels *kernels,
                       fst_status *status);

/* Bytes that fst_cpu_kernels.image works in. */
size_t fst_cpu_image_scratch(const fst_image_batch *batch);

#endif
