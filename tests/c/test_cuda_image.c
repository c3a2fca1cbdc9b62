/* Batches of images: every instruction set, any cut of the rows among threads, and the kernel give
 * the same bits, read nothing outside of the source and write nothing outside of the output. */
#include "core/image_pass.h"
#include "cpu/image_scratch.h"
#include "device.h"

enum { MAX_COUNT = 4, GUARD = 64 };

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

typedef struct {
    fst_image_batch batch;
    fst_image_sample samples[MAX_COUNT];
    unsigned char *source; /* of exactly the size that is needed */
    size_t out_size;       /* bytes */
} images;

static int32_t between(int32_t low, int32_t high)
{
    return low + (int32_t)random_below((size_t)(high - low) + 1);
}

/* Strides of one of three orders of dimensions, with gaps or without. */
static size_t lay_out(int64_t *stride, const int32_t *shape, int64_t gap)
{
    static const int orders[3][FST_IMAGE_DIMS] = {{3, 2, 1, 0}, {1, 3, 2, 0}, {3, 1, 2, 0}};
    const int *order = orders[random_below(3)];
    int64_t next = gap;
    size_t last = 0;
    for (int i = 0; i < FST_IMAGE_DIMS; i++) {
        stride[order[i]] = next;
        last += (size_t)(next * (shape[order[i]] - 1));
        next *= shape[order[i]];
    }
    return last + 1;
}

static void choose_sample(const fst_image_batch *b, fst_image_sample *s)
{
    const int32_t h = b->source_height, w = b->source_width;
    *s = (fst_image_sample){.height = between(1, h), .width = between(1, w)};
    s->top = between(0, h - s->height);
    s->left = between(0, w - s->width);
    s->grid_height = s->height;
    s->grid_width = s->width;
    if (random_below(2)) {
        s->grid_height = between(1, 2 * b->height);
        s->grid_width = between(1, 2 * b->width);
    } else if (random_below(2)) { /* also outside of the source */
        s->top = between(-h, h);
        s->left = between(-w, w);
    }
    s->first_row = between(-3, s->grid_height);
    s->first_column = between(-3, s->grid_width);
    s->flip = (int32_t)random_below(2);
    s->partner = between(0, b->count - 1);
    s->source = between(0, b->source_count - 1);
    s->own = 1.0f;
    if (random_below(2)) {
        s->own = (float)random_unit();
        s->other = 1.0f - s->own;
    }
    if (random_below(2)) {
        s->box_top = between(0, b->height);
        s->box_left = between(0, b->width);
        s->box_bottom = between(0, b->height);
        s->box_right = between(0, b->width);
    }
}

static images *images_new(void)
{
    images *m = must_alloc(sizeof *m);
    fst_image_batch *b = &m->batch;
    *b = (fst_image_batch){.count = between(1, MAX_COUNT), .channels = between(1, 4)};
    b->source_count = between(1, 2 * MAX_COUNT);
    b->source_height = between(1, 20);
    b->source_width = between(1, random_below(4) ? 40 : 200);
    b->height = between(1, 20);
    b->width = between(1, random_below(4) ? 40 : 200);
    b->source_is_float = (int32_t)random_below(2);
    b->antialias = (int32_t)random_below(2);
    b->out_dtype = (int32_t[]){FST_F32, FST_BF16, FST_F16}[random_below(3)];
    for (int32_t c = 0; c < b->channels; c++) {
        b->scale[c] = (float)random_unit();
        b->bias[c] = (float)random_unit();
    }
    const int32_t from[] = {b->source_count, b->channels, b->source_height, b->source_width};
    const int32_t to[] = {b->count, b->channels, b->height, b->width};
    const size_t elements = lay_out(b->source_stride, from, between(1, 2));
    const size_t size = elements * (b->source_is_float ? sizeof(float) : 1);
    m->source = must_alloc(size);
    for (size_t i = 0; i < size; i++)
        m->source[i] = (unsigned char)random_bits();
    for (size_t i = 0; b->source_is_float && i < elements; i++)
        ((float *)(void *)m->source)[i] = (float)random_value();
    m->out_size = lay_out(b->out_stride, to, between(1, 2)) * (b->out_dtype == FST_F32 ? 4 : 2);
    for (int32_t i = 0; i < b->count; i++)
        choose_sample(b, &m->samples[i]);
    b->source = address_of(m->source);
    b->samples = address_of(m->samples);
    return m;
}

/* An output with guards around it, and what lies between its elements. */
static unsigned char *out_new(images *m)
{
    unsigned char *memory = must_alloc(m->out_size + 2 * GUARD);
    memset(memory, 0xA5, m->out_size + 2 * GUARD);
    m->batch.out = address_of(memory + GUARD);
    return memory;
}

/* Rows in pieces, as threads would take them. */
static unsigned char *by_pieces(images *m, const fst_cpu_kernels *level)
{
    const int64_t rows = (int64_t)m->batch.count * m->batch.height;
    const size_t size = fst_image_scratch_of(&m->batch, NULL).size;
    unsigned char *out = out_new(m), *scratch = must_alloc(size);
    for (int64_t begin = 0, end; begin < rows; begin = end) {
        end = begin + 1 + (int64_t)random_below((size_t)rows);
        memset(scratch, 0xFF, size); /* NaN: nothing stays from piece to piece */
        level->image(&m->batch, begin, end < rows ? end : rows, scratch);
    }
    free(scratch);
    return out;
}

