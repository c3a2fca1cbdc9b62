/* Steps that say what of their tables is as it was: that is not compared again, and all else is
 * found out as ever. */
#include "gpu_model.h"

static fst_status status;
static int failed_steps;

static int64_t uploaded(model *m)
{
    const fst_gpu_counts before = fst_gpu_counted();
    CHECK_INT(model_step(m, NULL, &status), FST_OK);
    return (int64_t)(fst_gpu_counted().uploaded_bytes - before.uploaded_bytes);
}

static void only_what_may_differ_is_compared(void)
{
    model *m = model_new(0, 300);
    m->bound = 1;
    CHECK(uploaded(m) > 0);
    CHECK_INT(uploaded(m), 0);
    m->first_moved = 299; /* the last gradient */
    m->shift = 4;
    m->moved++;
    CHECK_INT(uploaded(m), sizeof(uint64_t));
    m->spans[7].value = 0.25;
    m->bound++;
    CHECK_INT(uploaded(m), sizeof(fst_device_span));
    m->groups[1].hyper[0] *= 0.5;
    CHECK_INT(uploaded(m), 0); /* it goes with the launches, until ... */
    CHECK_INT(uploaded(m), 0);
    m->shift = 5;
    m->moved++;
    CHECK(uploaded(m) > (int64_t)(sizeof(fst_device_group) + sizeof(uint64_t)));
    CHECK_INT(uploaded(m), 0);
    models_finish();
    /* what is said to be known is not looked at: nothing is launched with these tables */
    m->shift = 6;
    m->spans[7].value = 0.5;
    const fst_gpu_counts before = fst_gpu_counted();
    CHECK_INT(model_set(m, NULL, &status), FST_OK);
    CHECK_INT((int64_t)(fst_gpu_counted().uploads - before.uploads), 0);
    m->bound = 0; /* unknown */
    CHECK(uploaded(m) > 0);
    models_finish();
    model_free(m);
    nothing_lives();
}

/* Changes something, and says so; calls fail, lists without numbers come between. */
static void change(model *m)
{
    switch (random_below(8)) {
    case 0:
        m->tensors = 2 + random_below(59); /* at most as many as it was made with */
        m->shared = m->tensors > 3 && random_below(2);
        m->bound++;
        break;
    case 1:
        m->extra = (int64_t)random_below(50000);
        m->strided = !m->strided;
        m->bound++;
        break;
    case 2:
        m->groups[0].hyper[1] = random_unit();
        break;
    case 3:
        m->spans[random_below(62)].value = random_unit();
        m->bound++;
        break;
    case 4:
        break;
    default:
        m->shift = (int64_t)random_below(7);
        m->first_moved = random_below(m->tensors);
        m->moved++;
    }
}

static void step(model *m, void *stream)
{
    static const char *const calls[] = {"cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyHtoDAsync_v2",
                                        "cuStreamGetCaptureInfo_v2", "cuEventRecord"};
    const uint64_t bound = m->bound;
    const char *call = calls[random_below(5)];
    fake_cuda_fail(call, random_below(6) == 0, 2);
    if (random_below(9) == 0)
        m->bound = 0;
    if (model_step(m, stream, &status)) {
        status = (fst_status){0};
        failed_steps++;
        change(m);
        CHECK_INT(model_step(m, stream, &status), FST_OK);
    }
    fake_cuda_fail(call, 0, 0);
    m->bound = bound + (m->bound != bound); /* numbers are never used again */
}

enum { STEPS = 2000 };

static void any_order_of_changes(size_t lag)
{
    model *m = model_new(0, 60);
    void *stream = fake_cuda_stream(0), **graphs = must_alloc(STEPS * sizeof *graphs);
    size_t graph_count = 0;
    int tag = 0, launches = 0;
    m->bound = 1;
    fake_cuda_lag(lag);
    for (int i = 0; i < STEPS; i++) {
        change(m);
        step(m, random_below(5) ? NULL : stream);
        if (i % 97 == 50) { /* a graph: its tables are others */
            fake_cuda_begin_capture(stream);
            CHECK_INT(model_step(m, stream, &status), FST_OK);
            tag = m->tag;
            launches = expected[tag].launched;
            expected[tag].launched = 0;
            graphs[graph_count++] = fake_cuda_end_capture(stream);
        }
        if (graph_count && random_below(4) == 0) {
            fake_cuda_replay(graphs[graph_count - 1], stream);
            expected[tag].launched += launches;
        }
    }
    fake_cuda_lag(0);
    models_finish();
    while (graph_count)
        fake_cuda_free_graph(graphs[--graph_count]);
    free(graphs);
    model_free(m);
    nothing_lives();
}

int main(void)
{
    use_test_kernels();
    only_what_may_differ_is_compared();
    any_order_of_changes(0);
    any_order_of_changes(9);
    CHECK(kernels_ran > 5000 && failed_steps > 100);
    return check_report();
}
