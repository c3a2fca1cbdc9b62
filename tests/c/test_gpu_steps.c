/* Steps on the fake device: what is launched and uploaded, and whether kernels find the tables of
 * their own step. */
#include "gpu_model.h"

static fst_status status;

static fst_gpu_counts since(fst_gpu_counts before)
{
    const fst_gpu_counts now = fst_gpu_counted();
    return (fst_gpu_counts){now.launches - before.launches, now.uploads - before.uploads,
                            now.uploaded_bytes - before.uploaded_bytes};
}

static void steps(model *m, int count, void *stream)
{
    for (int i = 0; i < count; i++)
        CHECK_INT(model_step(m, stream, &status), FST_OK);
}

/* Two launches, and after the first step no upload, for any number of tensors. */
static void still_tensors(void)
{
    static const size_t tensors[] = {1, 2, 300, 5000};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        model *m = model_new(0, tensors[i]);
        fst_gpu_counts before = fst_gpu_counted();
        steps(m, 1, NULL);
        CHECK_INT((int64_t)since(before).uploads, 1);
        before = fst_gpu_counted();
        const long calls = fake_cuda_calls("cuLaunchKernel"), all = fake_cuda_calls(NULL);
        steps(m, 20, NULL);
        CHECK_INT((int64_t)since(before).launches, 40);
        CHECK_INT(fake_cuda_calls("cuLaunchKernel") - calls, 40);
        CHECK_INT(fake_cuda_calls(NULL) - all, 20 * 4);
        CHECK_INT((int64_t)since(before).uploads, 0);
        models_finish();
        model_free(m);
        nothing_lives();
    }
}

/* One upload per step, of what moved only. */
static void moving_tensors(void)
{
    model *m = model_new(0, 300);
    steps(m, 1, NULL);
    for (int i = 0; i < 50; i++) {
        const fst_gpu_counts before = fst_gpu_counted();
        m->first_moved = 299; /* the last gradient */
        m->shift = i % 2 ? 4 : 8;
        steps(m, 1, NULL);
        CHECK_INT((int64_t)since(before).uploads, 1);
        CHECK_INT((int64_t)since(before).uploaded_bytes, sizeof(fst_device_operand));
    }
    for (int i = 0; i < 50; i++) {
        const fst_gpu_counts before = fst_gpu_counted();
        m->first_moved = 0; /* all of them */
        m->shift = i % 2 ? 4 : 8;
        steps(m, 1, NULL);
        CHECK_INT((int64_t)since(before).uploads, 1);
        CHECK(since(before).uploaded_bytes <= 300 * FST_OP_COUNT * sizeof(fst_device_operand));
    }
    for (int i = 0; i < 50; i++) {
        const fst_gpu_counts before = fst_gpu_counted();
        m->groups[1].hyper[0] *= 0.5; /* a learning rate, which goes with the launches */
        steps(m, 1, NULL);
        CHECK_INT((int64_t)since(before).uploads, 0);
    }
    models_finish();
    model_free(m);
    nothing_lives();
}

/* Tensors come, go and grow; layouts, rounds and what counts change. */
static void changing_lists(void)
{
    static const size_t lag[] = {0, 7};
    for (size_t i = 0; i < 2; i++) {
        model *m = model_new(0, 400);
        fake_cuda_lag(lag[i]);
        for (int k = 0; k < 200; k++) {
            m->tensors = 1 + random_below(400);
            m->extra = (int64_t)random_below(50000);
            m->shared = m->tensors > 3 && random_below(4) == 0;
            m->strided = random_below(2) == 0;
            m->spans[random_below(402)].value = (double)k;
            const fst_gpu_counts before = fst_gpu_counted();
            steps(m, 1, NULL);
            CHECK_INT((int64_t)since(before).launches, 1 + (int64_t)m->plan.round_count);
            CHECK_INT((int64_t)m->plan.round_count, m->shared ? 2 : 1);
        }
        fake_cuda_lag(0);
        models_finish();
        model_free(m);
        nothing_lives();
    }
}

static void two_devices(void)
{
    model *m[2] = {model_new(0, 30), model_new(1, 30)};
    fst_gpu_tables *none;
    fake_cuda_lag(9);
    for (int i = 0; i < 100; i++) {
        m[i % 2]->shift = i % 3;
        steps(m[i % 2], 1, NULL);
    }
    fake_cuda_lag(0);
    models_finish();
    model_free(m[0]);
    model_free(m[1]);
    nothing_lives();
    none = fst_gpu_tables_new(2, &status);
    CHECK(!none && status.code == FST_DEVICE_FAILED);
    CHECK_CONTAINS(status.message, "cuDeviceGet on CUDA device 2: CUDA_ERROR_INVALID_DEVICE");
    none = fst_gpu_tables_new(-1, &status);
    CHECK(!none && status.code == FST_BAD_VALUE);
    status = (fst_status){0};
}

