/* Short tables that go with the launches: how many calls of the driver that takes, and whether
 * kernels find the tables of their own step. */
#include "gpu_model.h"

static fst_status status;

static long calls_of_step(model *m, void *stream)
{
    const long before = fake_cuda_calls(NULL);
    CHECK_INT(model_step(m, stream, &status), FST_OK);
    return fake_cuda_calls(NULL) - before;
}

/* The update of one parameter, whose gradient is elsewhere each time, as in a hook of backward. */
static void released_updates(void)
{
    model *m = model_new(0, 1);
    void *stream = fake_cuda_stream(0);
    calls_of_step(m, NULL);
    const fst_gpu_counts before = fst_gpu_counted();
    fake_cuda_lag(50);
    for (int i = 0; i < 100; i++) {
        m->shift = i % 7;
        m->groups[0].hyper[0] = random_unit();
        m->spans[0].value = random_unit();
        /* push, begin, update, pop */
        CHECK_INT(calls_of_step(m, NULL), 4);
    }
    CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 0);
    /* on another stream also: push, capture, the stream's number, pop, and an event behind the
     * step, as the stream may be destroyed; at first, to keep the order, record and wait */
    CHECK_INT(calls_of_step(m, stream), 11);
    for (int i = 0; i < 100; i++) {
        m->shift = i % 7;
        CHECK_INT(calls_of_step(m, stream), 9);
    }
    fake_cuda_lag(0);
    models_finish();
    fake_cuda_close_stream(stream);
    CHECK_INT(model_step(m, NULL, &status), FST_OK);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* On the default stream the end of a step is marked only for who waits for it. */
