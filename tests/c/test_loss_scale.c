/* The dynamic loss scale against a slow reference, and the clip coefficient. */
#include <float.h>

#include "common.h"
#include "rules/loss_scale.h"

typedef struct {
    float scale;
    int32_t growth_tracker, hysteresis_left;
} state;

/* What happens in one update, in the words of the documentation. */
static state expected(state s, int overflow, const fst_loss_scale_args *a)
{
    double next = (double)s.scale;
    if (overflow) {
        s.growth_tracker = 0;
        s.hysteresis_left -= 1;
        if (s.hysteresis_left <= 0)
            next = next * a->backoff_factor;
    } else {
        s.growth_tracker += 1;
        if (s.growth_tracker == a->growth_interval) {
            s.growth_tracker = 0;
            s.hysteresis_left = a->hysteresis;
            if ((float)(next * a->growth_factor) <= FLT_MAX)
                next = next * a->growth_factor;
        }
    }
    s.scale = (float)fmin(fmax((double)(float)next, (double)(float)a->min_scale),
                          (double)(float)a->max_scale);
    return s;
}

static state updated(state s, float found_inf, const fst_loss_scale_args *a)
{
    fst_loss_scale_update(&s.scale, &s.growth_tracker, &s.hysteresis_left, found_inf, a);
    return s;
}

static int same(state a, state b)
{
    return a.scale == b.scale && a.growth_tracker == b.growth_tracker &&
           a.hysteresis_left == b.hysteresis_left;
}

/* Long runs with overflows now and then, over all settings. */
static void follows_the_reference(void)
{
    static const double growths[] = {2.0, 1.5, 1e30}, backoffs[] = {0.5, 0.3};
    static const double bounds[][2] = {
        {0.0, INFINITY}, {1.0, 65536.0}, {128.0, 128.0}, {1e-3, 1e38}, {0.1, 7.7}};
    static const float starts[] = {65536.0f, 1.0f, 3e38f, 0x1p-149f};
    static const int32_t intervals[] = {1, 2, 7, 2000};
    for (unsigned k = 0; k < 3 * 2 * 5 * 4 * 4 * 3; k++) {
        const fst_loss_scale_args a = {growths[k % 3],         backoffs[k / 3 % 2],
                                       bounds[k / 6 % 5][0],   bounds[k / 6 % 5][1],
                                       intervals[k / 120 % 4], 1 + (int32_t)(k / 480)};
        state got = {starts[k / 30 % 4], 0, a.hysteresis}, want = got;
        int equal = 1;
        for (int step = 0; step < 300; step++) {
            const int overflow = random_below(k % 7 + 2) == 0;
            got = updated(got, overflow ? 1.0f : 0.0f, &a);
            want = expected(want, overflow, &a);
            equal = equal && same(got, want);
        }
        CHECK(equal);
        CHECK(isfinite(got.scale));
    }
}

/* One row per sentence of the contract. */
static void known_updates(void)
{
    const fst_loss_scale_args plain = {2.0, 0.5, 0.0, INFINITY, 3, 1};
    const fst_loss_scale_args patient = {2.0, 0.5, 0.0, INFINITY, 3, 2};
    const fst_loss_scale_args bounded = {2.0, 0.5, 4.0, 16.0, 1, 1};
    static const float found[] = {1.0f, 2.0f, -1.0f, INFINITY, NAN, 0x1p-149f};
    CHECK(same(updated((state){8.0f, 0, 1}, 0.0f, &plain), (state){8.0f, 1, 1}));
    CHECK(same(updated((state){8.0f, 2, 1}, 0.0f, &plain), (state){16.0f, 0, 1}));
    CHECK(same(updated((state){8.0f, 2, 1}, -0.0f, &plain), (state){16.0f, 0, 1}));
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) /* the sum over devices: not 0 */
        CHECK(same(updated((state){8.0f, 2, 1}, found[i], &plain), (state){4.0f, 0, 0}));
    /* the first of two overflows is forgiven, the second and third are not, growth forgives again
     */
    CHECK(same(updated((state){8.0f, 2, 2}, 1.0f, &patient), (state){8.0f, 0, 1}));
    CHECK(same(updated((state){8.0f, 0, 1}, 1.0f, &patient), (state){4.0f, 0, 0}));
    CHECK(updated((state){4.0f, 0, 0}, 1.0f, &patient).scale == 2.0f);
    CHECK(same(updated((state){8.0f, 2, 1}, 0.0f, &patient), (state){16.0f, 0, 2}));
    /* a scale that fp32 cannot hold is not taken; the count starts again all the same */
    CHECK(same(updated((state){0x1p127f, 2, 1}, 0.0f, &plain), (state){0x1p127f, 0, 1}));
    CHECK(same(updated((state){0x1p126f, 2, 1}, 0.0f, &plain), (state){0x1p127f, 0, 1}));
    CHECK(updated((state){16.0f, 0, 1}, 0.0f, &bounded).scale == 16.0f);
    CHECK(updated((state){4.0f, 0, 1}, 1.0f, &bounded).scale == 4.0f);
    CHECK(updated((state){1e9f, 0, 1}, 0.0f, &bounded).scale == 16.0f);
    CHECK(updated((state){0.5f, 0, 1}, 1.0f, &bounded).scale == 4.0f);
    /* a tracker beyond the interval, which the user may have lowered, never meets it */
    CHECK(same(updated((state){8.0f, 5, 1}, 0.0f, &plain), (state){8.0f, 6, 1}));
}

static void clip_coefficients(void)
{
    static const double norms[] = {1e-300, 1e-6, 0.5, 1.0, 1.0 + 1e-6, 2.0, 1e19, 1e300};
    static const double limits[] = {1e-3, 0.5, 1.0, 1e10};
    for (size_t i = 0; i < sizeof norms / sizeof norms[0]; i++)
        for (size_t k = 0; k < sizeof limits / sizeof limits[0]; k++) {
            const double got = fst_clip_coefficient(norms[i], limits[k]);
            CHECK(got == fmin(1.0, limits[k] / (norms[i] + 1e-6)));
            CHECK(got * norms[i] <= limits[k]);
        }
    CHECK(fst_clip_coefficient(0.0, 1.0) == 1.0);
    CHECK(fst_clip_coefficient(0.0, 0.0) == 0.0);
    CHECK(fst_clip_coefficient(3.0, 0.0) == 0.0);
    CHECK(fst_clip_coefficient(INFINITY, 1.0) == 0.0);
    CHECK(fst_clip_coefficient(5.0, INFINITY) == 1.0);
    CHECK(fst_clip_coefficient(2.0 - 1e-6, -4.0) == -2.0); /* as torch: the sign goes through */
    CHECK(isnan(fst_clip_coefficient(NAN, 1.0)));
    CHECK(isnan(fst_clip_coefficient(1.0, NAN)));
    CHECK(isnan(fst_clip_coefficient(INFINITY, INFINITY)));
}

int main(void)
{
    follows_the_reference();
    known_updates();
    clip_coefficients();
    return check_report();
}
