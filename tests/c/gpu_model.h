/* gpu_model.h - a list of tensors on the fake device that is stepped again and again, and kernels
 * that look whether the tables they run with are those of their step. */
#ifndef GPU_MODEL_H
#define GPU_MODEL_H

#include "common.h"
#include "core/plan.h"
#include "fake_cuda.h"
#include "gpu/run.h"

enum { MAX_TAGS = 1 << 16, COUNTING = 2 }; /* spans that only count */

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

typedef struct {
    int device;
    size_t tensors;
    fst_plan plan;
    fst_gpu_tables *tables;
    float *memory; /* of the device: parameters, gradients, states one after another */
    int64_t total;
    fst_device_group groups[2];
    fst_device_span *spans;
    fst_layout layout;
    int64_t shift; /* by which the gradients are moved, in elements */
    size_t first_moved;
    int64_t extra; /* elements more in the last tensor */
    int shared;    /* the last tensor is the first one once more: two rounds */
    int strided;
    int tag;
} model;

static expectation expected[MAX_TAGS];
static int last_tag;
static long kernels_ran;

static const unsigned char fake_fatbin[24] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16, 0, 8};

/* Whether the tables are those of the expectation, field by field, and where the device can see
 * them. */
static int same_tables(const fst_device_tables *t, const expectation *e)
{
    const fst_device_operand *ops = (const void *)(uintptr_t)t->operands;
    const fst_device_chunk *chunks = (const void *)(uintptr_t)t->chunks;
    const fst_device_layout *layouts = (const void *)(uintptr_t)t->layouts;
    const size_t span_bytes = e->span_count * sizeof *e->spans;
    int same = t->span_count == e->span_count &&
               fake_cuda_holds(t->operands, e->operand_count * sizeof *ops) &&
               fake_cuda_holds(t->spans, span_bytes) &&
               fake_cuda_holds(t->groups, sizeof e->groups) &&
               fake_cuda_holds(t->chunks, e->chunk_count * sizeof *chunks) &&
               fake_cuda_holds(t->args, e->span_count * FST_DEVICE_ARGS) &&
               fake_cuda_holds(t->partial, e->chunk_count * sizeof(double)) &&
               fake_cuda_holds(t->outcome, sizeof(fst_device_outcome));
    same =
        same && t->chunk_first + t->chunk_count <= e->chunk_count && t->args % FST_DEVICE_ARGS == 0;
    for (size_t i = 0; same && i < e->operand_count; i++) {
        const fst_operand *op = &e->operands[i];
        same = ops[i].data == (uint64_t)(uintptr_t)op->data && ops[i].dtype == (int)op->dtype;
        if (!op->layout) {
            same = same && ops[i].layout == -1;
            continue;
        }
        const fst_device_layout *layout = layouts + ops[i].layout;
        same = same && ops[i].layout >= 0 &&
               fake_cuda_holds((uint64_t)(uintptr_t)layout, sizeof *layout) &&
               layout->ndim == e->layout.ndim;
        for (int d = 0; same && d < e->layout.ndim; d++)
            same =
                layout->shape[d] == e->layout.shape[d] && layout->stride[d] == e->layout.stride[d];
    }
    for (size_t i = 0; same && i < e->chunk_count; i++)
        same = chunks[i].begin == e->chunks[i].begin && chunks[i].span == e->chunks[i].span &&
               chunks[i].count == e->chunks[i].count;
    return same && !memcmp((const void *)(uintptr_t)t->spans, e->spans, span_bytes) &&
           !memcmp((const void *)(uintptr_t)t->groups, e->groups, sizeof e->groups);
}

static expectation *look(const fst_device_tables *t, int tag)
{
    expectation *e = &expected[tag];
    kernels_ran++;
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
    const expectation *e = look(&launch->tables, tag);
    char *folded = (void *)(uintptr_t)launch->tables.args;
    double *partial = (void *)(uintptr_t)launch->tables.partial;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_begin"));
    CHECK_INT(outcome_at(&launch->tables)->ticket, 0);
    outcome_at(&launch->tables)->norm = tag;
    for (size_t i = 0; i < e->span_count; i++)
        memset(folded + i * FST_DEVICE_ARGS, tag, FST_DEVICE_ARGS);
    for (size_t i = 0; i < e->chunk_count; i++)
        partial[i] = tag;
    return 0;
}

