/* gpu_model.h - a list of tensors on the fake device that is stepped again and again. */
#pragma once

#include "core/plan.h"
#include "gpu_expect.h"

enum { COUNTING = 2 }; /* spans that only count */

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
    uint64_t bound, moved; /* as in the rules */
} model;

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
    m->layout = (fst_layout){2, {1, 1}, {5, 3}, 1};
    for (size_t i = 0; i < m->tensors; i++) {
        const int64_t count = model_count(m, i);
        fst_operand *op = fst_plan_add(&m->plan, count, 0, status);
        float *param = m->shared && i + 1 == m->tensors ? m->memory : at;
        op[FST_OP_PARAM] = (fst_operand){.data = param, .dtype = FST_F32};
        op[FST_OP_GRAD] = (fst_operand){.data = at + m->total, .dtype = FST_BF16};
        if (i >= m->first_moved)
            op[FST_OP_GRAD].data = at + m->total + m->shift;
        op[FST_OP_STATE] = (fst_operand){.data = at + 2 * m->total, .dtype = FST_F32};
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
    const fst_gpu_rules rules = {.spans = m->spans,
                                 .groups = m->groups,
                                 .span_count = m->tensors + COUNTING,
                                 .group_count = 2,
                                 .bound = m->bound,
                                 .moved = m->moved};
    expect(m, &work);
    return fst_gpu_tables_set(m->tables, &work, &rules, stream, status);
}

static inline fst_code model_begin(model *m, fst_status *status)
{
    const fst_begin_launch begin = {.max_norm = m->tag, .measure = 1};
    return fst_gpu_step(m->tables, &begin, NULL, status);
}

static inline fst_code model_launch(model *m, fst_status *status)
{
    const fst_begin_launch begin = {.max_norm = m->tag, .measure = 1};
    const fst_update_launch update = {.write_grad = m->tag};
    return fst_gpu_step(m->tables, &begin, &update, status);
}

static inline fst_code model_step(model *m, void *stream, fst_status *status)
{
    if (model_set(m, stream, status) || model_launch(m, status))
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
