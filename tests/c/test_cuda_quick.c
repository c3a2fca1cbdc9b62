/* Roots, quotients and descents by the quick ways of the kernels: the bits of sqrtf and / or, where
 * these are not sure, NaN or too small a parameter; and never for the numbers of ordinary training.
 * The simulated hardware's inverse is off in its last place. */
#define SIMT_KERNELS
#include "simt.h"

#include "../../cuda/quick_math.h"
#include "check.h"
#include "common.h"

static int same(float got, float want)
{
    return fst_bits_of_f32(got) == fst_bits_of_f32(want);
}

/* Of every mantissa, for an even and an odd exponent. */
static void every_root(void)
{
    long wrong = 0;
    for (uint32_t bits = 127u << 23; bits < 129u << 23; bits++) {
        const float x = fst_f32_of_bits(bits);
        wrong += !same(fst_quick_sqrt(x), sqrtf(x));
    }
    CHECK_INT(wrong, 0);
}

/* The inverse may be off in its last place, as the hardware's is. */
static void quotients(void)
{
    long wrong = 0;
    for (int i = 0; i < 4000000; i++) {
        const float x = (float)(1.0 + 0.5 * (1.0 + random_unit()));
        const float y = (float)(1.0 + 0.5 * (1.0 + random_unit()));
        const uint32_t inverse = fst_bits_of_f32(1.0f / y) + (uint32_t)(i % 3) - 1u;
        wrong += !same(fst_quotient_from(x, y, fst_f32_of_bits(inverse)), x / y);
    }
    CHECK_INT(wrong, 0);
}

/* All exponents, zeros, infinities and NaNs. */
static float any_float(void)
{
    static const uint32_t special[] = {0,           0x80000000u, 1,           0x80000001u,
                                       0x007FFFFFu, 0x00800000u, 0x7F7FFFFFu, 0x7F800000u,
                                       0xFF800000u, 0x7FC00000u};
    const uint32_t bits = (uint32_t)random_below(1u << 31) << 1 | (uint32_t)random_below(2);
    return fst_f32_of_bits(
        random_below(8) ? bits : special[random_below(sizeof special / sizeof *special)]);
}

static void any_size(void)
{
    long wrong_roots = 0, wrong_quotients = 0, zeros = 0;
    for (int i = 0; i < 4000000; i++) {
        const float x = any_float(), y = fabsf(any_float());
        const float nearest = fst_inverse_root_or_most(x);
        const uint32_t off = isfinite(nearest) ? (uint32_t)(i % 3) - 1u : 0;
        const float root = fst_root_from(x, fst_f32_of_bits(fst_bits_of_f32(nearest) + off));
        const float quotient = fst_quick_divide(x, y);
        wrong_roots += !isnan(root) && !same(root, sqrtf(x));
        wrong_quotients += !isnan(quotient) && !same(quotient, x / y);
        zeros += x == 0.0f && y >= 0x1p-126f && y <= 0x1p126f && isnan(quotient);
    }
    CHECK_INT(wrong_roots, 0);
    CHECK_INT(wrong_quotients, 0);
    CHECK_INT(zeros, 0);
}

/* What lies around the bounds that quick_math.h names. */
static void around(float bound)
{
    for (int places = -4; places <= 4; places++) {
        const float x = fst_f32_of_bits(fst_bits_of_f32(bound) + (uint32_t)places);
        const float root = fst_quick_sqrt(x);
        CHECK(isnan(root) || same(root, sqrtf(x)));
        for (int i = 0; i < 20000; i++) {
            const float y =
                (float)ldexp(1.0 + 0.5 * (1.0 + random_unit()), (int)random_below(252) - 126);
            const float sign = i % 2 ? -1.0f : 1.0f, first = fst_quick_divide(sign * x, y);
            const float second = fst_quick_divide(sign * y, x);
            CHECK(isnan(first) || same(first, sign * x / y));
            CHECK(isnan(second) || same(second, sign * y / x));
        }
    }
}

static void ordinary(void)
{
    for (int i = 0; i < 200000; i++) {
        const float x = (float)ldexp(1.0 + random_unit() * 0.5, (int)random_below(98) - 49);
        CHECK(!isnan(fst_quick_sqrt(x * x)));
        CHECK(!isnan(fst_quick_divide(i % 2 ? x : -x, (float)(1e-8 + fabs(random_unit())))));
    }
    CHECK(same(fst_quick_sqrt(0.0f), 0.0f) && isnan(fst_quick_sqrt(-0.0f)));
    CHECK(same(fst_quick_divide(0.0f, 1e-8f), 0.0f) && same(fst_quick_divide(-0.0f, 1e-8f), -0.0f));
    CHECK(isnan(fst_quick_sqrt(-1.0f)) && isnan(fst_quick_divide(0.0f, 0.0f)));
}

/* What FST_DESCEND stands for, by sqrtf and /. */
static float exact_descent(float p, float size, float x, float v, float eps)
{
    return p - size * (x / (sqrtf(v) + eps));
}

static int is_sure(float p, float x)
{
    return fabsf(p) >= FST_QUICK_MIN || (p == 0.0f && x == 0.0f);
}

