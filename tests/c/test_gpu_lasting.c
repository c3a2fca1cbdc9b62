/* Streams that live as long as the process, and others: how many calls of the driver a step takes
 * on each, when the end of a step is marked, and that nobody touches a stream that was destroyed.
 */
#include "gpu/streams.h"
#include "gpu_model.h"

static fst_status status;

static void *stream_that_lasts(void)
{
    void *stream = fake_cuda_stream(0);
    CHECK_INT(fst_gpu_stream_life(stream), FST_STREAM_UNKNOWN);
    fst_gpu_note_stream(stream, 1);
    CHECK_INT(fst_gpu_stream_life(stream), FST_STREAM_LASTS);
    return stream;
}

static long calls_of_step(model *m, void *stream)
{
    const long before = fake_cuda_calls(NULL);
    CHECK_INT(model_step(m, stream, &status), FST_OK);
    return fake_cuda_calls(NULL) - before;
}

static void step(model *m, void *stream)
{
    m->shift = (m->shift + 1) % 7;
    CHECK_INT(model_step(m, stream, &status), FST_OK);
}

static void finish(model *m)
{
    fake_cuda_lag(0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* Streams in turn, where nothing moves, and where so many gradients do that they are uploaded. */
static void calls_in_turn(void *const *streams, size_t count, long unchanged, long moved)
{
    model *m = model_new(0, 200);
    fake_cuda_lag(20);
    for (size_t i = 0; i < 30; i++)
        step(m, streams[i % count]);
    for (size_t i = 0; i < 12; i++)
        CHECK_INT(calls_of_step(m, streams[i % count]), unchanged);
    fake_cuda_lag(0);
    fake_cuda_synchronize(); /* slots of the ring are free */
    for (size_t i = 0; i < 12; i++) {
        m->shift = (m->shift + 1) % 7;
        CHECK_INT(calls_of_step(m, streams[i % count]), moved);
    }
    finish(m);
}

static void calls(void)
{
    void *lasting[] = {stream_that_lasts(), stream_that_lasts()};
    void *ending[] = {fake_cuda_stream(0), fake_cuda_stream(0)};
    void *mixed[] = {NULL, lasting[0]};
    /* push, begin, update, pop; with an upload push, two around it, query, copy, record, pop */
    calls_in_turn((void *[]){NULL}, 1, 4, 11);
    /* also push, capture?, pop; the upload is between them */
    calls_in_turn(lasting, 1, 7, 12);
    /* also the stream's number, and an event behind the step */
    calls_in_turn(ending, 1, 9, 14);
    /* also the event behind the other stream's step, whether that is captured, and a wait */
    calls_in_turn(lasting, 2, 10, 15);
    /* also a wait: the event is there */
    calls_in_turn(ending, 2, 10, 15);
    /* both kinds in the middle: push, record, wait, pop; push, capture?, record, wait, pop */
    model *m = model_new(0, 30);
    for (int i = 0; i < 9; i++)
        step(m, mixed[i % 2]);
    CHECK_INT(calls_of_step(m, mixed[1]), 9);
    CHECK_INT(calls_of_step(m, mixed[0]), 9);
    finish(m);
}

/* A stream that lasts is one for its handle alone, and its work is waited for from elsewhere. */
static void marked_when_needed(void)
{
    void *lasting[] = {NULL, stream_that_lasts(), stream_that_lasts()},
         *ending = fake_cuda_stream(0);
    model *m = model_new(0, 40);
    fake_cuda_lag(60);
    for (int i = 0; i < 600; i++) {
        const size_t next = random_below(4);
        step(m, next < 3 ? lasting[next] : ending);
        if (next == 3 && random_below(2))
            fake_cuda_recreate_stream(ending);
    }
    const long records = fake_cuda_calls("cuEventRecord"), ids = fake_cuda_calls("cuStreamGetId");
    step(m, lasting[1]);
    for (int i = 0; i < 20; i++)
        CHECK_INT(model_step(m, lasting[1], &status), FST_OK);
    CHECK(fake_cuda_calls("cuEventRecord") - records <= 2);
    CHECK_INT(fake_cuda_calls("cuStreamGetId"), ids);
    finish(m);
}

/* Nobody records on a stream that was destroyed, though no launch came after the upload there. */
static void destroyed_before_its_launch(void)
{
    model *m = model_new(0, 200);
    fake_cuda_lag(20);
    step(m, NULL);
    for (int i = 0; i < 5; i++) {
        void *stream = fake_cuda_stream(0);
        m->shift = (m->shift + 3) % 7;
        CHECK_INT(model_set(m, stream, &status), FST_OK);
        fake_cuda_close_stream(stream);
        step(m, i % 2 ? NULL : fake_cuda_stream(0));
    }
    finish(m);
}

/* A stream with steps behind it is captured, and meanwhile the tables are used on another: they
 * cannot mark the end of those steps any more. The graph has nothing of that. */
static void captured_since(size_t lag)
{
    void *captured = stream_that_lasts(), *other = stream_that_lasts();
    model *m = model_new(0, 60), *inside = model_new(0, 5);
    const fst_begin_launch begin = {.measure = 1};
    fake_cuda_lag(lag);
    for (int round = 0; round < 6; round++) {
        step(m, captured);
        step(m, captured);
        const size_t memory = fake_cuda_alive().memory;
        fake_cuda_begin_capture(captured);
        CHECK_INT(model_set(inside, captured, &status), FST_OK);
        fst_begin_launch first = begin;
        first.max_norm = inside->tag;
        CHECK_INT(fst_gpu_step(inside->tables, &first, NULL, &status), FST_OK);
        if (round == 2) { /* nobody knows whose event that is */
            fake_cuda_fail("cuStreamGetCaptureInfo_v2", 1, 999);
            CHECK_INT(model_step(m, NULL, &status), FST_DEVICE_FAILED);
            status = (fst_status){0};
        }
        step(m, round % 2 ? other : NULL);
        step(m, round % 2 ? other : NULL);
        /* tables of the graph, which took the place of those of the last graph, and new ones */
        CHECK_INT((int64_t)(fake_cuda_alive().memory - memory), round ? 1 : 2);
        void *graph = fake_cuda_end_capture(captured);
        step(m, captured);
        fake_cuda_replay(graph, other);
        expected[inside->tag].launched = 1;
        fake_cuda_synchronize();
        fake_cuda_free_graph(graph);
        models_finish();
    }
    model_free(inside);
    finish(m);
}

/* Tables that are freed while the stream is captured that their last step waits on. */
static void freed_in_a_capture(void)
{
    void *captured = stream_that_lasts();
    model *m = model_new(0, 60);
    fake_cuda_lag(100);
    step(m, captured);
    fake_cuda_begin_capture(captured);
    fst_gpu_tables_free(m->tables);
    m->tables = NULL;
    fake_cuda_free_graph(fake_cuda_end_capture(captured));
    finish(m);
}

/* The driver fails where the end of earlier steps is marked: the step says so, the next one works.
 */
static void failures(void)
{
    static const struct {
        const char *name;
        long nth;
    } failing[] = {{"cuEventRecord", 1},
                   {"cuStreamGetCaptureInfo_v2", 2},
                   {"cuStreamWaitEvent", 1},
                   {"cuStreamGetCaptureInfo_v2", 1}};
    void *streams[] = {stream_that_lasts(), stream_that_lasts()};
    for (size_t i = 0; i < 8; i++) {
        model *m = model_new(0, 60);
        fake_cuda_lag(50);
        for (int round = 0; round < 8; round++) {
            step(m, streams[0]);
            fake_cuda_fail(failing[i % 4].name, failing[i % 4].nth, 999);
            m->shift = (m->shift + 1) % 7;
            CHECK_INT(model_step(m, streams[1], &status), FST_DEVICE_FAILED);
            CHECK_CONTAINS(status.message, failing[i % 4].name);
            status = (fst_status){0};
            step(m, i < 4 ? streams[1] : NULL);
        }
        finish(m);
    }
}

/* What was noted stays. Where there is no room for more, streams end as far as is known. */
static void notes(void)
{
    char *many = must_alloc(100000 * 16);
    size_t lasting = 0, unknown = 0;
    fst_gpu_note_stream(NULL, 0);
    CHECK_INT(fst_gpu_stream_life(NULL), FST_STREAM_LASTS);
    for (uintptr_t number = 1; number <= 2; number++) { /* the legacy and the per-thread stream */
        CHECK_INT(fst_gpu_stream_life((void *)number), FST_STREAM_ENDS);
        fst_gpu_note_stream((void *)number, 1);
        CHECK_INT(fst_gpu_stream_life((void *)number), FST_STREAM_ENDS);
    }
    fst_gpu_note_stream(many, 0);
    fst_gpu_note_stream(many, 1);
    CHECK_INT(fst_gpu_stream_life(many), FST_STREAM_ENDS);
    fst_gpu_note_stream(many + 16, 1);
    fst_gpu_note_stream(many + 16, 0);
    CHECK_INT(fst_gpu_stream_life(many + 16), FST_STREAM_LASTS);
    for (size_t i = 2; i < 100000; i++)
        fst_gpu_note_stream(many + 16 * i, 1);
    for (size_t i = 2; i < 100000; i++) {
        lasting += fst_gpu_stream_life(many + 16 * i) == FST_STREAM_LASTS;
        unknown += fst_gpu_stream_life(many + 16 * i) == FST_STREAM_UNKNOWN;
    }
    CHECK(lasting > 900 && lasting <= 1024);
    CHECK_INT((int64_t)unknown, 0); /* nobody asks again */
    free(many);
}

int main(void)
{
    use_test_kernels();
    calls();
    marked_when_needed();
    destroyed_before_its_launch();
    captured_since(0);
    captured_since(40);
    freed_in_a_capture();
    failures();
    notes();
    CHECK(kernels_ran > 1000);
    return check_report();
}
