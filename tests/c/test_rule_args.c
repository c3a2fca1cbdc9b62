/* Powers, which rules need of the step count, and room for what a rule has. */
#include "common.h"
#include "core/rule_args.h"

static void the_arrays_of_a_step_have_room(void)
{
    for (unsigned i = 0; i < FST_RULE_COUNT; i++) {
        CHECK(fst_rules[i].states <= FST_MAX_STATES);
        CHECK(fst_rules[i].hyper_count + fst_numbers_count((int32_t)i) <= FST_MAX_HYPER);
    }
}

/* The error of n squarings and products is a few n units in the last place. */
static void whole_powers(void)
{
    static const double bases[] = {0.0, 0.5, 0.9, 0.999, 0.999999, 1.0, 1.0 + 1e-7, 2.0, -0.5};
    static const double exponents[] = {0, 1, 2, 3, 7, 10, 100, 1000, 65535, 1e6, 0x1p31 + 3};
    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++)
        for (size_t k = 0; k < sizeof exponents / sizeof exponents[0]; k++) {
            const double want = (double)powl((long double)bases[i], (long double)exponents[k]);
            const double error = (exponents[k] + 1.0) * 0x1p-52 * fabs(want);
            if (want == 0.0 || fabs(want) > 1e-290)
                CHECK_NEAR(fst_pow_whole(bases[i], exponents[k]), want, error);
            else
                CHECK(fabs(fst_pow_whole(bases[i], exponents[k])) < 1e-280);
        }
    CHECK(fst_pow_whole(0.0, 0.0) == 1.0);
    CHECK(fst_pow_whole(0.5, 60.0) == 0x1p-60);
    CHECK(fst_pow_whole(-2.0, 63.0) == -0x1p63);
    CHECK(fst_pow_whole(2.0, 0x1p31) == INFINITY);
}

/* The error of e^(y log x) is some y log x units in the last place. */
static void any_powers(void)
{
    static const double bases[] = {0x1p-1040, 1e-300,     1e-9,   0.3, 0.7,    0.96, 1.0 - 0x1p-53,
                                   1.0,       1.0 + 1e-9, 1.4143, 2.0, 1234.5, 1e17, 1e308};
    static const double exponents[] = {-700.3, -3.0, -0.75, -1e-9, 0.0,  1e-12,  0.004,
                                       0.5,    0.75, 1.0,   3.0,   12.7, 100.25, 4000.004};
    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++)
        for (size_t k = 0; k < sizeof exponents / sizeof exponents[0]; k++) {
            const double got = fst_pow(bases[i], exponents[k]);
            const double want = (double)powl((long double)bases[i], (long double)exponents[k]);
            const double size = fabs(exponents[k] * log(bases[i])) + fabs(exponents[k]) + 4.0;
            if (want > 1e-290 && want < INFINITY)
                CHECK_NEAR(got, want, size * 0x1p-52 * want);
            else
                CHECK(want > 1.0 ? got > 1e300 : got >= 0.0 && got < 1e-280);
        }
    CHECK(fst_pow(-2.0, 3.0) == -8.0 && fst_pow(-2.0, -1.0) == -0.5 && isnan(fst_pow(-2.0, 0.5)));
    CHECK(fst_pow(0.0, 0.5) == 0.0 && fst_pow(0.0, -0.5) == INFINITY);
    CHECK(fst_pow(INFINITY, 0.5) == INFINITY && fst_pow(INFINITY, -0.5) == 0.0);
    CHECK(isnan(fst_pow(NAN, 0.5)) && isnan(fst_pow(0.5, NAN)));
    CHECK(fst_pow(0.5, INFINITY) == 0.0 && fst_pow(2.0, INFINITY) == INFINITY);
}

int main(void)
{
    the_arrays_of_a_step_have_room();
    whole_powers();
    any_powers();
    return check_report();
}
