#include "core/image_pass.h"

#include "cpu/image_threads.h"
#include "rules/pixels.h"

enum { FARTHEST = 1 << 24 }; /* fp32 counts so far; and sums of a few such places stay in 32 bits */

static const fst_cpu_kernels *kernels;

void fst_image_use(const fst_cpu_kernels *chosen)
{
    kernels = chosen;
}

static int is_near(int32_t place)
{
    return place > -FARTHEST && place < FARTHEST;
}

static int fits(int32_t start, int32_t length, int32_t size)
{
    return start >= 0 && length > 0 && length <= size - start;
}

static int has_window(const fst_image_batch *b, const fst_image_sample *s)
{
    if (!is_near(s->top) || !is_near(s->left) || !is_near(s->first_row) ||
        !is_near(s->first_column) || !is_near(s->height) || !is_near(s->width) ||
        !is_near(s->grid_height) || !is_near(s->grid_width))
        return 0;
    if (!fst_image_is_resized(s))
        return 1;
    return s->grid_height > 0 && s->grid_width > 0 && fits(s->top, s->height, b->source_height) &&
           fits(s->left, s->width, b->source_width);
}

static int has_box(const fst_image_batch *b, const fst_image_sample *s)
{
    return s->box_top >= 0 && s->box_left >= 0 && s->box_bottom <= b->height &&
           s->box_right <= b->width;
}

fst_code fst_image_check(const fst_image_batch *b, const fst_image_sample *samples,
                         fst_status *status)
{
    if (b->source_height >= FARTHEST || b->source_width >= FARTHEST || b->height >= FARTHEST ||
        b->width >= FARTHEST)
        return fst_fail(status, FST_BAD_VALUE, "images have a side of more than %d pixels",
                        FARTHEST - 1);
    for (int32_t i = 0; i < b->count; i++) {
        const fst_image_sample *s = &samples[i];
        if (!has_window(b, s))
            return fst_fail(status, FST_BAD_VALUE,
                            "the window of sample %d, %d by %d from (%d, %d) on, is not in its "
                            "image of %d by %d",
                            i, s->height, s->width, s->top, s->left, b->source_height,
                            b->source_width);
        if (s->source < 0 || s->source >= b->source_count)
            return fst_fail(status, FST_BAD_VALUE, "sample %d is image %d of %d", i, s->source,
                            b->source_count);
        if (s->partner < 0 || s->partner >= b->count)
            return fst_fail(status, FST_BAD_VALUE, "sample %d is mixed with a sample %d of %d", i,
                            s->partner, b->count);
        if (!has_box(b, s))
            return fst_fail(status, FST_BAD_VALUE, "the box of sample %d is not in its image", i);
    }
    return FST_OK;
}

void fst_image_split(size_t count, uint8_t *planes, const uint8_t *pixels)
{
    kernels->split(count, planes, pixels);
}

fst_code fst_image_transform(const fst_image_batch *batch, fst_status *status)
{
    const fst_image_sample *samples = (const fst_image_sample *)(uintptr_t)batch->samples;
    if (fst_image_check(batch, samples, status))
        return status->code;
    return fst_cpu_image(batch, kernels, status);
}
