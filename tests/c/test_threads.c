/* Passes on several threads: the same bits for every number of them, one parallel region per pass
 * and round, the calling thread alone after fork(), and two plans at once. Runs under
 * ThreadSanitizer. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"
#include "core/image_pass.h"
#include "core/passes.h"
#include "core/rule_args.h"
#include "cpu/parallel.h"

enum { TENSORS = 40, SHARED = 3 }; /* the last tensors share their memory with the first */

static int *fake_threads, *fake_fails, *fake_late;
static long *fake_calls;

/* What all passes leave behind: numbers, and the memory of every operand. */
typedef struct {
    fst_code code;
    fst_measurement seen, unscaled;
    double norms[5];
    array *tensors[TENSORS][FST_OP_COUNT];
} outcome;

static const fst_dtype dtypes[] = {FST_F32, FST_BF16, FST_F64, FST_F16};

static void outcome_start(array *tensors[TENSORS][FST_OP_COUNT])
{
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t k = 0; k < FST_OP_COUNT; k++) {
            const int there = k != FST_OP_MASTER;
            const int64_t count = i == 0       ? 300000
                                  : i % 8 == 0 ? 60000 + (int64_t)i
                                               : 1 + (int64_t)(i * 131);
            tensors[i][k] =
                there ? array_new(dtypes[i % 4], i % 5 ? FLAT : TRANSPOSED, count) : NULL;
            if (there)
                array_fill(tensors[i][k], k > FST_OP_STATE ? random_positive : random_unit);
        }
}

static void outcome_free(outcome *o)
{
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t k = 0; k < FST_OP_COUNT; k++)
            array_free(o->tensors[i][k]);
    free(o);
}

/* Runs every pass once over a copy of the tensors. Twice-listed tensors need a second round. Checks
 * nothing: it runs in threads, and checks are counted by the main one. */
static outcome *run_passes(array *const tensors[TENSORS][FST_OP_COUNT], int shared)
{
    static const double orders[5] = {2.0, 1.0, INFINITY, 0.0, 3.0};
    outcome *o = must_alloc(sizeof *o);
    fst_update_args args[2];
    fst_status status = {0};
    fst_code code = FST_OK;
    fst_plan plan;
    memset(o, 0, sizeof *o);
    fst_plan_init(&plan, FST_OP_COUNT);
    fst_plan_begin(&plan);
    for (int wide = 0; wide < 2; wide++) {
        const double hyper[FST_MAX_HYPER] = {0.01, 0.9, 0.99, 1e-8, 0.1, 1.0};
        args[wide] = (fst_update_args){
            .rule = FST_RULE_amsgrad, .wide = wide, .sign = 1.0, .clip_coefficient = 0.5};
        fst_rule_fill_args(&args[wide], hyper, 2.0);
    }
    for (size_t i = 0; i < TENSORS; i++) {
        const uint32_t wide = dtypes[i % 4] == FST_F64;
        fst_operand *op = fst_plan_add(&plan, tensors[i][0]->count, wide, &status);
        for (size_t k = 0; k < FST_OP_COUNT; k++)
            if (tensors[i][k]) {
                o->tensors[i][k] = array_clone(tensors[i][k]);
                op[k] = o->tensors[i][k]->op;
            }
    }
    for (size_t i = 0; shared && i < SHARED; i++) {
        const uint32_t wide = dtypes[i % 4] == FST_F64;
        fst_operand *op = fst_plan_add(&plan, tensors[i][0]->count, wide, &status);
        memcpy(op, plan.operands + i * FST_OP_COUNT, FST_OP_COUNT * sizeof *op);
    }
    code |= fst_plan_seal(&plan, FST_OP_PARAM, 2, &status);
    code |= fst_measure(&plan, FST_OP_GRAD, 0.5, &o->seen, &status);
    for (size_t k = 0; k < 5; k++)
        code |= fst_total_norm(&plan, FST_OP_PARAM, orders[k], &o->norms[k], &status);
    code |= fst_unscale(&plan, FST_OP_GRAD, 0.5, &o->unscaled, &status);
    code |= fst_scale(&plan, FST_OP_GRAD, 3.0, &status);
    code |= fst_clamp(&plan, FST_OP_GRAD, 0.7, &status);
    code |= fst_update(&plan, args, 0.25, 1, &status);
    o->code = code;
    fst_plan_free(&plan);
    return o;
}

