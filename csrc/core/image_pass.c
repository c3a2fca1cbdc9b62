#include "core/image_pass.h"

#include <stdlib.h>

#include "cpu/image_scratch.h"
#include "cpu/parallel.h"
#include "rules/pixels.h"

enum {
    FARTHEST = 1 << 24, /* fp32 counts so far; and sums of a few such places stay in 32 bits */
    GRAIN = 1 << 16,    /* elements of the smallest part worth a thread: some 30 microseconds */
};

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
    fst_cpu->split(count, planes, pixels);
}

typedef struct {
    const fst_image_batch *batch;
    size_t scratch; /* bytes that a thread works in */
    int failed;     /* a thread found no memory */
} job;

static void run_rows(int64_t begin, int64_t end, void *context)
{
    job *all = context;
    void *memory = NULL;
    if (posix_memalign(&memory, FST_IMAGE_ALIGNMENT, all->scratch)) {
        __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    fst_cpu->image(all->batch, begin, end, memory);
    free(memory);
}

fst_code fst_image_transform(const fst_image_batch *batch, fst_status *status)
{
    const fst_image_sample *samples = (const fst_image_sample *)(uintptr_t)batch->samples;
    const int64_t rows = (int64_t)batch->count * batch->height;
    const int64_t row = (int64_t)batch->channels * batch->width;
    if (fst_image_check(batch, samples, status))
        return status->code;
    if (!row)
        return FST_OK;
    job all = {.batch = batch, .scratch = fst_image_scratch_of(batch, NULL).size};
    if (fst_parallel_for(rows, GRAIN / row + 1, run_rows, &all, status))
        return status->code;
    if (all.failed)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu bytes to transform images in",
                        all.scratch);
    return FST_OK;
}
