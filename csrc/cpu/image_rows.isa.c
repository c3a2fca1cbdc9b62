/* Transforms rows of images. Compiled once per instruction set, as kernels.isa.c. */
#include "base/dtype.h"
#include "base/stream.h"
#include "cpu/image_scratch.h"
#include "cpu/isa.h"
#include "rules/pixels.h"

#include "cpu/image_loops.h"
#include "cpu/image_reader.h"

enum { FETCHED = 4, LINE = 64 }; /* rows that are prefetched ahead; bytes of a cache line */

typedef struct {
    const fst_image_batch *batch;
    const fst_image_sample *samples;
    fst_image_scratch scratch;
    reader own, other;
    int streams; /* with non-temporal stores: the output is larger than the caches */
} worker;

/* Whether to write with non-temporal stores: the output has contiguous rows, and its first rows
 * would leave the caches before its last rows are written. */
static int is_streamed(const fst_image_batch *b)
{
    const size_t elements = (size_t)b->count * (size_t)b->channels * (size_t)b->height;
    return b->out_stride[FST_IMAGE_COLUMN] == 1 &&
           elements * (size_t)b->width * fst_dtype_size(b->out_dtype) >= FST_STREAM_BYTES;
}

static const void *source_at(const fst_image_batch *b, const fst_image_sample *s, int32_t channel,
                             int32_t row, int32_t column)
{
    const int64_t *stride = b->source_stride;
    const int64_t at = s->source * stride[FST_IMAGE_SAMPLE] + channel * stride[FST_IMAGE_CHANNEL] +
                       row * stride[FST_IMAGE_ROW] + column * stride[FST_IMAGE_COLUMN];
    return (const char *)(uintptr_t)b->source + at * (b->source_is_float ? 4 : 1);
}

/* `n` source elements, contiguous: where they are, or copied to `scratch`. */
static const void *source_row(const fst_image_batch *b, const void *from, size_t n, void *scratch)
{
    const int64_t step = b->source_stride[FST_IMAGE_COLUMN];
    if (step == 1)
        return from;
    if (b->source_is_float)
        collect_f32(n, scratch, from, step);
    else
        collect_u8(n, scratch, from, step);
    return scratch;
}

static void fill(float *to, int32_t begin, int32_t end, float value)
{
    for (int32_t x = begin; x < end; x++)
        to[x] = value;
}

