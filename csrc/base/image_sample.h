/* image_sample.h - a batch of images to be transformed, as plain data that CPU and device read.
 * Addresses are 64-bit numbers, so host and device agree on every struct. */
#pragma once

#include <stdint.h>

enum { FST_IMAGE_CHANNELS = 32 }; /* at most */

/* The dimensions of a batch; strides are in elements. */
enum { FST_IMAGE_SAMPLE, FST_IMAGE_CHANNEL, FST_IMAGE_ROW, FST_IMAGE_COLUMN, FST_IMAGE_DIMS };

/* How one sample is made: a window of its source image is resized to a grid, and the output is a
 * part of the grid. The output may be flipped, and mixed with another sample's. Pixels outside
 * of the grid, or outside of the source if it is not resized, are 0. */
typedef struct {
    int32_t top, left, height, width; /* the window; inside the source where it is resized */
    int32_t grid_height, grid_width;
    int32_t first_row, first_column; /* of the output, in the grid */
    int32_t flip;                    /* flip left and right, last of all */
    int32_t partner;                 /* the other sample */
    int32_t source;                  /* the image, of all that the source has */
    float own, other; /* the result is own * this + other * the partner; `other` 0: this alone */
    int32_t box_top, box_left, box_bottom, box_right; /* of the output: the partner alone */
} fst_image_sample;

/* Pixels times a channel's scale plus its bias, in fp32, before they are mixed. */
typedef struct {
    uint64_t source, out;
    uint64_t samples; /* fst_image_sample, one each */
    int64_t source_stride[FST_IMAGE_DIMS], out_stride[FST_IMAGE_DIMS];
    int32_t count, channels; /* of the output */
    int32_t source_count;    /* images; a sample may come from any */
    int32_t source_height, source_width, height, width;
    int32_t source_is_float; /* fp32; else bytes */
    int32_t out_dtype;       /* fst_dtype: fp32, bf16 or fp16 */
    int32_t antialias;       /* of what is resized */
    float scale[FST_IMAGE_CHANNELS], bias[FST_IMAGE_CHANNELS];
} fst_image_batch;
