/* pixels.h - which source pixels an output pixel reads, and how its value is computed, for CPU and
 * device alike.
 *
 * Resizing is bilinear as torch.nn.functional.interpolate(mode="bilinear", align_corners=False),
 * with antialias=True or without: the same positions, also computed in fp32. */
#pragma once

#include "base/image_sample.h"
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

/* The tap of place `at` in a grid to which `length` rows of the source, from `start` on, are
 * resized. One return only: nvcc 13.0 does not terminate with an early one here. */
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

/* The source rows, or columns, that an output one covers with antialiasing. Their weights form a
 * triangle that is as wide as two steps of the grid, and at least two of the source. */
typedef struct {
    int32_t first, count; /* 0: none, the value is 0 */
    float nearest;        /* the first one's distance from the triangle's middle */
    float narrow;         /* distances times this are between -1 and 1 in the triangle */
    float share;          /* scales the weights to a sum of 1 */
} fst_image_span;

FST_FN float fst_image_triangle(const fst_image_span *span, int32_t i)
{
    const float distance = (span->nearest + (float)i) * span->narrow;
    const float height = 1.0f - (distance < 0.0f ? -distance : distance);
    return height > 0.0f ? height : 0.0f;
}

/* The span of place `at` in a grid to which `length` rows of the source, from `start` on, are
 * resized. */
FST_FN fst_image_span fst_image_span_at(int32_t at, int32_t start, int32_t length, int32_t grid)
{
    const float scale = (float)length / (float)grid;
    const float reach = scale > 1.0f ? scale : 1.0f;
    const float center = scale * ((float)at + 0.5f);
    const int32_t from = (int32_t)(center - reach + 0.5f), to = (int32_t)(center + reach + 0.5f);
    const int32_t first = from > 0 ? from : 0, last = to < length ? to : length;
    float sum = 0.0f;
    fst_image_span span;
    span.first = start + first;
    span.count = at < 0 || at >= grid || last < first ? 0 : last - first;
    span.nearest = (float)first - center + 0.5f;
    span.narrow = 1.0f / reach;
    for (int32_t i = 0; i < span.count; i++)
        sum += fst_image_triangle(&span, i);
    span.share = sum > 0.0f ? 1.0f / sum : 0.0f;
    return span;
}

/* The span of one row, or column, with weight 1; -1: none. */
FST_FN fst_image_span fst_image_one(int32_t first)
{
    fst_image_span span;
    span.first = first;
    span.count = first >= 0;
    span.nearest = 0.0f;
    span.narrow = span.share = 1.0f;
    return span;
}

FST_FN float fst_image_weight(const fst_image_span *span, int32_t i)
{
    return fst_image_triangle(span, i) * span->share;
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

FST_FN fst_image_span fst_image_row_span(const fst_image_sample *s, int32_t y)
{
    return fst_image_span_at(s->first_row + y, s->top, s->height, s->grid_height);
}

FST_FN fst_image_span fst_image_column_span(const fst_image_sample *s, int32_t width, int32_t x)
{
    const int32_t column = fst_image_grid_column(s, width, x);
    return fst_image_span_at(column, s->left, s->width, s->grid_width);
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