static int32_t clamped(int32_t x, int32_t low, int32_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Writes columns [begin, end) of a row that is not resized: source columns between zeros. */
static void copy_row(const worker *w, const reader *r, int32_t channel, int32_t y, int32_t begin,
                     int32_t end, float *to)
{
    const fst_image_batch *b = w->batch;
    const fst_image_sample *at = r->at;
    const float scale = b->scale[channel], bias = b->bias[channel];
    const int32_t row =
        fst_image_unresized(at->first_row + y, at->top, at->grid_height, b->source_height);
    const int32_t right = b->source_width - at->left;
    const int32_t low = at->left < 0 ? -at->left : 0; /* the grid's columns that have a source */
    const int32_t high = right < at->grid_width ? right : at->grid_width;
    const int32_t shift = at->first_column;
    const int32_t first = clamped(at->flip ? shift + b->width - high : low - shift, begin, end);
    int32_t last = clamped(at->flip ? shift + b->width - low : high - shift, first, end);
    if (row < 0)
        last = first;
    fill(to, begin, first, fst_image_affine(0.0f, scale, bias));
    fill(to, last, end, fst_image_affine(0.0f, scale, bias));
    if (first == last)
        return;
    const size_t n = (size_t)(last - first);
    const int32_t leftmost = fst_image_grid_column(at, b->width, at->flip ? last - 1 : first);
    const void *from = source_at(b, at, channel, row, at->left + leftmost);
    from = source_row(b, from, n, w->scratch.source[0]);
    if (b->source_is_float)
        (at->flip ? affine_back_f32 : fst_loop_affine_f32)(n, to + first, from, scale, bias);
    else
        (at->flip ? affine_back_u8 : fst_loop_affine_u8)(n, to + first, from, scale, bias);
}

/* Writes columns [begin, end) of a resized row. Rows are blended first: that reads the source in
 * order and leaves one row to gather columns from. */
static void resize_row(const worker *w, const reader *r, int32_t channel, int32_t y, int32_t begin,
                       int32_t end, float *to)
{
    const fst_image_batch *b = w->batch;
    const float scale = b->scale[channel], bias = b->bias[channel];
    const fst_image_tap tap = fst_image_row_tap(r->at, y);
    float *window = w->scratch.window;
    fst_image_columns columns = r->columns;
    if (tap.first < 0) {
        fill(to, begin, end, fst_image_affine(0.0f, scale, bias));
        return;
    }
    if (r->lowest <= r->highest) {
        const size_t n = (size_t)(r->highest - r->lowest) + 1;
        const int32_t column = r->at->left + r->lowest;
        const void *a = source_at(b, r->at, channel, tap.first, column);
        const void *c = source_at(b, r->at, channel, tap.second, column);
        a = source_row(b, a, n, w->scratch.source[0]);
        c = tap.second == tap.first ? a : source_row(b, c, n, w->scratch.source[1]);
        if (b->source_is_float)
            fst_loop_blend_f32(n, window + r->lowest, a, c, tap.w0, tap.w1);
        else
            fst_loop_blend_u8(n, window + r->lowest, a, c, tap.w0, tap.w1);
    }
    window[r->at->width] = 0.0f;
    columns.first += begin;
    columns.second += begin;
    columns.w0 += begin;
    columns.w1 += begin;
    gather_columns((size_t)(end - begin), to + begin, window, &columns, scale, bias);
}

/* Sums the source rows that an output row covers into one row of the window. */
static void sum_rows(const worker *w, const reader *r, int32_t channel, const fst_image_span *span)
{
    const fst_image_batch *b = w->batch;
    const size_t n = (size_t)(r->highest - r->lowest) + 1;
    const int32_t column = r->at->left + r->lowest;
    float *to = w->scratch.window + r->lowest;
    for (int32_t i = 0; i < span->count; i++) {
        const void *from = source_at(b, r->at, channel, span->first + i, column);
        const float weight = fst_image_weight(span, i);
        from = source_row(b, from, n, w->scratch.source[0]);
        if (b->source_is_float)
            (i ? fst_loop_add_f32 : fst_loop_weigh_f32)(n, to, from, weight);
        else
            (i ? fst_loop_add_u8 : fst_loop_weigh_u8)(n, to, from, weight);
    }
}

/* Does what resize_row does, with antialiasing. */
static void smooth_row(const worker *w, const reader *r, int32_t channel, int32_t y, int32_t begin,
                       int32_t end, float *to)
{
    const float scale = w->batch->scale[channel], bias = w->batch->bias[channel];
    const fst_image_span span = fst_image_row_span(r->at, y);
    fst_image_columns columns = r->columns;
    if (!span.count || r->lowest > r->highest) {
        fill(to, begin, end, fst_image_affine(0.0f, scale, bias));
        return;
    }
    sum_rows(w, r, channel, &span);
    columns.first += begin;
    columns.count += begin;
    columns.place += begin;
    sum_columns((size_t)(end - begin), to + begin, w->scratch.window, &columns, scale, bias);
}

static void read_row(const worker *w, const reader *r, int32_t channel, int32_t y, int32_t begin,
                     int32_t end, float *to)
{
    if (!r->resized)
        copy_row(w, r, channel, y, begin, end, to);
    else
        (w->batch->antialias ? smooth_row : resize_row)(w, r, channel, y, begin, end, to);
}

/* Makes one row of one channel, before it is rounded. */
static void mixed_row(const worker *w, int32_t channel, int32_t y, float *to)
{
    const fst_image_sample *at = w->own.at;
    const int32_t width = w->batch->width;
    read_row(w, &w->own, channel, y, 0, width, to);
    if (at->other != 0.0f) {
        read_row(w, &w->other, channel, y, 0, width, w->scratch.other);
        fst_loop_mix((size_t)width, to, w->scratch.other, at->own, at->other);
    }
    if (y >= at->box_top && y < at->box_bottom && at->box_left < at->box_right)
        read_row(w, &w->other, channel, y, at->box_left, at->box_right, to);
}

static void round_row(const fst_image_batch *b, uint16_t *to, const float *from, size_t n)
{
    (b->out_dtype == FST_BF16 ? fst_loop_bf16 : fst_loop_f16)(n, to, from);
}

/* Writes all channels of a row, directly where the output's rows are contiguous. */
static void write_row(const worker *w, int32_t index, int32_t y)
{
    const fst_image_batch *b = w->batch;
    const int64_t *stride = b->out_stride;
    const size_t n = (size_t)b->width, channels = (size_t)b->channels;
    const int wide = b->out_dtype == FST_F32, planar = stride[FST_IMAGE_COLUMN] == 1;
    const int64_t place = index * stride[FST_IMAGE_SAMPLE] + y * stride[FST_IMAGE_ROW];
    float *out = (float *)(uintptr_t)b->out + place;
    uint16_t *half = (uint16_t *)(uintptr_t)b->out + place;
    for (int32_t c = 0; c < b->channels; c++) {
        const int64_t at = c * stride[FST_IMAGE_CHANNEL];
        const int direct = planar && !w->streams;
        float *row = wide && direct ? out + at : w->scratch.rows + (size_t)c * n;
        uint16_t *rounded = direct ? half + at : w->scratch.halves + (size_t)c * n;
        mixed_row(w, c, y, row);
        if (!wide)
            round_row(b, rounded, row, n);
        if (w->streams && wide)
            fst_stream_copy((char *)(out + at), (const char *)row, n * sizeof *row);
        else if (w->streams)
            fst_stream_copy((char *)(half + at), (const char *)rounded, n * sizeof *rounded);
    }
    if (planar)
        return;
    if (wide)
        spread_f32(n, channels, out, w->scratch.rows, stride[FST_IMAGE_CHANNEL],
                   stride[FST_IMAGE_COLUMN]);
    else
        spread_u16(n, channels, half, w->scratch.halves, stride[FST_IMAGE_CHANNEL],
                   stride[FST_IMAGE_COLUMN]);
}

/* Prefetches the source of row `i` of all output rows, if it is not resized. The hardware cannot
 * predict it: rows of a crop have gaps between them, and images lie anywhere. */
static void fetch_row(const worker *w, int64_t i)
{
    const fst_image_batch *b = w->batch;
    const fst_image_sample *at = &w->samples[i / b->height];
    const int32_t y = at->first_row + (int32_t)(i % b->height);
    const int32_t row = fst_image_unresized(y, at->top, at->grid_height, b->source_height);
    const int32_t left = at->left + at->first_column;
    const int32_t first = clamped(left, 0, b->source_width);
    const int32_t last = clamped(left + b->width, first, b->source_width);
    const size_t bytes = (size_t)(last - first) * (b->source_is_float ? 4 : 1);
    if (row < 0 || !bytes || fst_image_is_resized(at) || b->source_stride[FST_IMAGE_COLUMN] != 1)
        return;
    for (int32_t c = 0; c < b->channels; c++) {
        const char *from = source_at(b, at, c, row, first);
        for (size_t offset = 0; offset < bytes; offset += LINE)
            __builtin_prefetch(from + offset);
        __builtin_prefetch(from + bytes - 1);
    }
}

void FST_OF_ISA(fst_image_rows)(const fst_image_batch *batch, int64_t begin, int64_t end,
                                void *scratch)
{
    const fst_image_sample *samples = (const fst_image_sample *)(uintptr_t)batch->samples;
    worker w = {
        .batch = batch, .samples = samples, .scratch = fst_image_scratch_of(batch, scratch)};
    w.streams = is_streamed(batch);
    w.own.columns = w.scratch.columns[0];
    w.other.columns = w.scratch.columns[1];
    for (int64_t i = begin; i < end; i++) {
        const int32_t index = (int32_t)(i / batch->height);
        const fst_image_sample *at = &samples[index];
        if (w.own.at != at) {
            look_at(batch, at, &w.own);
            if (at->other != 0.0f || at->box_top < at->box_bottom)
                look_at(batch, &samples[at->partner], &w.other);
        }
        if (i + FETCHED < end)
            fetch_row(&w, i + FETCHED);
        write_row(&w, index, (int32_t)(i % batch->height));
    }
    if (w.streams)
        fst_stream_end();
}

void FST_OF_ISA(fst_image_split)(size_t count, uint8_t *planes, const uint8_t *pixels)
{
    split_rgb(count, planes, planes + count, planes + 2 * count, pixels);
}
