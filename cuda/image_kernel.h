/* image_kernel.h - transforms a batch of images with a thread per output pixel. It makes all
 * channels, as the position is the same for them. */
#pragma once

#include "rules/pixels.h"
#include "words.h"

/* The source of a pixel: none (0), one source pixel, or four. With antialiasing all that it
 * covers, from `a` on. */
typedef struct {
    int count;
    int64_t a, b, c, d; /* in elements: upper left and right, lower left and right */
    fst_image_tap row, column;
    fst_image_span rows, columns;
} fst_image_origin;

FST_DEVICE fst_image_origin fst_image_find(const fst_image_batch *batch, const fst_image_sample *s,
                                           int32_t y, int32_t x)
{
    const int64_t row_step = batch->source_stride[FST_IMAGE_ROW];
    const int64_t step = batch->source_stride[FST_IMAGE_COLUMN];
    const int64_t start = s->source * batch->source_stride[FST_IMAGE_SAMPLE];
    fst_image_origin at;
    if (fst_image_is_resized(s)) {
        at.row = fst_image_row_tap(s, y);
        at.column = fst_image_column_tap(s, batch->width, x);
        at.count = at.row.first < 0 || at.column.first < 0 ? 0 : 4;
    } else {
        at.row.first = at.row.second =
            fst_image_unresized(s->first_row + y, s->top, s->grid_height, batch->source_height);
        at.column.first = at.column.second = fst_image_unresized(
            fst_image_grid_column(s, batch->width, x), s->left, s->grid_width, batch->source_width);
        at.row.w0 = at.row.w1 = at.column.w0 = at.column.w1 = 0.0f;
        at.count = at.row.first < 0 || at.column.first < 0 ? 0 : 1;
    }
    at.a = start + at.row.first * row_step + at.column.first * step;
    at.b = start + at.row.first * row_step + at.column.second * step;
    at.c = start + at.row.second * row_step + at.column.first * step;
    at.d = start + at.row.second * row_step + at.column.second * step;
    return at;
}

/* The same with antialiasing. A separate function: nvcc 13.0 does not terminate with both in one
 * and an early return between them. */
FST_DEVICE fst_image_origin fst_image_cover(const fst_image_batch *batch, const fst_image_sample *s,
                                            int32_t y, int32_t x)
{
    const int64_t row_step = batch->source_stride[FST_IMAGE_ROW];
    const int64_t step = batch->source_stride[FST_IMAGE_COLUMN];
    fst_image_origin at;
    if (fst_image_is_resized(s)) {
        at.rows = fst_image_row_span(s, y);
        at.columns = fst_image_column_span(s, batch->width, x);
    } else {
        const int32_t column = fst_image_grid_column(s, batch->width, x);
        at.rows = fst_image_one(
            fst_image_unresized(s->first_row + y, s->top, s->grid_height, batch->source_height));
        at.columns =
            fst_image_one(fst_image_unresized(column, s->left, s->grid_width, batch->source_width));
    }
    at.a = s->source * batch->source_stride[FST_IMAGE_SAMPLE] + at.rows.first * row_step +
           at.columns.first * step;
    return at;
}

FST_DEVICE float fst_image_read(const fst_image_batch *batch, int64_t at)
{
    const void *source = (const void *)fst_global(batch->source);
    return batch->source_is_float ? ((const float *)source)[at]
                                  : (float)((const uint8_t *)source)[at];
}

/* Rows are summed first, as on the CPU. */
FST_DEVICE float fst_image_sum(const fst_image_batch *batch, const fst_image_origin *at,
                               int64_t first)
{
    float value = 0.0f;
    for (int32_t x = 0; x < at->columns.count; x++) {
        int64_t place = first + x * batch->source_stride[FST_IMAGE_COLUMN];
        float column = 0.0f;
        for (int32_t y = 0; y < at->rows.count; y++) {
            const float part = fst_image_weight(&at->rows, y) * fst_image_read(batch, place);
            column = y ? column + part : part;
            place += batch->source_stride[FST_IMAGE_ROW];
        }
        column *= fst_image_weight(&at->columns, x);
        value = x ? value + column : column;
    }
    return value;
}