/* Passes over a list of tensors: launches, rounds, and the norm that stays on the device. */
static void explicit_passes(void)
{
    model *m = model_new(1, 12);
    for (int shared = 0; shared < 2; shared++) {
        m->shared = shared;
        CHECK_INT(model_set(m, NULL, &status), FST_OK);
        const fst_gpu_counts before = fst_gpu_counted();
        const fst_norm_launch norm = {.power = m->tag};
        const fst_unscale_launch unscale = {.factor = m->tag};
        const fst_scale_launch scale = {.max_norm = m->tag};
        const fst_clamp_launch clamp = {.limit = m->tag};
        CHECK_INT(fst_gpu_norm(m->tables, &norm, &status), FST_OK);
        CHECK_INT(fst_gpu_scale(m->tables, &scale, 1, &status), FST_OK);
        CHECK_INT(fst_gpu_clamp(m->tables, &clamp, &status), FST_OK);
        CHECK_INT(fst_gpu_unscale(m->tables, &unscale, &status), FST_OK);
        CHECK_INT(fst_gpu_scale(m->tables, &scale, 0, &status), FST_OK);
        CHECK_INT((int64_t)since(before).launches, 1 + 4 * (1 + shared));
        expected[m->tag].launched = 1 + 4 * (1 + shared);
        models_finish();
    }
    float *scale = fake_cuda_malloc(1, sizeof *scale);
    const fst_loss_scale_launch loss_scale = {.scale = (uint64_t)(uintptr_t)scale};
    *scale = 3.0f;
    CHECK_INT(fst_gpu_loss_scale(1, &loss_scale, NULL, &status), FST_OK);
    fake_cuda_synchronize();
    CHECK_NEAR(*scale, 6.0, 0);
    fake_cuda_free(scale);
    model_free(m);
    nothing_lives();
}

/* Samples change from batch to batch while earlier copies of them are still under way. */
static void images(void)
{
    enum { COUNT = 5, BATCHES = 6 };
    fst_gpu_tables *tables = fst_gpu_tables_new(1, &status);
    fst_image_sample samples[COUNT] = {{0}};
    uint64_t places[BATCHES];
    const fst_gpu_counts before = fst_gpu_counted();
    if (!CHECK(tables != NULL))
        return;
    fake_cuda_lag(20);
    for (int32_t i = 0; i < BATCHES; i++) {
        places[i] = (uint64_t)(uintptr_t)fake_cuda_malloc(1, sizeof samples);
        samples[COUNT - 1].height = 7 + i;
        const fst_image_batch batch = {.samples = places[i],
                                       .count = COUNT,
                                       .channels = 3,
                                       .height = 7 + i,
                                       .width = 40,
                                       .antialias = i % 2};
        CHECK_INT(fst_gpu_image(tables, &batch, samples, NULL, &status), FST_OK);
    }
    const fst_image_batch empty = {.samples = places[0], .count = COUNT, .channels = 3};
    CHECK_INT(fst_gpu_image(tables, &empty, samples, NULL, &status), FST_OK);
    CHECK_INT((int64_t)since(before).launches, BATCHES);
    CHECK_INT((int64_t)since(before).uploads, BATCHES);
    fake_cuda_lag(0);
    fake_cuda_synchronize();
    for (int i = 0; i < BATCHES; i++)
        fake_cuda_free((void *)(uintptr_t)places[i]);
    fst_gpu_tables_free(tables);
    nothing_lives();
}

/* No tensor has elements: steps are counted all the same. */
static void nothing_to_update(void)
{
    model *m = model_new(0, 0);
    const fst_gpu_counts before = fst_gpu_counted();
    CHECK_INT(model_set(m, NULL, &status), FST_OK);
    CHECK_INT(model_launch(m, &status), FST_OK);
    const fst_norm_launch norm = {.power = m->tag};
    const fst_unscale_launch unscale = {.factor = m->tag};
    CHECK_INT(fst_gpu_norm(m->tables, &norm, &status), FST_OK);
    CHECK_INT(fst_gpu_unscale(m->tables, &unscale, &status), FST_OK);
    CHECK_INT((int64_t)since(before).launches, 3); /* no update */
    expected[m->tag].launched = 3;
    models_finish();
    model_free(m);
}

static void too_many_dimensions(void)
{
    model *m = model_new(0, 3);
    fst_layout nine = {.ndim = 9};
    steps(m, 1, NULL);
    for (int d = 0; d < 9; d++)
        nine.shape[d] = nine.stride[d] = 1;
    m->plan.operands[FST_OP_GRAD].layout = &nine;
    const fst_work work = fst_plan_work(&m->plan);
    CHECK_INT(fst_gpu_tables_set(m->tables, &work, NULL, NULL, &status), FST_UNSUPPORTED);
    CHECK_CONTAINS(status.message, "9 dimensions");
    status = (fst_status){0};
    CHECK_INT(model_launch(m, &status), FST_BAD_VALUE); /* nothing is set */
    status = (fst_status){0};
    steps(m, 2, NULL);
    models_finish();
    model_free(m);
    nothing_lives();
}

int main(void)
{
    use_test_kernels();
    still_tensors();
    moving_tensors();
    changing_lists();
    two_devices();
    explicit_passes();
    images();
    nothing_to_update();
    too_many_dimensions();
    CHECK(kernels_ran > 1000);
    return check_report();
}
