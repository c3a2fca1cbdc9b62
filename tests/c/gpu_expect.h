/* gpu_expect.h - kernels for the fake device that look whether the tables they run with are those
 * of their step. A step is known by its tag, which travels in a number that its kernels do not
 * need. */
#pragma once

#include "common.h"
#include "fake_cuda.h"
#include "gpu/launch.h"

enum { MAX_TAGS = 1 << 16 };

/* What one call of model_set described; kernels find it by its tag. */
typedef struct {
    fst_operand *operands;
    fst_device_span *spans;
    fst_device_group groups[2];
    fst_chunk *chunks;
    fst_layout layout;
    size_t operand_count, span_count, chunk_count;
    int launched, ran; /* launches with this tag */
} expectation;

static expectation expected[MAX_TAGS];
static int last_tag;
static long kernels_ran;

static const unsigned char fake_fatbin[24] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8};

/* Bytes of the launch struct that is looked at, of which `t` is the first member. */
static size_t launch_size;

static const void *table_at(const fst_device_tables *t, uint64_t address)
{
    return address < FST_DEVICE_LAUNCH ? (const char *)t + address
                                       : (const void *)(uintptr_t)address;
}

/* Whether a kernel may read a table: in its parameters, behind all that is not a table, or in the
 * device's memory. */
static int holds(const fst_device_tables *t, uint64_t address, size_t size)
{
    if (address >= FST_DEVICE_LAUNCH)
        return fake_cuda_holds(address, size);
    return address % 8 == 0 && address >= sizeof *t && address + size <= launch_size;
}

/* What a step has besides the work. */
static int same_rules(const fst_device_tables *t, const expectation *e)
{
    const size_t span_bytes = e->span_count * sizeof *e->spans;
    return t->span_count == e->span_count && holds(t, t->spans, span_bytes) &&
           holds(t, t->groups, sizeof e->groups) &&
           !memcmp(table_at(t, t->spans), e->spans, span_bytes) &&
           !memcmp(table_at(t, t->groups), e->groups, sizeof e->groups);
}

/* Whether the tables are those of the expectation, field by field, and where the device can see
 * them. */
static int same_tables(const fst_device_tables *t, const expectation *e)
{
    const fst_device_operand *ops = table_at(t, t->operands);
    const fst_device_chunk *chunks = table_at(t, t->chunks);
    const fst_device_layout *layouts = table_at(t, t->layouts);
    int same = holds(t, t->operands, e->operand_count * sizeof *ops) && same_rules(t, e) &&
               t->chunk_first + t->chunk_count <= e->chunk_count &&
               fake_cuda_holds(t->args, e->span_count * FST_DEVICE_ARGS) &&
               fake_cuda_holds(t->partial, e->chunk_count * sizeof(double)) &&
               fake_cuda_holds(t->outcome, sizeof(fst_device_outcome)) &&
               t->args % FST_DEVICE_ARGS == 0;
    for (size_t i = 0; same && i < e->operand_count; i++) {
        const fst_operand *op = &e->operands[i];
        same = ops[i].data == (uint64_t)(uintptr_t)op->data && ops[i].dtype == (int)op->dtype;
        if (!op->layout) {
            same = same && ops[i].layout == -1;
            continue;
        }
        const fst_device_layout *layout = layouts + ops[i].layout;
        same = same && ops[i].layout >= 0 &&
               holds(t, t->layouts + (size_t)ops[i].layout * sizeof *layout, sizeof *layout) &&
               layout->ndim == e->layout.ndim && layout->negated == e->layout.negated;
        for (int d = 0; same && d < e->layout.ndim; d++)
            same =
                layout->shape[d] == e->layout.shape[d] && layout->stride[d] == e->layout.stride[d];
    }
    same = same && holds(t, t->chunks, e->chunk_count * sizeof *chunks);
    for (size_t i = 0; same && i < e->chunk_count; i++)
        same = chunks[i].begin == e->chunks[i].begin && chunks[i].span == e->chunks[i].span &&
               chunks[i].count == e->chunks[i].count;
    return same;
}

static expectation *look(const fake_cuda_kernel *self, const fst_device_tables *t, int tag)
{
    expectation *e = &expected[tag];
    kernels_ran++;
    launch_size = self->args_size;
    if (CHECK(tag > 0 && tag <= last_tag))
        CHECK(same_tables(t, e));
    e->ran++;
    return e;
}

static fst_device_outcome *outcome_at(const fst_device_tables *t)
{
    return (void *)(uintptr_t)t->outcome;
}

