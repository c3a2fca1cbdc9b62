/* The cross-entropy of rows: every instruction set, any cut of the rows among threads, and the
 * kernel on any number of blocks give the same bits. */
#include "core/loss_pass.h"
#include "device.h"
#include "rules/cross_entropy.h"

enum { MAX_ROWS = 7 };

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

typedef struct {
    float *losses, *likelihoods;
    char *slope;
    float loss[3]; /* and the factors */
} results;

typedef struct {
    fst_loss_batch batch;
    int mean;
    size_t item, elements; /* of the slope */
} loss;

static results results_new(const loss *m)
{
    const size_t rows = (size_t)m->batch.rows;
    return (results){must_alloc_poison(rows * sizeof(float)),
                     must_alloc_poison(rows * sizeof(float)),
                     must_alloc_poison(m->elements * m->item),
                     {NAN, NAN, NAN}};
}

static void results_free(results *r)
{
    free(r->losses);
    free(r->likelihoods);
    free(r->slope);
}

static void put(const loss *m, char *to, size_t at, float value)
{
    const uint16_t half =
        m->batch.dtype == FST_BF16 ? fst_f32_to_bf16(value) : fst_f32_to_f16(value);
    if (m->batch.dtype == FST_F32)
        memcpy(to + at * sizeof value, &value, sizeof value);
    else
        memcpy(to + at * sizeof half, &half, sizeof half);
}

/* Logits of exactly the size that is needed; a few are special. */
static void make(loss *m)
{
    static const int64_t sizes[] = {1,    31,   32,   33,   1000, 1024,  1025,
                                    4096, 4097, 8191, 8192, 8193, 33000, 131072 + 1500};
    static const float special[] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 0.0f};
    fst_loss_batch *b = &m->batch;
    *m = (loss){.mean = (int)random_below(2)};
    b->classes = sizes[random_below(sizeof sizes / sizeof *sizes)];
    b->rows = 1 + (int64_t)random_below(b->classes > 10000 ? 2 : MAX_ROWS);
    b->stride = b->classes + (int64_t)random_below(3);
    b->dtype = (fst_dtype[]){FST_F32, FST_BF16, FST_F16}[random_below(3)];
    b->smoothing = (double[]){0.0, 0.1, 1.0}[random_below(3)];
    b->ignored = random_below(2) ? -100 : 0;
    b->target_stride = 1 + (int64_t)random_below(2);
    m->item = fst_dtype_size(b->dtype);
    m->elements = (size_t)(b->rows * b->classes);
    const size_t elements = (size_t)((b->rows - 1) * b->stride + b->classes);
    char *logits = must_alloc(elements * m->item);
    for (size_t i = 0; i < elements; i++)
        put(m, logits, i, (float)(8.0 * random_unit() - 4.0));
    for (size_t i = random_below(4); i && random_below(2); i--)
        put(m, logits, random_below(elements), special[random_below(6)]);
    int64_t *target = must_alloc((size_t)(b->rows * b->target_stride) * sizeof *target);
    for (int64_t row = 0; row < b->rows * b->target_stride; row++)
        target[row] = random_below(4) ? (int64_t)random_below((size_t)b->classes) : b->ignored;
    float *weight = must_alloc((size_t)b->classes * sizeof *weight);
    for (int64_t i = 0; i < b->classes; i++)
        weight[i] = random_below(9) ? (float)random_unit() : 0.0f;
    b->logits = logits;
    b->target = target;
    b->weight = weight;
}

static void same(const loss *m, const results *got, const results *want, const char *who)
{
    const size_t rows = (size_t)m->batch.rows * sizeof(float);
    if (!CHECK(!memcmp(got->losses, want->losses, rows) &&
               !memcmp(got->likelihoods, want->likelihoods, rows) &&
               !memcmp(got->loss, want->loss, sizeof want->loss) &&
               (!m->batch.slope || !memcmp(got->slope, want->slope, m->elements * m->item))))
        fprintf(stderr, "    %s: %d rows of %d, dtype %d, smoothing %g, mean %d\n", who,
                (int)m->batch.rows, (int)m->batch.classes, (int)m->batch.dtype, m->batch.smoothing,
                m->mean);
}