static int same_outcome(const outcome *a, const outcome *b)
{
    int same = a->code == FST_OK && b->code == FST_OK &&
               same_double(a->seen.square_sum, b->seen.square_sum) &&
               same_double(a->unscaled.square_sum, b->unscaled.square_sum) &&
               a->seen.nonfinite == b->seen.nonfinite &&
               a->unscaled.nonfinite == b->unscaled.nonfinite;
    for (size_t k = 0; k < 5; k++)
        same = same && same_double(a->norms[k], b->norms[k]);
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t k = 0; k < FST_OP_COUNT; k++)
            same = same && (!a->tensors[i][k] || same_memory(a->tensors[i][k], b->tensors[i][k]));
    return same;
}

static int library_opens(void)
{
    CHECK_INT(fst_parallel_init(NULL), 0);
    CHECK_INT(fst_parallel_init(FAKE_TORCH), 0); /* not loaded yet: must not be loaded by this */
    CHECK_INT(fst_parallel_init("/no/such/library.so"), 0);
    CHECK(!strcmp(fst_parallel_name(), "calling thread"));
    void *library = dlopen(FAKE_TORCH, RTLD_NOW);
    if (!CHECK(library != NULL)) {
        fprintf(stderr, "%s\n", dlerror());
        return 0;
    }
    fake_threads = dlsym(library, "fake_torch_threads");
    fake_fails = dlsym(library, "fake_torch_fails");
    fake_late = dlsym(library, "fake_torch_late");
    fake_calls = dlsym(library, "fake_torch_calls");
    return CHECK(fake_threads && fake_fails && fake_late && fake_calls);
}

/* In a child the pool has no threads: its work must not go there. */
static void forked_child_works_alone(array *const tensors[TENSORS][FST_OP_COUNT],
                                     const outcome *want)
{
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        const long calls = *fake_calls;
        const outcome *got = run_passes(tensors, 1);
        _exit(same_outcome(got, want) && *fake_calls == calls &&
                      !strcmp(fst_parallel_name(), "calling thread")
                  ? 0
                  : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 0);
    CHECK(!strcmp(fst_parallel_name(), "torch_parallel_for"));
}

/* No chunk is worked on twice or left out: where parts end where a chunk ends, where threads take
 * from each other's parts, and where one finds that the others have done all of its own. */
static void every_chunk_once(size_t chunks)
{
    const size_t count = chunks * FST_CHUNK;
    float *data = calloc(count, sizeof *data);
    fst_status status = {0};
    fst_plan plan;
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    *fst_plan_add(&plan, (int64_t)count, 0, &status) =
        (fst_operand){.data = data, .dtype = FST_F32};
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    for (int way = 0; way < 12; way++) {
        size_t wrong = 0;
        *fake_threads = 1 + way % 6;
        *fake_late = way >= 6;
        for (size_t i = 0; i < count; i += FST_CHUNK - 1) /* one of each chunk at least */
            data[i] = 1.0f;
        CHECK_INT(fst_scale(&plan, 0, 3.0, &status), FST_OK);
        for (size_t i = 0; i < count; i += FST_CHUNK - 1)
            wrong += data[i] != 3.0f;
        CHECK_INT((int64_t)wrong, 0);
    }
    *fake_late = 0;
    fst_plan_free(&plan);
    free(data);
}

