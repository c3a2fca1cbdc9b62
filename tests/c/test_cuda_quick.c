/* Roots and quotients by the quick way of the kernels: the bits of sqrtf and / or, where these are
 * not sure, NaN; and never NaN for the numbers of ordinary training. */
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
        const uint32_t inverse = fst_bits_of_f32(fst_inverse_root(x)) + (uint32_t)(i % 3) - 1u;
        const float root = fst_root_from(x, fst_f32_of_bits(inverse));
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
    CHECK(same(fst_quick_sqrt(0.0f), 0.0f) && same(fst_quick_sqrt(-0.0f), -0.0f));
    CHECK(same(fst_quick_divide(0.0f, 1e-8f), 0.0f) && same(fst_quick_divide(-0.0f, 1e-8f), -0.0f));
    CHECK(isnan(fst_quick_sqrt(-1.0f)) && isnan(fst_quick_divide(0.0f, 0.0f)));
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
    return check_report();
}