/* Leaves its tag wherever the real one leaves something for the kernels that follow. */
static int run_begin(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_begin_launch *launch = args;
    const int tag = (int)launch->max_norm;
    const expectation *e = look(self, &launch->tables, tag);
    char *of_rules = (void *)(uintptr_t)launch->tables.args;
    double *partial = (void *)(uintptr_t)launch->tables.partial;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_begin"));
    CHECK_INT(outcome_at(&launch->tables)->ticket, 0);
    outcome_at(&launch->tables)->norm = tag;
    for (size_t i = 0; i < e->span_count; i++)
        memset(of_rules + i * FST_DEVICE_ARGS, tag, FST_DEVICE_ARGS);
    for (size_t i = 0; i < e->chunk_count; i++)
        partial[i] = tag;
    return 0;
}

static int run_update(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_update_launch *launch = args;
    const int tag = launch->write_grad;
    const expectation *e = look(self, &launch->tables, tag);
    const unsigned char *of_rules = (void *)(uintptr_t)launch->tables.args;
    const double *partial = (void *)(uintptr_t)launch->tables.partial;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_update"));
    CHECK_NEAR(outcome_at(&launch->tables)->norm, tag, 0);
    for (size_t i = 0; i < e->span_count; i++)
        CHECK_INT(of_rules[i * FST_DEVICE_ARGS], (unsigned char)tag);
    for (size_t i = 0; i < e->chunk_count; i++)
        CHECK_NEAR(partial[i], tag, 0);
    return 0;
}

static int run_unscale(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                       const void *args)
{
    const fst_unscale_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_unscale"));
    look(self, &launch->tables, (int)launch->factor);
    outcome_at(&launch->tables)->norm = launch->factor;
    return 0;
}

static int run_norm(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_norm_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_norm"));
    look(self, &launch->tables, (int)launch->power);
    CHECK_INT(launch->tables.chunk_count, (int64_t)expected[(int)launch->power].chunk_count);
    outcome_at(&launch->tables)->norm = launch->power;
    return 0;
}

/* The norm of the outcome is that of an earlier pass of the same step. */
static int run_scale(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_scale_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_scale"));
    look(self, &launch->tables, (int)launch->max_norm);
    if (launch->norm.data && CHECK(fake_cuda_holds(launch->norm.data, sizeof(double))))
        CHECK_NEAR(*(const double *)(uintptr_t)launch->norm.data, launch->max_norm, 0);
    return 0;
}

static int run_clamp(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_clamp_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_clamp"));
    look(self, &launch->tables, (int)launch->limit);
    return 0;
}

static int run_accumulate(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                          const void *args)
{
    const fst_accumulate_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_accumulate"));
    look(self, &launch->tables, (int)launch->factor);
    return 0;
}

static int run_loss_scale(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                          const void *args)
{
    const fst_loss_scale_launch *launch = args;
    CHECK(grid == 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_loss_scale"));
    CHECK(fake_cuda_holds(launch->scale, sizeof(float)));
    *(float *)(uintptr_t)launch->scale *= 2.0f;
    kernels_ran++;
    return 0;
}

/* The samples came before it: the first one's window is as high as the output. */
static int run_image(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_image_batch *launch = args;
    const fst_image_sample *samples = (const fst_image_sample *)(uintptr_t)launch->samples;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK);
    CHECK(!strcmp(self->name, launch->antialias ? "fst_image_smooth" : "fst_image"));
    if (CHECK(fake_cuda_holds(launch->samples, sizeof *samples * (size_t)launch->count)))
        CHECK_INT(samples[launch->count - 1].height, launch->height);
    kernels_ran++;
    return 0;
}

static int run_cross_entropy(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                             const void *args)
{
    const fst_cross_entropy_launch *launch = args;
    CHECK(block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_cross_entropy"));
    CHECK(launch->only_result ? grid == 1 : grid <= launch->rows);
    CHECK(fake_cuda_holds(launch->factors, 2 * sizeof(float)));
    kernels_ran++;
    return 0;
}

static const fake_cuda_kernel test_kernels[] = {
    {"fst_begin", sizeof(fst_begin_launch), run_begin, NULL},
    {"fst_update", sizeof(fst_update_launch), run_update, NULL},
    {"fst_unscale", sizeof(fst_unscale_launch), run_unscale, NULL},
    {"fst_norm", sizeof(fst_norm_launch), run_norm, NULL},
    {"fst_scale", sizeof(fst_scale_launch), run_scale, NULL},
    {"fst_clamp", sizeof(fst_clamp_launch), run_clamp, NULL},
    {"fst_accumulate", sizeof(fst_accumulate_launch), run_accumulate, NULL},
    {"fst_loss_scale", sizeof(fst_loss_scale_launch), run_loss_scale, NULL},
    {"fst_image", sizeof(fst_image_batch), run_image, NULL},
    {"fst_image_smooth", sizeof(fst_image_batch), run_image, NULL},
    {"fst_cross_entropy", sizeof(fst_cross_entropy_launch), run_cross_entropy, NULL},
};

static inline void use_test_kernels(void)
{
    fake_cuda_use(test_kernels, sizeof test_kernels / sizeof test_kernels[0]);
    fst_gpu_kernels_in_memory(fake_fatbin, sizeof fake_fatbin);
}