static int is_nan(uint32_t bits, uint32_t infinite)
{
    const uint32_t sign = infinite << 1 & ~infinite;
    return (bits & ~sign) > infinite;
}

/* The same bits; but of sums with two of them, it is the compiler's choice which NaN is kept. */
static int are_same(const images *m, const unsigned char *one, const unsigned char *other)
{
    static const uint32_t infinite[] = {
        [FST_F32] = 0x7F800000, [FST_BF16] = 0x7F80, [FST_F16] = 0x7C00};
    const int dtype = m->batch.out_dtype;
    const size_t item = dtype == FST_F32 ? 4 : 2;
    for (size_t at = 0; at < m->out_size + 2 * GUARD; at += item) {
        uint32_t a = 0, b = 0;
        memcpy(&a, one + at, item);
        memcpy(&b, other + at, item);
        if (a != b && !(is_nan(a, infinite[dtype]) && is_nan(b, infinite[dtype])))
            return 0;
    }
    return 1;
}

static void same_everywhere(void)
{
    fst_status status = {0};
    images *m = images_new();
    unsigned char *want = out_new(m);
    fst_cpu = levels[0];
    CHECK_INT(fst_image_transform(&m->batch, &status), FST_OK);
    for (size_t i = 0; i < level_count; i++) {
        unsigned char *got = by_pieces(m, levels[i]);
        if (!CHECK(are_same(m, got, want)))
            fprintf(stderr, "    %s\n", levels[i]->name);
        free(got);
    }
    unsigned char *got = out_new(m);
    simt_shuffle_by(random_below(3));
    const char *kernel = m->batch.antialias ? "fst_image_smooth" : "fst_image";
    device_launch(NULL, kernel, 1 + (unsigned)random_below(5), &m->batch);
    CHECK(are_same(m, got, want));
    free(got);
    free(want);
    free(m->source);
    free(m);
}

/* One pixel's value by hand: a window of 2 by 2, resized to 4 by 4. */
static void known_values(void)
{
    static const uint8_t source[] = {0, 100, 200, 40};
    float out[16];
    fst_status status = {0};
    fst_image_sample s = {.height = 2, .width = 2, .grid_height = 4, .grid_width = 4, .own = 1.0f};
    fst_image_batch b = {.source = address_of(source),
                         .out = address_of(out),
                         .samples = address_of(&s),
                         .source_stride = {4, 4, 2, 1},
                         .out_stride = {16, 16, 4, 1},
                         .count = 1,
                         .channels = 1,
                         .source_count = 1,
                         .source_height = 2,
                         .source_width = 2,
                         .height = 4,
                         .width = 4,
                         .out_dtype = FST_F32,
                         .scale = {2.0f},
                         .bias = {1.0f}};
    CHECK_INT(fst_image_transform(&b, &status), FST_OK);
    CHECK_NEAR(out[0], 1.0, 0);
    CHECK_NEAR(out[1], 2 * 25.0 + 1, 0);
    CHECK_NEAR(out[3], 201.0, 0);
    CHECK_NEAR(out[5], 2 * (0.75 * 25.0 + 0.25 * 160.0) + 1, 0);
    CHECK_NEAR(out[15], 81.0, 0);
    b.antialias = 1; /* the same for what becomes larger */
    CHECK_INT(fst_image_transform(&b, &status), FST_OK);
    CHECK_NEAR(out[5], 2 * (0.75 * 25.0 + 0.25 * 160.0) + 1, 1e-5);
    s.grid_height = s.grid_width = 1;
    CHECK_INT(fst_image_transform(&b, &status), FST_OK);
    CHECK_NEAR(out[0], 2 * 85.0 + 1, 1e-5);
    CHECK_NEAR(out[1], 1.0, 0); /* outside of the grid */
    s.grid_height = s.grid_width = 4;
    b.antialias = 0;
    s.flip = 1;
    CHECK_INT(fst_image_transform(&b, &status), FST_OK);
    CHECK_NEAR(out[0], 201.0, 0);
    s.top = 1;
    CHECK_INT(fst_image_transform(&b, &status), FST_BAD_VALUE);
    CHECK_CONTAINS(status.message, "the window of sample 0");
    s.top = 0;
    for (s.source = -1; s.source <= 1; s.source += 2) {
        CHECK_INT(fst_image_transform(&b, &status), FST_BAD_VALUE);
        CHECK_CONTAINS(status.message,
                       s.source < 0 ? "sample 0 is image -1 of 1" : "sample 0 is image 1 of 1");
    }
    CHECK_NEAR(out[0], 201.0, 0);
}

int main(void)
{
    level_count = supported_levels(levels);
    for (int round = 0; round < 600; round++)
        same_everywhere();
    known_values();
    return check_report();
}