static int run_update(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_update_launch *launch = args;
    const int tag = launch->write_grad;
    const expectation *e = look(&launch->tables, tag);
    const unsigned char *folded = (void *)(uintptr_t)launch->tables.args;
    const double *partial = (void *)(uintptr_t)launch->tables.partial;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_update"));
    CHECK_NEAR(outcome_at(&launch->tables)->norm, tag, 0);
    for (size_t i = 0; i < e->span_count; i++)
        CHECK_INT(folded[i * FST_DEVICE_ARGS], (unsigned char)tag);
    for (size_t i = 0; i < e->chunk_count; i++)
        CHECK_NEAR(partial[i], tag, 0);
    return 0;
}

static int run_unscale(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                       const void *args)
{
    const fst_unscale_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_unscale"));
    look(&launch->tables, (int)launch->factor);
    outcome_at(&launch->tables)->norm = launch->factor;
    return 0;
}

static int run_norm(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_norm_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_norm"));
    look(&launch->tables, (int)launch->power);
    CHECK_INT(launch->tables.chunk_count, (int64_t)expected[(int)launch->power].chunk_count);
    outcome_at(&launch->tables)->norm = launch->power;
    return 0;
}

/* The norm of the outcome is that of an earlier pass of the same step. */
static int run_scale(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_scale_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_scale"));
    look(&launch->tables, (int)launch->max_norm);
    if (launch->norm.data && CHECK(fake_cuda_holds(launch->norm.data, sizeof(double))))
        CHECK_NEAR(*(const double *)(uintptr_t)launch->norm.data, launch->max_norm, 0);
    return 0;
}