/* Rows are blended first, as on the CPU. */
FST_DEVICE float fst_image_value(const fst_image_batch *batch, const fst_image_origin *at,
                                 int32_t channel, int antialias)
{
    const int64_t plane = channel * batch->source_stride[FST_IMAGE_CHANNEL];
    float value = 0.0f;
    if (antialias)
        value = fst_image_sum(batch, at, at->a + plane);
    else if (at->count == 1)
        value = fst_image_read(batch, at->a + plane);
    else if (at->count == 4) {
        const float w0 = at->row.w0, w1 = at->row.w1;
        const float left = fst_image_blend(fst_image_read(batch, at->a + plane),
                                           fst_image_read(batch, at->c + plane), w0, w1);
        const float right = fst_image_blend(fst_image_read(batch, at->b + plane),
                                            fst_image_read(batch, at->d + plane), w0, w1);
        value = fst_image_blend(left, right, at->column.w0, at->column.w1);
    }
    return fst_image_affine(value, batch->scale[channel], batch->bias[channel]);
}

FST_DEVICE void fst_image_write(const fst_image_batch *batch, int64_t at, float value)
{
    void *out = (void *)fst_global(batch->out);
    if (batch->out_dtype == FST_F32)
        ((float *)out)[at] = value;
    else
        ((uint16_t *)out)[at] =
            batch->out_dtype == FST_BF16 ? fst_f32_to_bf16(value) : fst_f32_to_f16(value);
}

FST_DEVICE void fst_image_pixel(const fst_image_batch *batch, int32_t index, int32_t y, int32_t x,
                                int antialias)
{
    const fst_image_sample *samples = (const fst_image_sample *)fst_global(batch->samples);
    const fst_image_sample *s = &samples[index];
    const int32_t partner = s->partner;
    const int boxed = y >= s->box_top && y < s->box_bottom && x >= s->box_left && x < s->box_right;
    const int mixed = s->other != 0.0f && !boxed;
    const int64_t *stride = batch->out_stride;
    const int64_t place =
        index * stride[FST_IMAGE_SAMPLE] + y * stride[FST_IMAGE_ROW] + x * stride[FST_IMAGE_COLUMN];
    fst_image_origin own, other;
    if (boxed)
        own = antialias ? fst_image_cover(batch, &samples[partner], y, x)
                        : fst_image_find(batch, &samples[partner], y, x);
    else
        own = antialias ? fst_image_cover(batch, s, y, x) : fst_image_find(batch, s, y, x);
    other = own;
    if (mixed)
        other = antialias ? fst_image_cover(batch, &samples[partner], y, x)
                          : fst_image_find(batch, &samples[partner], y, x);
    for (int32_t c = 0; c < batch->channels; c++) {
        float value = fst_image_value(batch, &own, c, antialias);
        if (mixed)
            value = fst_image_blend(value, fst_image_value(batch, &other, c, antialias), s->own,
                                    s->other);
        fst_image_write(batch, place + c * stride[FST_IMAGE_CHANNEL], value);
    }
}

/* A block takes pixels of one sample that lie next to each other. */
FST_DEVICE void fst_image_tiles(const fst_image_batch *batch, int antialias)
{
    const uint32_t width = (uint32_t)batch->width, pixels = (uint32_t)batch->height * width;
    const uint32_t tiles = (pixels + FST_DEVICE_BLOCK - 1) / FST_DEVICE_BLOCK;
    const uint64_t all = (uint64_t)tiles * (uint32_t)batch->count;
    for (uint64_t i = blockIdx.x; i < all; i += gridDim.x) {
        const uint32_t index = (uint32_t)(i / tiles);
        const uint32_t pixel = (uint32_t)(i % tiles) * FST_DEVICE_BLOCK + threadIdx.x;
        if (pixel < pixels)
            fst_image_pixel(batch, (int32_t)index, (int32_t)(pixel / width),
                            (int32_t)(pixel % width), antialias);
    }
}

FST_KERNEL(fst_image, fst_image_batch)
{
    fst_image_tiles(&launch, 0);
}

/* With antialiasing. A separate kernel: one for both takes half as many registers more. */
FST_KERNEL(fst_image_smooth, fst_image_batch)
{
    fst_image_tiles(&launch, 1);
}
