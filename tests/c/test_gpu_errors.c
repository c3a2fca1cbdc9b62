/* Every call of the driver fails once, one after another: each time the error says which call, on
 * which device and why, nothing is lost, and the same step then works. */
#include "gpu_child.h"
#include "gpu_model.h"

enum { OUT_OF_MEMORY = 2 };

static long failed_steps;
static long calls_of_steps; /* of the call that is to fail: later ones only tidy up */

/* Calls whose error cannot be of any use to the caller. */
static int is_ignored(const char *call)
{
    return !strcmp(call, "cuMemFree_v2") || !strcmp(call, "cuMemFreeHost") ||
           !strcmp(call, "cuEventDestroy_v2") || !strcmp(call, "cuEventSynchronize") ||
           !strncmp(call, "cuGetError", 10);
}

static void check_message(const fst_status *status, const char *call)
{
    failed_steps++;
    CHECK_INT(status->code, FST_NO_MEMORY);
    CHECK_CONTAINS(status->message, call);
    CHECK_CONTAINS(status->message, "CUDA out of memory. ");
    CHECK_CONTAINS(status->message, "CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
    if (strcmp(call, "cuInit"))
        CHECK_CONTAINS(status->message, "on CUDA device ");
    if (!strcmp(call, "cuLaunchKernel") || !strncmp(call, "cuModuleGet", 11) ||
        !strncmp(call, "cuOccupancy", 11))
        CHECK_CONTAINS(status->message, " of fst_");
}

/* Does a part of the work until it succeeds: at once, or the second time where a call fails. */
#define TRY_TWICE(call, expression)          \
    do {                                     \
        fst_status status = {0};             \
        if (expression) {                    \
            check_message(&status, call);    \
            status = (fst_status){0};        \
            CHECK_INT((expression), FST_OK); \
        }                                    \
    } while (0)

/* Steps on two streams and two devices, late and with uploads; a capture; explicit passes. */
static void work(const char *call)
{
    model *models[2] = {model_new(0, 8), model_new(1, 8)};
    void *stream = fake_cuda_stream(0), *graph;
    fake_cuda_lag(4);
    for (int i = 0; i < 12; i++) {
        model *m = models[i % 3 == 2];
        m->shift = i;
        m->extra = i == 6 ? 50000 : 0;
        TRY_TWICE(call, model_step(m, m == models[0] && i % 2 ? stream : NULL, &status));
    }
    fake_cuda_begin_capture(stream);
    TRY_TWICE(call, model_step(models[0], stream, &status));
    expected[models[0]->tag].launched = 0; /* a graph that saw an error is never replayed */
    graph = fake_cuda_end_capture(stream);
    fake_cuda_free_graph(graph);
    TRY_TWICE(call, model_set(models[1], NULL, &status));
    const fst_norm_launch norm = {.power = models[1]->tag};
    TRY_TWICE(call, fst_gpu_norm(models[1]->tables, &norm, &status));
    float *scale = fake_cuda_malloc(1, sizeof *scale);
    fst_image_sample *place = fake_cuda_malloc(1, sizeof *place);
    const fst_loss_scale_launch loss_scale = {.scale = (uint64_t)(uintptr_t)scale};
    TRY_TWICE(call, fst_gpu_loss_scale(1, &loss_scale, NULL, &status));
    float *factors = fake_cuda_malloc(1, 2 * sizeof *factors);
    const fst_cross_entropy_launch loss = {.factors = (uint64_t)(uintptr_t)factors, .rows = 3};
    TRY_TWICE(call, fst_gpu_cross_entropy(1, &loss, NULL, &status));
    const fst_image_sample sample = {.height = 4};
    const fst_image_batch batch = {
        .samples = (uint64_t)(uintptr_t)place, .count = 1, .channels = 1, .height = 4, .width = 4};
    TRY_TWICE(call, fst_gpu_image(models[1]->tables, &batch, &sample, NULL, &status));
    fake_cuda_lag(0);
    fake_cuda_synchronize();
    fake_cuda_free(scale);
    fake_cuda_free(factors);
    fake_cuda_free(place);
    calls_of_steps = fake_cuda_calls(call);
    model_free(models[0]);
    model_free(models[1]);
}

typedef struct {
    const char *call;
    long nth;
} failure;

static void work_with_failure(void *argument)
{
    const failure *f = argument;
    fake_cuda_fail(f->call, f->nth, OUT_OF_MEMORY);
    work(f->call);
    CHECK(fake_cuda_calls(f->call) >= f->nth);
    /* Nobody can be told when tables cannot be freed. */
    const int told = !is_ignored(f->call) && f->nth <= calls_of_steps;
    CHECK_INT(failed_steps, told);
    const char *complaint = fake_cuda_complaint();
    if (!CHECK(!complaint))
        fprintf(stderr, "    %s\n", complaint);
    /* What fails on the way out cannot be put right; every second exchange is on the way in. */
    const int exchange = !strcmp(f->call, "cuThreadExchangeStreamCaptureMode");
    CHECK_INT(fake_cuda_depth(), !strcmp(f->call, "cuCtxPopCurrent_v2"));
    CHECK_INT(fake_cuda_mode() != 0, exchange && f->nth % 2 == 0);
    if (told)
        nothing_lives();
}

/* How often each entry point is called when nothing fails; through a pipe from a child. */
static void count_calls(void *argument)
{
    const int *pipe_end = argument;
    long counts[64] = {0};
    work("cuInit");
    CHECK_INT(failed_steps, 0);
    for (size_t i = 0; fake_cuda_entry(i); i++)
        counts[i] = fake_cuda_calls(fake_cuda_entry(i));
    CHECK(write(*pipe_end, counts, sizeof counts) == sizeof counts);
}

static void every_call_fails_once(void)
{
    long counts[64];
    int ends[2];
    long runs = 0;
    CHECK_INT(pipe(ends), 0);
    in_child(count_calls, &ends[1], "no failure");
    if (!CHECK(read(ends[0], counts, sizeof counts) == sizeof counts))
        return;
    for (size_t i = 0; fake_cuda_entry(i); i++)
        for (long nth = 1; nth <= counts[i]; nth++, runs++) {
            char what[96];
            failure f = {fake_cuda_entry(i), nth};
            snprintf(what, sizeof what, "call %ld of %s fails", nth, f.call);
            in_child(work_with_failure, &f, what);
        }
    CHECK(runs > 150);
    close(ends[0]);
    close(ends[1]);
}

/* The driver shuts down before the tables are freed, as at the end of a program. */
static void shut_down(void *argument)
{
    fst_status status = {0};
    model *m = model_new(0, 5);
    (void)argument;
    CHECK_INT(model_step(m, NULL, &status), FST_OK);
    for (size_t i = 0; fake_cuda_entry(i); i++)
        fake_cuda_fail(fake_cuda_entry(i), -1, 4);
    CHECK(model_step(m, NULL, &status) == FST_DEVICE_FAILED);
    CHECK_CONTAINS(status.message, "unknown error (no description)");
    model_free(m);
}

/* Failures of the device itself, as they come back from a launch. */
static void sticky_error(void *argument)
{
    fst_status status = {0};
    model *m = model_new(1, 5);
    (void)argument;
    CHECK_INT(model_step(m, NULL, &status), FST_OK);
    fake_cuda_fail("cuLaunchKernel", 2, 719);
    CHECK_INT(model_step(m, NULL, &status), FST_DEVICE_LOST);
    CHECK_INT(status.device_error, 719);
    CHECK_CONTAINS(status.message, "CUDA error: ");
    CHECK_CONTAINS(status.message, "returned by cuLaunchKernel of fst_update on CUDA device 1. ");
    CHECK_CONTAINS(status.message, "may be of earlier work on the device");
    CHECK_CONTAINS(status.message, "CUDA_LAUNCH_BLOCKING=1");
    model_free(m);
    nothing_lives();
}

int main(void)
{
    use_test_kernels();
    every_call_fails_once();
    in_child(shut_down, NULL, "the driver shuts down");
    in_child(sticky_error, NULL, "a kernel fails");
    return check_report();
}
