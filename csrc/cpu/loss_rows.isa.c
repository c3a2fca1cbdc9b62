/* Cross-entropy of rows of logits. Compiled once per instruction set, as kernels.isa.c.
 *
 * A row is read in strips that stay in the first-level cache. A first pass keeps the largest logit
 * so far and the sum of exponentials relative to it. A second one writes the gradient. */
#include "base/portable.h"
#include "base/stream.h"
#include "cpu/isa.h"
#include "rules/cross_entropy.h"

#define ALIGNED __attribute__((aligned(64)))
#define LOOP __attribute__((noinline)) static
enum { LANES = FST_LOSS_LANES, STRIP = FST_LOSS_STRIP };

static float folded(float *lanes)
{
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t j = 0; j < half; j++)
            lanes[j] += lanes[half + j];
    return lanes[0];
}

/* The loops take a multiple of LANES. A NaN is no maximum; it shows in the sum. */
LOOP float fst_loop_loss_max(size_t n, const float *restrict x)
{
    float lanes[LANES] ALIGNED;
    memcpy(lanes, x, sizeof lanes);
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < LANES; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t j = 0; j < half; j++)
            lanes[j] = lanes[half + j] > lanes[j] ? lanes[half + j] : lanes[j];
    return lanes[0] > -INFINITY ? lanes[0] : -INFINITY;
}

LOOP float fst_loop_loss_sum(size_t n, const float *restrict x, float most)
{
    float lanes[LANES] ALIGNED = {0.0f};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < LANES; j++)
            lanes[j] += fst_softmax_exp(x[i + j] - most);
    return folded(lanes);
}

/* The sum of n logits relative to `most`. */
LOOP float fst_loop_loss_distance(size_t n, const float *restrict x, float most)
{
    float lanes[LANES] ALIGNED = {0.0f};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < LANES; j++)
            lanes[j] += x[i + j] - most;
    return folded(lanes);
}

/* The same for any number of logits. */
static double distance_of(size_t n, const float *x, float most)
{
    const size_t whole = n / LANES * LANES;
    double sum = whole ? (double)fst_loop_loss_distance(whole, x, most) : 0.0;
    for (size_t i = whole; i < n; i++)
        sum += (double)(x[i] - most);
    return sum;
}

LOOP void fst_loop_loss_slope(size_t n, float *restrict to, const float *restrict x, float most,
                              float factor, float share)
{
    for (size_t i = 0; i < n; i += LANES)
        for (size_t j = 0; j < LANES; j++)
            to[i + j] = fst_softmax_exp(x[i + j] - most) * factor - share;
}

static void convert(fst_number from, fst_dtype to, char *restrict out, const char *restrict in,
                    size_t count)
{
    const fst_float_form form = {.from = from, .to = to};
    if (from == FST_OF_F32 && to == FST_F32)
        memcpy(out, in, count * sizeof(float));
    else
        FST_OF_ISA(fst_floats)(&form, out, in, 0, count);
}

static fst_number number_of(fst_dtype dtype)
{
    return dtype == FST_BF16 ? FST_OF_BF16 : dtype == FST_F16 ? FST_OF_F16 : FST_OF_F32;
}

/* Logits [first, first + n) of a row as floats, filled up with -inf to a multiple of LANES. They
 * are copied to `scratch` unless they can be read where they are. */
static const float *strip_of(const fst_loss_batch *b, int64_t row, size_t first, size_t n,
                             float *scratch)
{
    const char *from =
        b->logits + (size_t)(row * b->stride + (int64_t)first) * fst_dtype_size(b->dtype);
    if (b->dtype == FST_F32 && n % LANES == 0)
        return (const float *)(const void *)from;
    convert(number_of(b->dtype), FST_F32, (char *)scratch, from, n);
    for (size_t i = n; i % LANES; i++)
        scratch[i] = -INFINITY;
    return scratch;
}

static size_t filled(size_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}

