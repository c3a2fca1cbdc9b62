/* Several threads use devices for the first time at the same moment, and step with tables of their
 * own; meanwhile tensors come and go. Runs under ThreadSanitizer. */
#include <pthread.h>

#include "common.h"
#include "core/plan.h"
#include "gpu_empty.h"
#include "gpu/launch.h"

enum { THREADS = 6, STEPS = 300, MANY = 12 };

typedef struct {
    pthread_barrier_t *start;
    int device, tensors;
    fst_status status;
} worker;

/* Every second step finds its gradients elsewhere. */
static void *run_worker(void *argument)
{
    static float memory[4096];
    worker *mine = argument;
    const fst_device_span span = {.value = 1.0};
    const fst_device_group group = {.hyper = {0.1}};
    const fst_gpu_rules rules = {
        .spans = &span, .groups = &group, .span_count = 1, .group_count = 1};
    const fst_begin_launch begin = {.measure = 1};
    const fst_update_launch update = {0};
    fst_plan plan;
    fst_plan_init(&plan, FST_OP_COUNT);
    pthread_barrier_wait(mine->start);
    fst_gpu_tables *tables = fst_gpu_tables_new(mine->device, &mine->status);
    for (int i = 0; tables && !mine->status.code && i < STEPS; i++) {
        void *tensor = fake_cuda_malloc(mine->device, 64);
        fst_plan_begin(&plan);
        for (int k = 0; k < mine->tensors; k++) {
            fst_operand *op = fst_plan_add(&plan, 100, 0, &mine->status);
            op[FST_OP_PARAM] = (fst_operand){.data = memory + 100 * k, .dtype = FST_F32};
            op[FST_OP_GRAD] = (fst_operand){.data = memory + 2000 + i / 2 % 2, .dtype = FST_F32};
        }
        fst_plan_seal(&plan, FST_OP_PARAM, 1, &mine->status);
        const fst_work work = fst_plan_work(&plan);
        if (!fst_gpu_tables_set(tables, &work, &rules, NULL, &mine->status))
            fst_gpu_step(tables, &begin, &update, &mine->status);
        fake_cuda_free(tensor);
    }
    fst_gpu_tables_free(tables);
    fst_plan_free(&plan);
    return NULL;
}

int main(void)
{
    pthread_barrier_t start;
    pthread_t threads[THREADS];
    worker workers[THREADS] = {0};
    fake_cuda_use(kernels, sizeof kernels / sizeof kernels[0]);
    fst_gpu_kernels_in_memory(fatbin, sizeof fatbin);
    fake_cuda_lag(5);
    CHECK_INT(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.start = &start, .device = i % 2, .tensors = i % 3 ? MANY : 1};
        CHECK_INT(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        if (!CHECK(workers[i].status.code == FST_OK))
            fprintf(stderr, "    %s\n", workers[i].status.message);
    }
    pthread_barrier_destroy(&start);
    CHECK_INT((int64_t)fst_gpu_counted().launches, 2 * THREADS * STEPS);
    /* what is short goes with the launches, but the first time */
    CHECK_INT((int64_t)fst_gpu_counted().uploads, THREADS / 3 * (1 + 2 * STEPS / 2));
    CHECK_INT(fake_cuda_calls("cuLaunchKernel"), 2 * THREADS * STEPS);
    CHECK_INT(fake_cuda_calls("cuInit"), 1);
    CHECK_INT(fake_cuda_calls("cuModuleLoadData"), 2);
    CHECK(!fake_cuda_complaint());
    CHECK_INT((int64_t)fake_cuda_alive().memory, 0);
    return check_report();
}
