/* image_scratch.h - a thread's working memory for images: rows of the source and of the output,
 * small enough for its nearest caches. */
#pragma once

#include <stddef.h>

#include "base/image_sample.h"

enum { FST_IMAGE_ALIGNMENT = 64 };

/* The columns of a resized sample: for each of the output the two places in a row of the window.
 * With antialiasing `count` places from the first on, and weights from `place` on: a column of the
 * grid covers at most 2 * max(1, width of the window / width of the grid) + 1 of the window. */
typedef struct {
    int32_t *first, *second;
    float *w0, *w1;
    int32_t *count, *place;
    float *weights;
} fst_image_columns;

typedef struct {
    fst_image_columns columns[2]; /* of a sample and of its partner */
    void *source[2];              /* a source row each, its elements one after another */
    float *window;                /* a row of the window, and a zero */
    float *rows;                  /* an output row of each channel */
    float *other;                 /* an output row of the partner */
    uint16_t *halves;             /* an output row of each channel, rounded */
    size_t size;
} fst_image_scratch;

static inline void *fst_image_take(char *memory, size_t *used, size_t elements)
{
    void *taken = memory ? memory + *used : NULL;
    *used += (elements * 4 + FST_IMAGE_ALIGNMENT - 1) / FST_IMAGE_ALIGNMENT * FST_IMAGE_ALIGNMENT;
    return taken;
}

/* Divides `memory` into these arrays, or, for NULL, finds its size. */
static inline fst_image_scratch fst_image_scratch_of(const fst_image_batch *batch, void *memory)
{
    const size_t width = (size_t)batch->width, source = (size_t)batch->source_width;
    const size_t channels = (size_t)batch->channels;
    fst_image_scratch s = {.size = 0};
    for (unsigned i = 0; i < 2; i++) {
        s.columns[i].first = fst_image_take(memory, &s.size, width);
        s.columns[i].second = fst_image_take(memory, &s.size, width);
        s.columns[i].w0 = fst_image_take(memory, &s.size, width);
        s.columns[i].w1 = fst_image_take(memory, &s.size, width);
        if (batch->antialias) {
            s.columns[i].count = fst_image_take(memory, &s.size, width);
            s.columns[i].place = fst_image_take(memory, &s.size, width);
            s.columns[i].weights = fst_image_take(memory, &s.size, 2 * source + 4 * width);
        }
        s.source[i] = fst_image_take(memory, &s.size, source > width ? source : width);
    }
    s.window = fst_image_take(memory, &s.size, source + 1);
    s.rows = fst_image_take(memory, &s.size, width * channels);
    s.other = fst_image_take(memory, &s.size, width);
    s.halves = fst_image_take(memory, &s.size, (width * channels + 1) / 2);
    return s;
}
