/* Steps that are captured into graphs of the fake device, replayed among other steps: a graph keeps
 * the tables it was captured with, and other steps keep theirs. */
#include "gpu_model.h"

static fst_status status;

static void step(model *m, void *stream)
{
    m->shift = (m->shift + 1) % 7;
    CHECK_INT(model_step(m, stream, &status), FST_OK);
}

/* Captures `count` steps; what they launch is expected once per replay. */
static void *capture(model *m, void *stream, int count, int *first_tag)
{
    *first_tag = last_tag + 1;
    fake_cuda_begin_capture(stream);
    for (int i = 0; i < count; i++) {
        step(m, stream);
        expected[m->tag].launched = 0;
    }
    CHECK_INT(fake_cuda_mode(), 0);
    return fake_cuda_end_capture(stream);
}

static void replay(void *graph, void *stream, int first_tag, int steps)
{
    fake_cuda_replay(graph, stream);
    for (int tag = first_tag; tag < first_tag + steps; tag++)
        expected[tag].launched += 2;
}

static void replays_among_steps(size_t lag, int warm_up)
{
    model *m = model_new(0, 50);
    void *stream = fake_cuda_stream(0), *graphs[3];
    int tags[3];
    fake_cuda_lag(lag);
    for (int i = 0; i < warm_up; i++)
        step(m, stream);
    for (int g = 0; g < 3; g++) {
        graphs[g] = capture(m, stream, 1 + g, &tags[g]);
        step(m, stream);
        m->extra += 20000; /* the tables must move */
        step(m, g == 1 ? NULL : stream);
        m->groups[0].hyper[0] += 1.0;
    }
    for (int i = 0; i < 200; i++) {
        const size_t g = random_below(4);
        if (g < 3)
            replay(graphs[g], stream, tags[g], 1 + (int)g);
        else
            step(m, stream);
    }
    fake_cuda_lag(0);
    models_finish();
    for (int g = 0; g < 3; g++)
        fake_cuda_free_graph(graphs[g]);
    model_free(m);
    nothing_lives();
}

/* The norm, and then the clip coefficient from it: both passes use the same tables. */
static void passes_of_a_capture_share_their_tables(void)
{
    model *m = model_new(0, 9);
    void *stream = fake_cuda_stream(0);
    const fst_gpu_counts before = fst_gpu_counted();
    fake_cuda_begin_capture(stream);
    CHECK_INT(model_set(m, stream, &status), FST_OK);
    const int tag = m->tag;
    const fst_norm_launch norm = {.power = tag};
    CHECK_INT(fst_gpu_norm(m->tables, &norm, &status), FST_OK);
    CHECK_INT(model_set(m, stream, &status), FST_OK); /* the same once more */
    const fst_scale_launch scale = {.max_norm = tag};
    CHECK_INT(fst_gpu_scale(m->tables, &scale, 1, &status), FST_OK);
    void *graph = fake_cuda_end_capture(stream);
    CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 1);
    for (int i = 0; i < 3; i++)
        fake_cuda_replay(graph, stream);
    expected[tag].launched = 6;
    models_finish();
    fake_cuda_free_graph(graph);
    model_free(m);
    nothing_lives();
}

/* Steps of one capture whose tables differ a little: what differs goes with the launches. */
static void short_differences(void)
{
    model *m = model_new(0, 3);
    void *stream = fake_cuda_stream(0), *joined = fake_cuda_stream(0);
    int tag;
    const fst_gpu_counts before = fst_gpu_counted();
    const fake_cuda_living living = fake_cuda_alive();
    void *graph = capture(m, stream, 20, &tag);
    CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 1);
    CHECK_INT((int64_t)(fake_cuda_alive().pinned - living.pinned), 1);
    CHECK_INT((int64_t)(fake_cuda_alive().memory - living.memory), 1);
    for (int i = 0; i < 3; i++)
        replay(graph, stream, tag, 20);
    models_finish();
    fake_cuda_free_graph(graph);
    /* What another stream does in the same capture is not in the order of this one. */
    m->shift = 1;
    fake_cuda_begin_capture(stream);
    fake_cuda_join_capture(joined, stream);
    tag = last_tag + 1;
    for (int i = 0; i < 8; i++)
        CHECK_INT(model_step(m, i < 4 ? stream : joined, &status), FST_OK);
    graph = fake_cuda_end_capture(stream);
    CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 3);
    for (int i = 0; i < 8; i++)
        expected[tag + i].launched = 0;
    replay(graph, stream, tag, 8);
    models_finish();
    fake_cuda_free_graph(graph);
    model_free(m);
    nothing_lives();
}

/* The same step in two graphs, of which only the second is replayed: it does not count on what the
 * first would have uploaded. */