static float logit_at(const fst_loss_batch *b, int64_t row, int64_t at)
{
    float logit;
    const size_t size = fst_dtype_size(b->dtype);
    convert(number_of(b->dtype), FST_F32, (char *)&logit,
            b->logits + (size_t)(row * b->stride + at) * size, 1);
    return logit;
}

/* Adds up the row. */
static fst_loss_row row_of(const fst_loss_batch *b, int64_t row)
{
    const size_t classes = (size_t)b->classes;
    fst_loss_row so_far = fst_loss_start();
    float scratch[STRIP] ALIGNED;
    for (size_t first = 0; first < classes; first += STRIP) {
        const size_t n = classes - first < STRIP ? classes - first : STRIP;
        const float *x = strip_of(b, row, first, n, scratch);
        const float most = fst_loop_loss_max(filled(n), x);
        const float from = fst_loss_origin(fst_loss_larger(so_far.most, most));
        const double sum = (double)fst_loop_loss_sum(filled(n), x, from);
        const double distance = b->smoothing != 0.0 ? distance_of(n, x, from) : 0.0;
        fst_loss_add(&so_far, most, sum, distance, (int64_t)first);
    }
    return so_far;
}

static void fill(const fst_loss_batch *b, char *to, float value)
{
    float strip[LANES];
    for (size_t j = 0; j < LANES; j++)
        strip[j] = value;
    for (size_t first = 0; first < (size_t)b->classes; first += LANES) {
        const size_t left = (size_t)b->classes - first;
        convert(FST_OF_F32, b->dtype, to + first * fst_dtype_size(b->dtype), (char *)strip,
                left < LANES ? left : LANES);
    }
}

/* The row is in the second-level cache by now. */
static void slope_row(const fst_loss_batch *b, int64_t row, int64_t target, fst_loss_found found,
                      int streams)
{
    const size_t classes = (size_t)b->classes, size = fst_dtype_size(b->dtype);
    char *to = b->slope + (size_t)row * classes * size;
    if (target == b->ignored || !(found.factor == found.factor)) {
        fill(b, to, found.factor);
        return;
    }
    float scratch[STRIP] ALIGNED, out[STRIP] ALIGNED;
    for (size_t first = 0; first < classes; first += STRIP) {
        const size_t n = classes - first < STRIP ? classes - first : STRIP;
        const float *x = strip_of(b, row, first, n, scratch);
        fst_loop_loss_slope(filled(n), out, x, found.most, found.factor, found.share);
        if ((size_t)target - first < n)
            out[(size_t)target - first] -= found.of_target;
        if (streams && b->dtype == FST_F32)
            fst_stream_copy(to + first * size, (const char *)out, n * size);
        else
            convert(FST_OF_F32, b->dtype, to + first * size, (const char *)out, n);
    }
}

static void run_row(const fst_loss_batch *b, int64_t row, int streams)
{
    const int64_t target = fst_loss_class(b, row); /* read once */
    const fst_loss_row so_far = row_of(b, row);
    const int counts = target != b->ignored;
    const fst_loss_target of_row = {.logit = counts ? logit_at(b, row, target) : 0.0f,
                                    .weight = fst_loss_weight(b, target),
                                    .counts = counts,
                                    .smoothing = b->smoothing,
                                    .factor = b->factor,
                                    .classes = b->classes};
    const fst_loss_found found = fst_loss_finish(&so_far, &of_row);
    b->losses[row] = found.loss;
    b->likelihoods[row] = found.likelihood;
    if (b->slope)
        slope_row(b, row, target, found, streams);
}

void FST_OF_ISA(fst_loss_rows)(const fst_loss_batch *b, int64_t begin, int64_t end)
{
    const int streams = (double)b->rows * (double)b->classes * 4.0 >= (double)FST_STREAM_BYTES;
    for (int64_t row = begin; row < end; row++)
        run_row(b, row, streams);
    if (streams && b->slope)
        fst_stream_end();
}