static float any_eps(void)
{
    static const float some[] = {1e-8f,    1e-15f,   1e-4f,           1.0f, 0x1p-60f,
                                 0x1p-61f, 0x1.8p0f, 0x1.fffffep-61f, 0.0f, -1.0f};
    return random_below(4) ? some[random_below(sizeof some / sizeof *some)] : fabsf(any_float());
}

/* A number whose size is near that of another one, where rounding shows. */
static float near(float x)
{
    return x * (float)ldexp(1.0 + 0.5 * random_unit(), (int)random_below(64) - 32);
}

/* Operands of any size, and such that what is hidden is as large as it may be. */
static void descents(void)
{
    long wrong = 0, sure = 0;
    for (int i = 0; i < 8000000; i++) {
        const float eps = any_eps(), size = random_below(4) ? near(eps * 0x1p20f) : any_float();
        const float x = i % 2 ? near(random_below(2) ? 0x1p-100f : 1.0f) : any_float();
        const float v = i % 3 ? x * x : any_float();
        const float step = size * (x / (sqrtf(v) + eps));
        const float p = random_below(4) ? near(i % 5 ? step : FST_QUICK_MIN) : any_float();
        const float got = fst_quick_descent(p, size, x, v, eps);
        sure += is_sure(got, x);
        wrong += is_sure(got, x) && !same(got, exact_descent(p, size, x, v, eps));
    }
    CHECK_INT(wrong, 0);
    CHECK(sure > 500000);
}

/* A quotient that may be inexact changes nothing, at the bounds of eps and size and for parameters
 * that are just large enough. */
static void hidden_descents(void)
{
    static const float bounds[] = {0x1p-58f, 0x1p-31f, 1.0f};
    long wrong = 0;
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        for (int k = 0; k < 300000; k++) {
            const float eps = bounds[i], size = (eps - 0x1p-60f) * (k % 2 ? 0x1p40f : -0x1p40f);
            const int root = k % 4 < 2 ? 0 : (int)random_below(35);
            const int small = root - 101 - (int)random_below(49);
            const float x = (float)ldexp(1.0 + 0.5 * (1.0 + random_unit()), small);
            const float v = root ? (float)ldexp(1.0, 2 * root) : 0.0f;
            const float p = FST_QUICK_MIN + (float)random_below(4) * 0x1p-55f;
            const float got = fst_quick_descent(k % 8 < 4 ? p : -p, size, x, v, eps);
            wrong += !same(fabsf(got), p);
        }
    CHECK_INT(wrong, 0);
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, 1.0f, 1.0f, 0x1p-61f)));
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, 1.0f, 1.0f, 0x1p-41f)));
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, 1.0f, 1.0f, 1.5f)));
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, 1.0f, INFINITY, 1e-8f)));
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, 1.0f, -1.0f, 1e-8f)));
    CHECK(isnan(fst_quick_descent(1.0f, 1.0f, INFINITY, 1.0f, 1e-8f)));
}

/* As in training: also where neither gradients nor moments ever were. */
static void ordinary_descents(void)
{
    for (int i = 0; i < 200000; i++) {
        const float m = i % 8 ? (float)random_unit() : 0.0f, v = i % 16 ? m * m : 0.0f;
        const float p = (float)(1e-6 + fabs(random_unit()));
        const float got = fst_quick_descent(p, 1e-3f, 1e-3f * m, v, 1e-8f);
        CHECK(isfinite(got) && same(got, exact_descent(p, 1e-3f, 1e-3f * m, v, 1e-8f)));
    }
    CHECK(same(fst_quick_descent(0.0f, 1e-3f, 0.0f, 0.0f, 1e-8f), 0.0f));
    CHECK(same(fst_quick_descent(-0.0f, 1e-3f, 0.0f, 0.0f, 1e-8f), -0.0f));
    CHECK(same(fst_quick_descent(-0.0f, 1e-3f, -0.0f, 0.0f, 1e-8f), 0.0f));
}

/* Each part of what a thread looks at. */
static void exceptions(void)
{
    for (unsigned q = 0; q < 8; q++) {
        float p[8] = {1.0f, -1.0f, FST_QUICK_MIN, -FST_QUICK_MIN, INFINITY, 1e-9f, 2.0f, 3.0f};
        float g[8] = {0.0f}, moment[8] = {0.0f};
        CHECK(fst_all_large(p, 1) && !fst_all_large(p, 0) && fst_others_zero(p, g, moment));
        p[q] = -0.0f;
        CHECK(!fst_all_large(p, 1) && fst_others_zero(p, g, moment));
        moment[q] = 0x1p-149f;
        CHECK(!fst_others_zero(p, g, moment));
        moment[q] = 0.0f;
        g[q] = -0x1p-149f;
        CHECK(!fst_others_zero(p, g, moment));
        g[q] = 0.0f;
        p[q] = 0x1p-33f;
        CHECK(!fst_all_large(p, 1) && !fst_others_zero(p, g, moment));
        p[q] = NAN;
        CHECK(!fst_all_large(p, 1) && !fst_others_zero(p, g, moment));
    }
}

int main(void)
{
    static const float bounds[] = {0x1p-126f, 0x1p-101f, 0x1p-100f, 0x1p-63f, 0x1p100f, 0x1p126f};
    every_root();
    quotients();
    any_size();
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        around(bounds[i]);
    ordinary();
    descents();
    hidden_descents();
    ordinary_descents();
    exceptions();
    return check_report();
}