static void a_graph_that_is_thrown_away(void)
{
    model *m = model_new(0, 9);
    void *stream = fake_cuda_stream(0), *graphs[2];
    int tags[2];
    for (int g = 0; g < 2; g++) {
        m->shift = 6; /* 0 in the step */
        graphs[g] = capture(m, stream, 1, &tags[g]);
    }
    fake_cuda_free_graph(graphs[0]);
    replay(graphs[1], stream, tags[1], 1);
    replay(graphs[1], stream, tags[1], 1);
    models_finish();
    fake_cuda_free_graph(graphs[1]);
    model_free(m);
    nothing_lives();
}

/* Graphs that go while their tables stay do not leave memory behind. */
static void graphs_come_and_go(void)
{
    model *m = model_new(0, 60);
    void *stream = fake_cuda_stream(0);
    step(m, stream);
    const fake_cuda_living before = fake_cuda_alive();
    for (int i = 0; i < 50; i++) {
        int tag;
        void *graph = capture(m, stream, 2, &tag);
        replay(graph, stream, tag, 2);
        models_finish();
        CHECK_INT((int64_t)fake_cuda_alive().objects, 2);
        fake_cuda_free_graph(graph);
        CHECK_INT((int64_t)fake_cuda_alive().objects, 0);
        CHECK(fake_cuda_alive().memory <= before.memory + 2);
        CHECK(fake_cuda_alive().pinned <= before.pinned + 2);
    }
    model_free(m);
    nothing_lives();
}

/* A graph keeps what it needs of tables that are gone, and only as long as it lives. */
static void a_graph_that_outlives_its_tables(void)
{
    model *m = model_new(0, 9), *other = model_new(0, 9);
    void *stream = fake_cuda_stream(0);
    int tag;
    void *graph = capture(m, stream, 1, &tag);
    fst_gpu_tables_free(m->tables);
    m->tables = NULL;
    step(other, stream);
    for (int i = 0; i < 3; i++)
        replay(graph, stream, tag, 1);
    models_finish();
    fake_cuda_free_graph(graph);
    model_free(m);
    model_free(other); /* frees what the graph has left */
    nothing_lives();
}

/* Another thread's tables grow while a stream is captured: that must not break the capture. */
static void steps_beside_a_capture(void)
{
    model *m = model_new(0, 9), *beside = model_new(1, 9);
    void *stream = fake_cuda_stream(0), *other = fake_cuda_stream(1);
    int tag;
    fake_cuda_lag(20);
    step(beside, other);
    fake_cuda_begin_capture(stream);
    tag = last_tag + 1;
    step(m, stream);
    expected[tag].launched = 0;
    for (int i = 0; i < 20; i++) {
        beside->extra += 5000;
        step(beside, other);
    }
    void *graph = fake_cuda_end_capture(stream);
    replay(graph, stream, tag, 1);
    fake_cuda_lag(0);
    models_finish();
    fake_cuda_free_graph(graph);
    model_free(m);
    model_free(beside);
    nothing_lives();
}

/* Memory runs out within a capture: the error says so, and the next attempt works. */
static void a_capture_without_memory(void)
{
    static const struct {
        const char *name;
        long nth;
    } calls[] = {{"cuMemAlloc_v2", 1},
                 {"cuMemHostAlloc", 1},
                 {"cuStreamGetCaptureInfo_v2", 1}, /* for the capture's number, */
                 {"cuStreamGetCaptureInfo_v2", 2}, /* and for its graph */
                 {"cuUserObjectCreate", 1},
                 {"cuGraphRetainUserObject", 1},
                 {"cuMemcpyHtoDAsync_v2", 1}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        model *m = model_new(0, 9);
        void *stream = fake_cuda_stream(0);
        int tag;
        step(m, stream);
        fake_cuda_begin_capture(stream);
        fake_cuda_fail(calls[i].name, calls[i].nth, 2);
        CHECK_INT(model_set(m, stream, &status), FST_NO_MEMORY);
        CHECK_CONTAINS(status.message, calls[i].name);
        status = (fst_status){0};
        fake_cuda_free_graph(fake_cuda_end_capture(stream));
        void *graph = capture(m, stream, 1, &tag);
        replay(graph, stream, tag, 1);
        step(m, stream);
        models_finish();
        fake_cuda_free_graph(graph);
        model_free(m);
        nothing_lives();
    }
}

int main(void)
{
    static const size_t lags[] = {0, 4, 100};
    use_test_kernels();
    for (size_t i = 0; i < 3; i++)
        for (int warm_up = 0; warm_up < 3; warm_up++)
            replays_among_steps(lags[i], warm_up);
    passes_of_a_capture_share_their_tables();
    short_differences();
    a_graph_that_is_thrown_away();
    graphs_come_and_go();
    a_graph_that_outlives_its_tables();
    steps_beside_a_capture();
    a_capture_without_memory();
    CHECK(kernels_ran > 1000);
    return check_report();
}