static void events_on_demand(void)
{
    model *m = model_new(0, 30);
    void *stream = fake_cuda_stream(0);
    calls_of_step(m, NULL);
    fake_cuda_lag(100);
    const long records = fake_cuda_calls("cuEventRecord"),
               waits = fake_cuda_calls("cuStreamWaitEvent");
    for (int i = 0; i < 20; i++)
        calls_of_step(m, NULL);
    CHECK_INT(fake_cuda_calls("cuEventRecord") - records, 0);
    calls_of_step(m, stream);
    CHECK_INT(fake_cuda_calls("cuEventRecord") - records, 2); /* before it and behind it */
    CHECK_INT(fake_cuda_calls("cuStreamWaitEvent") - waits, 1);
    calls_of_step(m, NULL);
    fst_gpu_tables_free(m->tables); /* waits for the last step */
    m->tables = NULL;
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* Describes the tensors as operands only, for a pass that leaves nothing in the tables. */
static fst_code set_brief(model *m, void *stream)
{
    if (!m->tables && !(m->tables = fst_gpu_tables_new(m->device, &status)))
        return status.code;
    model_plan(m, &status);
    const fst_work work = fst_plan_work(&m->plan);
    expect(m, &work);
    expected[m->tag].brief = 1;
    return fst_gpu_tables_set_brief(m->tables, &work, stream, &status);
}

/* The three passes; scale by a factor, or by a norm at `norm`. */
static void passes(model *m, float *norm)
{
    const fst_scale_launch scale = {.max_norm = m->tag,
                                    .norm = {.data = (uint64_t)(uintptr_t)norm, .is_double = 1}};
    const fst_clamp_launch clamp = {.limit = m->tag};
    const fst_accumulate_launch accumulate = {.factor = m->tag};
    CHECK_INT(fst_gpu_scale(m->tables, norm ? &scale : &(fst_scale_launch){.max_norm = m->tag}, 0,
                            &status),
              FST_OK);
    CHECK_INT(fst_gpu_clamp(m->tables, &clamp, &status), FST_OK);
    CHECK_INT(fst_gpu_accumulate(m->tables, &accumulate, &status), FST_OK);
    expected[m->tag].launched = 3 * (int)m->plan.round_count;
}

/* A push, a launch and a pop, on any stream, and nothing is uploaded, allocated or waited for. */
static void short_lists(void)
{
    model *m = model_new(0, 12);
    void *streams[] = {NULL, fake_cuda_stream(0), (void *)2};
    fake_cuda_lag(40);
    m->tables = fst_gpu_tables_new(0, &status);
    for (int i = 0; i < 300; i++) {
        m->tensors = 1 + random_below(12);
        m->extra = (int64_t)random_below(100000);
        m->strided = random_below(2) == 0;
        m->shift = (int64_t)random_below(7);
        const fst_gpu_counts before = fst_gpu_counted();
        const long calls = fake_cuda_calls(NULL);
        CHECK_INT(set_brief(m, streams[i % 3]), FST_OK);
        passes(m, NULL);
        CHECK_INT(fake_cuda_calls(NULL) - calls, 3 * 3);
        CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 0);
    }
    CHECK_INT((int64_t)fake_cuda_alive().memory, 1); /* the tensors */
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* What is too long for the launch, or has rounds, is uploaded. */
static void long_lists(void)
{
    model *m = model_new(0, 400);
    fake_cuda_lag(40);
    for (int i = 0; i < 100; i++) {
        m->tensors = 1 + random_below(100);
        m->shared = m->tensors > 3 && random_below(2) == 0;
        const fst_gpu_counts before = fst_gpu_counted();
        CHECK_INT(set_brief(m, NULL), FST_OK);
        const size_t bytes = m->tensors * (FST_OP_COUNT + 1) * sizeof(fst_device_operand);
        const int brief = bytes <= FST_DEVICE_LIST_ROOM && !m->shared;
        CHECK_INT(m->tables->brief, brief);
        if (brief)
            CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 0);
        passes(m, NULL);
    }
    CHECK(fst_gpu_counted().uploads > 0);
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* The graph has the tables among its own parameters: nothing has to stay for it. */
static void captured(void)
{
    model *m = model_new(0, 5);
    void *stream = fake_cuda_stream(0);
    fake_cuda_begin_capture(stream);
    CHECK_INT(set_brief(m, stream), FST_OK);
    passes(m, NULL);
    expected[m->tag].launched = 3 * 4;
    void *graph = fake_cuda_end_capture(stream);
    CHECK_INT((int64_t)m->tables->kept_count, 0);
    for (int i = 0; i < 4; i++)
        fake_cuda_replay(graph, stream);
    fake_cuda_synchronize();
    fst_gpu_tables_free(m->tables);
    m->tables = NULL;
    models_finish();
    fake_cuda_free_graph(graph);
    model_free(m);
    nothing_lives();
}

/* Passes that leave something in the tables have none to leave it in. */
static void refused(void)
{
    model *m = model_new(0, 3);
    CHECK_INT(set_brief(m, NULL), FST_OK);
    const fst_norm_launch norm = {.power = m->tag};
    const fst_unscale_launch unscale = {.factor = m->tag};
    const fst_scale_launch scale = {.max_norm = m->tag};
    const long before = fake_cuda_calls(NULL);
    CHECK_INT(fst_gpu_norm(m->tables, &norm, &status), FST_BAD_VALUE);
    status = (fst_status){0};
    CHECK_INT(fst_gpu_unscale(m->tables, &unscale, &status), FST_BAD_VALUE);
    status = (fst_status){0};
    CHECK_INT(fst_gpu_scale(m->tables, &scale, 1, &status), FST_BAD_VALUE);
    CHECK_CONTAINS(status.message, "the tables of CUDA device 0 are not set");
    status = (fst_status){0};
    CHECK_INT(model_launch(m, &status), FST_BAD_VALUE);
    status = (fst_status){0};
    CHECK_INT(fake_cuda_calls(NULL), before);
    fst_layout nine = {.ndim = 9};
    for (int d = 0; d < 9; d++)
        nine.shape[d] = nine.stride[d] = 1;
    m->plan.operands[FST_OP_GRAD].layout = &nine;
    const fst_work work = fst_plan_work(&m->plan);
    CHECK_INT(fst_gpu_tables_set_brief(m->tables, &work, NULL, &status), FST_UNSUPPORTED);
    CHECK_CONTAINS(status.message, "9 dimensions");
    const fst_clamp_launch clamp = {.limit = m->tag};
    status = (fst_status){0};
    CHECK_INT(fst_gpu_clamp(m->tables, &clamp, &status), FST_BAD_VALUE); /* nothing is set */
    status = (fst_status){0};
    models_finish();
    model_free(m);
    nothing_lives();
}

/* Any call may fail: the error comes, the context is left, and the next call works. */
static void failures(void)
{
    static const char *const calls[] = {"cuCtxPushCurrent_v2", "cuLaunchKernel",
                                        "cuCtxPopCurrent_v2"};
    model *m = model_new(0, 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK_INT(set_brief(m, NULL), FST_OK);
        const fst_clamp_launch clamp = {.limit = m->tag};
        fake_cuda_fail(calls[i], 1, 999);
        CHECK_INT(fst_gpu_clamp(m->tables, &clamp, &status), FST_DEVICE_FAILED);
        CHECK_CONTAINS(status.message, calls[i]);
        status = (fst_status){0};
        if (i == 2) /* the fake pops nothing where it fails */
            fake_cuda_leave();
        CHECK_INT(fst_gpu_clamp(m->tables, &clamp, &status), FST_OK);
        expected[m->tag].launched = i == 2 ? 2 : 1;
        models_finish();
    }
    model_free(m);
    nothing_lives();
}

int main(void)
{
    use_test_kernels();
    released_updates();
    events_on_demand();
    short_lists();
    long_lists();
    captured();
    refused();
    failures();
    CHECK(in_launches > 2000);
    return check_report();
}