/* NaN of one kind: which one a sum keeps is the compiler's choice. */
static void tidy(const loss *m, results *r)
{
    const size_t rows = (size_t)m->batch.rows;
    for (size_t i = 0; i < rows; i++) {
        r->losses[i] = r->losses[i] == r->losses[i] ? r->losses[i] : NAN;
        r->likelihoods[i] = r->likelihoods[i] == r->likelihoods[i] ? r->likelihoods[i] : NAN;
    }
    for (size_t i = 0; i < 3; i++)
        r->loss[i] = r->loss[i] == r->loss[i] ? r->loss[i] : NAN;
    for (size_t i = 0; m->batch.slope && i < m->elements; i++) {
        uint32_t bits = 0;
        memcpy(&bits, r->slope + i * m->item, m->item);
        const uint32_t infinite = m->batch.dtype == FST_F32    ? 0x7F800000
                                  : m->batch.dtype == FST_BF16 ? 0x7F80
                                                               : 0x7C00;
        if ((bits & (m->item == 4 ? 0x7FFFFFFFu : 0x7FFFu)) > infinite)
            put(m, r->slope, i, NAN);
    }
}

static void run_kernel(const loss *m, results *to, unsigned blocks)
{
    const fst_loss_batch *b = &m->batch;
    fst_cross_entropy_launch launch = {.logits = address_of(b->logits),
                                       .target = address_of(b->target),
                                       .weight = address_of(b->weight),
                                       .losses = address_of(to->losses),
                                       .likelihoods = address_of(to->likelihoods),
                                       .slope = b->slope ? address_of(to->slope) : 0,
                                       .loss = address_of(to->loss),
                                       .factors = address_of(to->loss + 1),
                                       .rows = b->rows,
                                       .classes = b->classes,
                                       .stride = b->stride,
                                       .target_stride = b->target_stride,
                                       .ignored = b->ignored,
                                       .smoothing = b->smoothing,
                                       .dtype = (int32_t)b->dtype,
                                       .mean = m->mean};
    device_launch(NULL, "fst_cross_entropy", blocks, &launch);
    launch.only_result = 1;
    device_launch(NULL, "fst_cross_entropy", 1 + (unsigned)random_below(2), &launch);
}

static void same_everywhere(void)
{
    fst_status status = {0};
    loss m;
    make(&m);
    const float *weight = m.batch.weight;
    if (random_below(2))
        m.batch.weight = NULL;
    const int sloped = random_below(4) != 0;
    results want = results_new(&m);
    for (size_t i = 0; i < level_count; i++) {
        results got = results_new(&m);
        fst_loss_batch batch = m.batch;
        batch.losses = got.losses;
        batch.likelihoods = got.likelihoods;
        batch.slope = sloped ? got.slope : NULL;
        const fst_loss_result result = {got.loss, got.loss + 1};
        fst_cpu = levels[i];
        CHECK_INT(fst_loss_run(&batch, m.mean, result, &status), FST_OK);
        m.batch.slope = batch.slope;
        tidy(&m, &got);
        if (i) {
            same(&m, &got, &want, levels[i]->name);
            results_free(&got);
        } else {
            results_free(&want);
            want = got;
        }
    }
    results got = results_new(&m);
    simt_shuffle_by(random_below(3));
    run_kernel(&m, &got, 1 + (unsigned)random_below(5));
    tidy(&m, &got);
    same(&m, &got, &want, "the kernel");
    results_free(&got);
    results_free(&want);
    free((void *)(uintptr_t)m.batch.logits);
    free((void *)(uintptr_t)m.batch.target);
    free((void *)(uintptr_t)weight);
}

/* By hand: two classes, and targets that are none. */
static void known_values(void)
{
    const float logits[] = {0.0f, 0.0f, 1.0f, 1.0f, 0.0f, 0.0f};
    const int64_t target[] = {0, -100, 2};
    loss m = {.batch = {.logits = (const char *)logits,
                        .rows = 2,
                        .classes = 2,
                        .stride = 2,
                        .dtype = FST_F32,
                        .target = target,
                        .target_stride = 1,
                        .ignored = -100},
              .mean = 1,
              .item = 4,
              .elements = 6};
    float losses[3], likelihoods[3], slope[6];
    results r = {losses, likelihoods, (char *)slope, {0.0f, 0.0f, 0.0f}};
    m.batch.slope = r.slope;
    run_kernel(&m, &r, 1);
    CHECK_NEAR(losses[0], 0.6931472, 1e-7);
    CHECK_NEAR(likelihoods[0], 0.5, 1e-7);
    CHECK_NEAR(slope[0], -0.5, 1e-7);
    CHECK_NEAR(slope[1], 0.5, 1e-7);
    CHECK(losses[1] == 0.0f && slope[2] == 0.0f && slope[3] == 0.0f);
    CHECK(r.loss[0] == losses[0] && r.loss[1] == 1.0f && r.loss[2] == 1.0f);
    m.batch.rows = 3;
    run_kernel(&m, &r, 2);
    CHECK(losses[2] != losses[2] && slope[4] != slope[4] && r.loss[0] != r.loss[0]);
}

int main(void)
{
    level_count = supported_levels(levels);
    for (int round = 0; round < 300; round++)
        same_everywhere();
    known_values();
    return check_report();
}
