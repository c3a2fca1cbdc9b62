/* image.h - where an output pixel's value comes from, and how it is computed: for the CPU's rows
 * and a device's threads alike.
 *
 * Resizing is bilinear as torch.nn.functional.interpolate(mode="bilinear", align_corners=False)
 * without antialiasing: the same positions, computed in fp32 as there. */
#ifndef FST_RULES_IMAGE_H
#define FST_RULES_IMAGE_H

#include "base/image.h"
#include "base/portable.h"

/* The two source rows, or columns, of an output one, and their weights. */
typedef struct {
    int32_t first, second; /* -1: none, the value is 0 */
    float w0, w1;
} fst_image_tap;

FST_FN int fst_image_is_resized(const fst_image_sample *s)
{
    return s->grid_height != s->height || s->grid_width != s->width;
}

/* Of place `at` in a grid that `length` rows of the source from `start` on are resized to. One way
 * out: nvcc 13.0 does not come to an end with an early return here. */
FST_FN fst_image_tap fst_image_tap_at(int32_t at, int32_t start, int32_t length, int32_t grid)
{
    const float scale = (float)length / (float)grid;
    const float center = scale * ((float)at + 0.5f) - 0.5f;
    const float place = center > 0.0f ? center : 0.0f;
    const int32_t whole = (int32_t)place < length - 1 ? (int32_t)place : length - 1;
    const float rest = place - (float)whole;
    fst_image_tap tap;
    tap.first = start + whole;
    tap.second = tap.first + (whole < length - 1);
    tap.w1 = rest < 1.0f ? rest : 1.0f;
    tap.w0 = 1.0f - tap.w1;
    if (at < 0 || at >= grid) {
        tap.first = tap.second = -1;
        tap.w0 = tap.w1 = 0.0f;
    }
    return tap;
}

/* The column of the grid that output column x shows. */
FST_FN int32_t fst_image_grid_column(const fst_image_sample *s, int32_t width, int32_t x)
{
    return s->first_column + (s->flip ? width - 1 - x : x);
}

FST_FN fst_image_tap fst_image_row_tap(const fst_image_sample *s, int32_t y)
{
    return fst_image_tap_at(s->first_row + y, s->top, s->height, s->grid_height);
}

FST_FN fst_image_tap fst_image_column_tap(const fst_image_sample *s, int32_t width, int32_t x)
{
    const int32_t column = fst_image_grid_column(s, width, x);
    return fst_image_tap_at(column, s->left, s->width, s->grid_width);
}

/* The source row, or column, of a place in the grid without resizing; -1: none. */
FST_FN int32_t fst_image_unresized(int32_t at, int32_t start, int32_t grid, int32_t source)
{
    return at >= 0 && at < grid && start + at >= 0 && start + at < source ? start + at : -1;
}

FST_FN float fst_image_blend(float a, float b, float w0, float w1)
{
    return w0 * a + w1 * b;
}

FST_FN float fst_image_affine(float x, float scale, float bias)
{
    return scale * x + bias;
}

#endif