/* Samples that are mixed read each other's sources, and each row is written by one thread. */
static void images_are_the_same_for_any_number(void)
{
    enum { SIDE = 90, IN = SIDE * SIDE, COUNT = 6, OUT = 3 * IN };
    static uint8_t source[COUNT * 3 * IN];
    static float out[2][COUNT * OUT];
    fst_image_sample samples[COUNT];
    fst_status status = {0};
    fst_image_batch batch = {
        .source = (uint64_t)(uintptr_t)source,
        .samples = (uint64_t)(uintptr_t)samples,
        .source_stride = {3 * IN, IN, SIDE, 1},
        .out_stride = {OUT, 1, 3 * SIDE, 3},
        .count = COUNT,
        .channels = 3,
        .source_count = COUNT,
        .source_height = SIDE,
        .source_width = SIDE,
        .height = SIDE,
        .width = SIDE,
        .scale = {1.0f, 2.0f, 3.0f},
    };
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (uint8_t)random_bits();
    for (int32_t i = 0; i < COUNT; i++)
        samples[i] = (fst_image_sample){.height = 40 + i,
                                        .width = 50,
                                        .grid_height = SIDE,
                                        .grid_width = SIDE,
                                        .flip = i % 2,
                                        .partner = (i + 1) % COUNT,
                                        .source = COUNT - 1 - i,
                                        .own = 0.75f,
                                        .other = 0.25f};
    fst_cpu = fst_cpu_select(NULL);
    for (*fake_threads = 1; *fake_threads <= 5; *fake_threads += 2) {
        const int first = *fake_threads == 1;
        batch.out = (uint64_t)(uintptr_t)out[!first];
        CHECK_INT(fst_image_transform(&batch, &status), FST_OK);
        CHECK(first || !memcmp(out[0], out[1], sizeof out[0]));
    }
    *fake_fails = 1;
    CHECK_INT(fst_image_transform(&batch, &status), FST_UNSUPPORTED);
    *fake_fails = 0;
}

typedef struct {
    array *(*tensors)[FST_OP_COUNT];
    outcome *got;
} errand;

static void *run_errand(void *argument)
{
    errand *mine = argument;
    mine->got = run_passes(mine->tensors, 0);
    return NULL;
}

/* Two optimizers that step at the same time, each in a thread of its own. */
static void two_plans_at_once(array *tensors[TENSORS][FST_OP_COUNT], const outcome *want)
{
    errand errands[2] = {{tensors, NULL}, {tensors, NULL}};
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++)
        CHECK_INT(pthread_create(&threads[i], NULL, run_errand, &errands[i]), 0);
    for (size_t i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        CHECK(same_outcome(errands[i].got, want));
        outcome_free(errands[i].got);
    }
}

/* All threads report an infinite value at once; then the library refuses. */
static void findings_and_failures_are_reported(void)
{
    array *a = array_new(FST_F32, FLAT, 600000);
    fst_measurement seen = {0.0, 0};
    fst_status status = {0};
    fst_plan plan;
    for (int64_t i = 0; i < a->count; i++)
        set(&a->op, i, INFINITY);
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    *fst_plan_add(&plan, a->count, 0, &status) = a->op;
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_OK);
    CHECK_INT(fst_unscale(&plan, 0, 0.5, &seen, &status), FST_OK);
    CHECK_INT(seen.nonfinite, 1);
    *fake_fails = 1;
    CHECK_INT(fst_scale(&plan, 0, 2.0, &status), FST_UNSUPPORTED);
    CHECK_CONTAINS(status.message, "torch_parallel_for");
    *fake_fails = 0;
    fst_plan_free(&plan);
    array_free(a);
}

int main(void)
{
    static const int threads[] = {1, 2, 3, 4, 7};
    array *tensors[TENSORS][FST_OP_COUNT];
    fst_cpu = fst_cpu_select(NULL);
    outcome_start(tensors);
    outcome *alone = run_passes(tensors, 0), *rounds = run_passes(tensors, 1);
    if (library_opens()) {
        CHECK_INT(fst_parallel_init(FAKE_TORCH), 1);
        CHECK(!strcmp(fst_parallel_name(), "torch_parallel_for"));
        for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++)
            for (int shared = 0; shared < 2; shared++) {
                const long calls = *fake_calls;
                *fake_threads = threads[i];
                outcome *got = run_passes(tensors, shared);
                CHECK(same_outcome(got, shared ? rounds : alone));
                CHECK_INT(*fake_calls - calls, 10 * (1 + shared)); /* ten passes */
                outcome_free(got);
            }
        every_chunk_once(8);
        every_chunk_once(64);
        every_chunk_once(301);
        images_are_the_same_for_any_number();
        *fake_threads = 4;
        two_plans_at_once(tensors, alone);
        findings_and_failures_are_reported();
        forked_child_works_alone(tensors, rounds);
    }
    outcome_free(alone);
    outcome_free(rounds);
    for (size_t i = 0; i < TENSORS; i++)
        for (size_t k = 0; k < FST_OP_COUNT; k++)
            array_free(tensors[i][k]);
    return check_report();
}
