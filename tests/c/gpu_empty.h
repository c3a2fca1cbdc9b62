/* gpu_empty.h - a fatbin that is whole, and kernels for the fake driver that do nothing. */
#pragma once

#include "base/device.h"
#include "base/image_sample.h"
#include "fake_cuda.h"

static const unsigned char fatbin[24] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8};

static const fake_cuda_kernel kernels[] = {
    {"fst_begin", sizeof(fst_begin_launch), NULL, NULL},
    {"fst_update", sizeof(fst_update_launch), NULL, NULL},
    {"fst_unscale", sizeof(fst_unscale_launch), NULL, NULL},
    {"fst_norm", sizeof(fst_norm_launch), NULL, NULL},
    {"fst_scale", sizeof(fst_scale_launch), NULL, NULL},
    {"fst_clamp", sizeof(fst_clamp_launch), NULL, NULL},
    {"fst_accumulate", sizeof(fst_accumulate_launch), NULL, NULL},
    {"fst_loss_scale", sizeof(fst_loss_scale_launch), NULL, NULL},
    {"fst_image", sizeof(fst_image_batch), NULL, NULL},
    {"fst_image_smooth", sizeof(fst_image_batch), NULL, NULL},
    {"fst_cross_entropy", sizeof(fst_cross_entropy_launch), NULL, NULL},
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };
