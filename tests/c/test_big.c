/* Indices and offsets beyond 2^31 elements and 2^32 bytes: memory is reserved but not backed, and
 * only the places that are worked on are touched. Every place has a twin in ordinary memory. */
#include <sys/mman.h>

#include "core/passes.h"
#include "reference.h"

enum { SMALL = 40000 }; /* elements at the far end that are worked on */

static const int64_t far_away = (INT64_C(1) << 31) + 12345; /* in elements */

static void *reserve(size_t size)
{
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (at == MAP_FAILED) {
        fprintf(stderr, "cannot reserve %zu bytes of address space: left out\n", size);
        return NULL;
    }
    return at;
}

typedef struct {
    fst_operand far[FST_OP_COUNT], near[FST_OP_COUNT];
    array *twin[FST_OP_COUNT];
    size_t sizes[FST_OP_COUNT];
} twins;

/* Operands whose elements from `far_away` on equal those of their twins from 0 on. */
static int twins_make(twins *t, const fst_dtype *dtypes, const fst_layout *layout)
{
    const fst_operand absent = {.data = NULL};
    memset(t, 0, sizeof *t);
    for (size_t k = 0; k < FST_OP_COUNT; k++) {
        t->far[k] = t->near[k] = absent;
        if (k == FST_OP_MASTER)
            continue;
        t->sizes[k] = 2 * (size_t)(far_away + SMALL) * fst_dtype_size(dtypes[k]);
        t->far[k] =
            (fst_operand){.data = reserve(t->sizes[k]), .layout = layout, .dtype = dtypes[k]};
        if (!t->far[k].data)
            return 0;
        t->twin[k] = array_new(dtypes[k], FLAT, SMALL);
        array_fill(t->twin[k], random_positive);
        t->near[k] = t->twin[k]->op;
        for (int64_t i = 0; i < SMALL; i++)
            set(&t->far[k], far_away + i, get(&t->near[k], i));
    }
    return 1;
}

static void twins_free(twins *t)
{
    for (size_t k = 0; k < FST_OP_COUNT; k++) {
        if (t->far[k].data)
            munmap(t->far[k].data, t->sizes[k]);
        array_free(t->twin[k]);
    }
}

static void twins_are_equal(const twins *t)
{
    for (size_t k = 0; k < FST_OP_COUNT; k++) {
        int64_t wrong = 0;
        for (int64_t i = 0; t->twin[k] && i < SMALL; i++)
            wrong += !same_double(get(&t->far[k], far_away + i), get(&t->near[k], i));
        CHECK_INT(wrong, 0);
    }
}

/* Every kernel at a begin beyond 2^31. */
static void kernels_reach_far(const fst_cpu_kernels *kernels, twins *t, const update_case *c)
{
    const fst_update_args args = args_of(c);
    fst_operand *far = t->far, *near = t->near;
    fst_operand *gradient = &far[FST_OP_GRAD], *other = &near[FST_OP_GRAD];
    int found = 0, also = 0;
    for (int write_grad = 0; write_grad < 2; write_grad++) {
        kernels->update(far, far_away, SMALL, &args, c->inv_scale, write_grad);
        kernels->update(near, 0, SMALL, &args, c->inv_scale, write_grad);
        twins_are_equal(t);
    }
    for (int norm = FST_NORM_SQUARES; norm <= FST_NORM_POWER; norm++)
        CHECK(same_double(kernels->reduce(gradient, far_away, SMALL, (fst_norm_kind)norm, 3.0, 0.5),
                          kernels->reduce(other, 0, SMALL, (fst_norm_kind)norm, 3.0, 0.5)));
    CHECK(same_double(kernels->unscale(gradient, far_away, SMALL, 1.5, &found),
                      kernels->unscale(other, 0, SMALL, 1.5, &also)));
    CHECK_INT(found, also);
    kernels->scale(gradient, far_away, SMALL, 0.3);
    kernels->scale(other, 0, SMALL, 0.3);
    kernels->clamp(gradient, far_away, SMALL, 0.2);
    kernels->clamp(other, 0, SMALL, 0.2);
    twins_are_equal(t);
    set(gradient, far_away + SMALL - 1, 1.0);
    set(other, SMALL - 1, 1.0);
    CHECK(!kernels->nonfinite(gradient, far_away + SMALL - 1, 1));
    set(gradient, far_away + SMALL - 1, INFINITY);
    CHECK(kernels->nonfinite(gradient, far_away, SMALL));
    set(gradient, far_away + SMALL - 1, 1.0);
}

