/* Steps on a fake device that runs late, on one stream and on several: kernels find the tables of
 * their own step all the same, and nothing waits. */
#include <pthread.h>

#include "gpu_model.h"

static fst_status status;

static void steps(model *m, int count, void *stream)
{
    for (int i = 0; i < count; i++)
        CHECK_INT(model_step(m, stream, &status), FST_OK);
}

/* A device that is far behind: the ring grows as far as that, and no further. */
static void thousands_of_steps(void)
{
    static const size_t lags[] = {0, 3, 40, 200};
    for (size_t i = 0; i < sizeof lags / sizeof lags[0]; i++) {
        model *m = model_new(0, 20);
        const long synchronized = fake_cuda_calls("cuEventSynchronize");
        fake_cuda_lag(lags[i]);
        for (int k = 0; k < 3000; k++) {
            m->shift = k % 3;
            steps(m, 1, NULL);
        }
        /* a step with an upload is 4 operations: copy, record, begin, update */
        CHECK(fake_cuda_alive().pinned <= lags[i] / 4 + 2);
        CHECK(fake_cuda_alive().pinned >= lags[i] / 4);
        CHECK_INT(fake_cuda_calls("cuEventSynchronize"), synchronized); /* grows, never waits */
        fake_cuda_lag(0);
        models_finish();
        model_free(m);
        nothing_lives();
    }
}

/* Each step on another stream, while the streams run late: the order of the steps is kept. */
static void several_streams(void)
{
    void *streams[] = {NULL, fake_cuda_stream(0), fake_cuda_stream(0), (void *)2};
    model *m = model_new(0, 20);
    fake_cuda_lag(30);
    for (int i = 0; i < 500; i++) {
        m->shift = (int64_t)random_below(3);
        steps(m, 1, streams[random_below(4)]);
    }
    fake_cuda_lag(0);
    models_finish();
    const long waits = fake_cuda_calls("cuStreamWaitEvent");
    steps(m, 1, streams[1]);
    steps(m, 10, streams[1]);
    CHECK(fake_cuda_calls("cuStreamWaitEvent") - waits <= 1);
    fake_cuda_close_stream(streams[1]);
    steps(m, 1, streams[2]); /* must not touch the closed one */
    models_finish();
    model_free(m);
    nothing_lives();
}

/* A stream that is destroyed while its work waits, and another that gets its handle. */
static void a_handle_that_comes_again(void)
{
    void *stream = fake_cuda_stream(0);
    model *m = model_new(0, 20);
    fake_cuda_lag(1000);
    for (int i = 0; i < 20; i++) {
        m->shift = i;
        const long waits = fake_cuda_calls("cuStreamWaitEvent");
        steps(m, 1, stream);
        steps(m, 1, stream);
        CHECK_INT(fake_cuda_calls("cuStreamWaitEvent") - waits, i > 0);
        fake_cuda_recreate_stream(stream);
    }
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* The stream of each thread: one handle, but another stream. */
static void *step_in_thread(void *argument)
{
    model *m = argument;
    m->shift++;
    return model_step(m, (void *)2, &status) ? argument : NULL;
}

static void streams_of_threads(void)
{
    model *m = model_new(0, 20);
    fake_cuda_lag(1000);
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        void *failed = m;
        CHECK_INT(pthread_create(&thread, NULL, step_in_thread, m), 0);
        CHECK_INT(pthread_join(thread, &failed), 0);
        CHECK(!failed);
    }
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
}

/* Tables that are freed while launches wait for the device. */
static void freed_early(void)
{
    model *m = model_new(0, 20);
    fake_cuda_lag(1000);
    steps(m, 1, NULL);
    m->shift = 5;
    steps(m, 1, fake_cuda_stream(0));
    fst_gpu_tables_free(m->tables);
    m->tables = NULL;
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* The same of a ring alone, as batches of images use it: no memory of the device waits for them. */
static void a_ring_freed_early(void)
{
    const fst_gpu_device *device = fst_gpu_device_get(0, &status);
    void *to = fake_cuda_malloc(0, 4);
    fst_gpu_ring ring = {0};
    int mode;
    fake_cuda_lag(1000);
    CHECK_INT(fst_gpu_enter_relaxed(device, &mode, &status), FST_OK);
    for (int i = 0; i < 3; i++)
        CHECK_INT(fst_gpu_ring_upload(&ring, device, (uint64_t)(uintptr_t)to, &i, sizeof i,
                                      fake_cuda_stream(0), &status),
                  FST_OK);
    fst_gpu_ring_free(&ring, 1);
    CHECK_INT(fst_gpu_leave_relaxed(device, mode, &status), FST_OK);
    fake_cuda_lag(0);
    models_finish();
    fake_cuda_free(to);
    nothing_lives();
}

/* A step that breaks off before its last launch, and goes on on another stream. */
static void half_a_step(void)
{
    void *streams[] = {fake_cuda_stream(0), fake_cuda_stream(0)};
    model *m = model_new(0, 20);
    fake_cuda_lag(1000);
    for (int i = 0; i < 20; i++) {
        m->shift = i;
        CHECK_INT(model_set(m, streams[i % 2], &status), FST_OK);
        CHECK_INT(model_begin(m, &status), FST_OK);
        expected[m->tag].launched = 1;
    }
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
}

/* Nobody knows when the copy from a slot is over whose event could not be recorded. */
static void lost_slots(void)
{
    model *m = model_new(0, 20);
    for (size_t lag = 0; lag < 40; lag += 3) {
        fake_cuda_lag(lag);
        for (int i = 1; i < 60; i++) {
            m->shift = i;
            fake_cuda_fail("cuEventRecord", i % 9 == 0, 999);
            const fst_code code = model_step(m, NULL, &status);
            CHECK_INT(code, i % 9 == 0 ? FST_DEVICE_FAILED : FST_OK);
            status = (fst_status){0};
        }
    }
    fake_cuda_lag(0);
    models_finish();
    CHECK(fake_cuda_alive().pinned > 14 * 6); /* one is lost with each failure, ... */
    CHECK(fake_cuda_alive().pinned < 14 * 6 + 12);
    model_free(m);
    nothing_lives();
}

int main(void)
{
    use_test_kernels();
    thousands_of_steps();
    several_streams();
    a_handle_that_comes_again();
    streams_of_threads();
    freed_early();
    a_ring_freed_early();
    half_a_step();
    lost_slots();
    CHECK(kernels_ran > 10000);
    return check_report();
}