static int run_clamp(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    const fst_clamp_launch *launch = args;
    CHECK(grid >= 1 && block == FST_DEVICE_BLOCK && !strcmp(self->name, "fst_clamp"));
    look(&launch->tables, (int)launch->limit);
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

static const fake_cuda_kernel test_kernels[] = {
    {"fst_begin", sizeof(fst_begin_launch), run_begin, NULL},
    {"fst_update", sizeof(fst_update_launch), run_update, NULL},
    {"fst_unscale", sizeof(fst_unscale_launch), run_unscale, NULL},
    {"fst_norm", sizeof(fst_norm_launch), run_norm, NULL},
    {"fst_scale", sizeof(fst_scale_launch), run_scale, NULL},
    {"fst_clamp", sizeof(fst_clamp_launch), run_clamp, NULL},
    {"fst_loss_scale", sizeof(fst_loss_scale_launch), run_loss_scale, NULL},
};

static inline void use_test_kernels(void)
{
    fake_cuda_use(test_kernels, sizeof test_kernels / sizeof test_kernels[0]);
    fst_gpu_kernels_in_memory(fake_fatbin, sizeof fake_fatbin);
}

static inline int64_t model_count(const model *m, size_t tensor)
{
    return (tensor == 1 ? 40000 : 1 + (int64_t)(tensor % 5) * 7) +
           (tensor + 1 == m->tensors ? m->extra : 0);
}

/* Tensors without tables yet, on a device. */
static inline model *model_new(int device, size_t tensors)
{
    model *m = must_alloc(sizeof *m);
    *m = (model){.device = device, .tensors = tensors};
    for (size_t i = 0; i < tensors; i++)
        m->total += model_count(m, i) + 16;
    m->total += 100000; /* for `extra` */
    m->memory = fake_cuda_malloc(device, (size_t)m->total * 3 * sizeof *m->memory);
    fst_plan_init(&m->plan, FST_OP_COUNT);
    m->spans = must_alloc((tensors + COUNTING) * sizeof *m->spans);
    memset(m->spans, 0, (tensors + COUNTING) * sizeof *m->spans);
    for (size_t i = 0; i < tensors + COUNTING; i++)
        m->spans[i] = (fst_device_span){.value = (double)i, .group = (uint32_t)(i % 2)};
    for (size_t g = 0; g < 2; g++)
        for (size_t h = 0; h < FST_DEVICE_HYPER; h++)
            m->groups[g].hyper[h] = random_unit();
    return m;
}

static inline void model_free(model *m)
{
    fst_gpu_tables_free(m->tables);
    fst_plan_free(&m->plan);
    fake_cuda_free(m->memory);
    free(m->spans);
    free(m);
}

static inline void model_plan(model *m, fst_status *status)
{
    float *at = m->memory;
    fst_plan_begin(&m->plan);
    m->layout = (fst_layout){2, {1, 1}, {5, 3}};
    for (size_t i = 0; i < m->tensors; i++) {
        const int64_t count = model_count(m, i);
        fst_operand *op = fst_plan_add(&m->plan, count, 0, status);
        float *param = m->shared && i + 1 == m->tensors ? m->memory : at;
        op[FST_OP_PARAM] = (fst_operand){param, NULL, FST_F32};
        op[FST_OP_GRAD] = (fst_operand){at + m->total, NULL, FST_BF16};
        if (i >= m->first_moved)
            op[FST_OP_GRAD].data = at + m->total + m->shift;
        op[FST_OP_STATE] = (fst_operand){at + 2 * m->total, NULL, FST_F32};
        if (m->strided && count == 1)
            op[FST_OP_STATE].layout = &m->layout;
        at += count + 16;
    }
    CHECK_INT(fst_plan_seal(&m->plan, FST_OP_PARAM, 1, status), FST_OK);
}

static inline void *copied(const void *from, size_t size)
{
    return size ? must_copy(from, size) : NULL;
}

static inline void expect(model *m, const fst_work *work)
{
    expectation *e = &expected[m->tag = ++last_tag];
    e->operand_count = work->span_count * work->width;
    e->span_count = m->tensors + COUNTING;
    e->chunk_count = work->chunk_count;
    e->operands = copied(work->operands, e->operand_count * sizeof *e->operands);
    e->spans = copied(m->spans, e->span_count * sizeof *e->spans);
    e->chunks = copied(work->chunks, e->chunk_count * sizeof *e->chunks);
    e->layout = m->layout;
    memcpy(e->groups, m->groups, sizeof e->groups);
}

/* Describes the tensors as they are now. */
static inline fst_code model_set(model *m, void *stream, fst_status *status)
{
    if (!m->tables && !(m->tables = fst_gpu_tables_new(m->device, status)))
        return status->code;
    model_plan(m, status);
    const fst_work work = fst_plan_work(&m->plan);
    const fst_gpu_rules rules = {m->spans, m->groups, m->tensors + COUNTING, 2};
    expect(m, &work);
    return fst_gpu_tables_set(m->tables, &work, &rules, stream, status);
}

static inline fst_code model_begin(model *m, fst_status *status)
{
    const fst_begin_launch begin = {.max_norm = m->tag, .measure = 1};
    return fst_gpu_begin(m->tables, &begin, status);
}

static inline fst_code model_update(model *m, fst_status *status)
{
    const fst_update_launch update = {.write_grad = m->tag};
    return fst_gpu_update(m->tables, &update, status);
}

static inline fst_code model_step(model *m, void *stream, fst_status *status)
{
    if (model_set(m, stream, status) || model_begin(m, status) || model_update(m, status))
        return status->code;
    expected[m->tag].launched = 1 + (int)m->plan.round_count;
    return FST_OK;
}

/* Runs what is queued; every launch ran, and nobody complained. Forgets the expectations. */
static inline void models_finish(void)
{
    fake_cuda_synchronize();
    for (int tag = 1; tag <= last_tag; tag++) {
        expectation *e = &expected[tag];
        if (e->launched)
            CHECK_INT(e->ran, e->launched);
        free(e->operands);
        free(e->spans);
        free(e->chunks);
        *e = (expectation){0};
    }
    last_tag = 0;
    const char *complaint = fake_cuda_complaint();
    if (!CHECK(!complaint))
        fprintf(stderr, "    %s\n", complaint);
    CHECK_INT(fake_cuda_depth(), 0);
    CHECK_INT(fake_cuda_mode(), 0);
}

/* Nothing is left on the devices. */
static inline void nothing_lives(void)
{
    const fake_cuda_living living = fake_cuda_alive();
    CHECK_INT((int64_t)living.memory, 0);
    CHECK_INT((int64_t)living.pinned, 0);
    CHECK_INT((int64_t)living.events, 0);
}

#endif