/* The same through a chunk list that names the far end only. */
static void passes_reach_far(const fst_cpu_kernels *kernels, twins *t, const update_case *c)
{
    fst_span far_span = {.count = far_away + SMALL}, near_span = {.count = SMALL};
    uint32_t rounds[] = {0, 3};
    fst_chunk far_chunks[4], near_chunks[4];
    const fst_update_args args = args_of(c);
    double far_sum[3], near_sum[3], norm;
    fst_status status = {0};
    for (size_t i = 0; i < 4; i++) {
        near_chunks[i] = (fst_chunk){(int64_t)i * FST_CHUNK, i * (FST_CHUNK + FST_CHUNK_COST), 0,
                                     i == 2 ? SMALL - 2 * FST_CHUNK : FST_CHUNK};
        far_chunks[i] = near_chunks[i];
        far_chunks[i].begin += far_away;
    }
    fst_plan far = {.spans = &far_span, .chunks = far_chunks, .operands = t->far};
    far.rounds = rounds;
    far.partial = far_sum;
    far.span_count = far.round_count = 1;
    far.chunk_count = 3;
    far.width = FST_OP_COUNT;
    fst_plan near = far;
    near.spans = &near_span;
    near.chunks = near_chunks;
    near.operands = t->near;
    near.partial = near_sum;
    fst_cpu = kernels;
    CHECK_INT(fst_update(&far, &args, c->inv_scale, 1, &status), FST_OK);
    CHECK_INT(fst_update(&near, &args, c->inv_scale, 1, &status), FST_OK);
    CHECK_INT(fst_total_norm(&far, FST_OP_PARAM, 1.0, &norm, &status), FST_OK);
    CHECK_INT(fst_total_norm(&near, FST_OP_PARAM, 1.0, &norm, &status), FST_OK);
    for (size_t i = 0; i < 3; i++)
        CHECK(same_double(far_sum[i], near_sum[i]));
    twins_are_equal(t);
}

int main(void)
{
    static const fst_dtype dtypes[][FST_OP_COUNT] = {
        {FST_F32, FST_F32, FST_F32, FST_F32, FST_F32, FST_F32},
        {FST_BF16, FST_BF16, FST_F32, FST_BF16, FST_BF16, FST_BF16},
        {FST_F64, FST_F16, FST_F32, FST_F64, FST_F32, FST_BF16},
    };
    /* a second row beyond 2^31, and every other element: offsets beyond 2^32 */
    const fst_layout rows = {2, {2, far_away}, {far_away + 77, 1}, 0};
    const fst_layout apart = {1, {far_away + SMALL}, {2}, 0};
    const fst_layout *layouts[] = {NULL, &rows, &apart};
    const fst_cpu_kernels *levels[MAX_LEVELS];
    const size_t count = supported_levels(levels);
    update_case c = {.rule = FST_RULE_amsgrad, .step = 2.0, .inv_scale = 0.25, .clip = 0.5};
    memcpy(c.hyper, (double[]){0.01, 0.9, 0.99, 1e-8, 0.1, 1.0}, 6 * sizeof(double));
    c.sign = 1.0;
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        for (size_t layout = 0; layout < sizeof layouts / sizeof layouts[0]; layout++) {
            twins t;
            c.wide = dtypes[i][0] == FST_F64;
            if (twins_make(&t, dtypes[i], layouts[layout]))
                for (size_t level = 0; level < count; level++) {
                    kernels_reach_far(levels[level], &t, &c);
                    passes_reach_far(levels[level], &t, &c);
                }
            twins_free(&t);
        }
    CHECK_INT(
        offset_of(&(fst_operand){.data = NULL, .layout = &rows, .dtype = FST_F32}, far_away + 3),
        far_away + 80);
    CHECK_INT(offset_of(&(fst_operand){.data = NULL, .layout = &apart, .dtype = FST_F32}, far_away),
              2 * far_away);
    return check_report();
}
