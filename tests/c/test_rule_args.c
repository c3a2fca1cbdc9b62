/* Powers, and the arguments of a rule that depend on the step by more than test_kernels.c sees. */
#include "common.h"
#include "core/rule_args.h"

static void the_arrays_of_a_step_have_room(void)
{
    for (unsigned i = 0; i < FST_RULE_COUNT; i++) {
        const unsigned numbers = fst_numbers_count((int32_t)i);
        CHECK(fst_rules[i].states <= FST_MAX_STATES);
        CHECK(fst_rules[i].hyper_count + numbers <= FST_MAX_HYPER);
        CHECK(numbers == (i == FST_RULE_nadam ? 1u : i == FST_RULE_asgd ? 2u : 0u));
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

static fst_rule_args filled(fst_rule rule, int wide, const double *hyper, double step)
{
    fst_update_args args = {.rule = rule, .wide = wide};
    fst_rule_fill_args(&args, hyper, step);
    return args.rule_args;
}

/* fp32 scalars are those of fp64, rounded once. */
#define ROUNDED(narrow, wide, field) CHECK((narrow).field == (float)(wide).field)

static void scalars_that_depend_on_the_step(void)
{
    const double adagrad[FST_MAX_HYPER] = {0.1, 0.5, 0.01, 1e-10};
    const double adamax[FST_MAX_HYPER] = {0.1, 0.5, 0.25, 1e-8, 0.0};
    CHECK_NEAR(filled(FST_RULE_adagrad, 1, adagrad, 1.0).adagrad_f64.lr, 0.1, 0.0);
    CHECK_NEAR(filled(FST_RULE_adagrad, 1, adagrad, 5.0).adagrad_f64.lr, 0.1 / 3.0, 0.0);
    CHECK_NEAR(filled(FST_RULE_adamax, 1, adamax, 2.0).adamax_f64.step_size, 0.1 / 0.75, 0.0);
    for (int step = 1; step < 20; step++) {
        const double radam[FST_MAX_HYPER] = {0.1, 0.5, 0.999, 1e-8, 0.1, step % 2};
        const radam_args_f64 a = filled(FST_RULE_radam, 1, radam, step).radam_f64;
        const double t = step, power2 = pow(0.999, t), power1 = pow(0.5, t);
        const double length = 1999.0 - 2.0 * t * power2 / (1.0 - power2);
        const double factor = (length - 4.0) * (length - 2.0) * 1999.0 / (1995.0 * 1997.0 * length);
        const double size = step < 6 ? 0.1 : 0.1 * sqrt(factor * (1.0 - power2));
        CHECK_NEAR(a.step_size, size / (1.0 - power1), 1e-9 * size);
        CHECK(a.eps == (step < 6 ? -1.0 : 1e-8)); /* the length passes 5 at the sixth step */
        CHECK(a.keep == (step % 2 ? 1.0 - 0.1 * 0.1 : 1.0) && a.l2 == (step % 2 ? 0.0 : 0.1));
    }
}

/* The product of all mu, rounded as it is held; mu is rounded to fp32 first if that is narrower. */
static void numbers_of_nadam(void)
{
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++) {
        double product = 1.0;
        fst_numbers held = {.value = {1.0, 0.0}, .dtype = {dtype, 0}};
        for (int step = 1; step < 9; step++) {
            double hyper[FST_MAX_HYPER] = {0.1, 0.9, 0.5, 1e-8, 0.2, step % 2, 0.3};
            const double mu = 0.9 * (1.0 - 0.5 * pow(0.96, step * 0.3));
            const double later = 0.9 * (1.0 - 0.5 * pow(0.96, (step + 1) * 0.3));
            product = fst_number_rounded(product * (dtype == FST_F64 ? mu : (float)mu), dtype);
            held = fst_rule_next_numbers(FST_RULE_nadam, held, hyper, step);
            CHECK_NEAR(held.value[0], product, 1e-15);
            CHECK(hyper[FST_NUMBER(0)] == held.value[0] && hyper[6] == 0.3);
            const nadam_args_f64 a = filled(FST_RULE_nadam, 1, hyper, step).nadam_f64;
            const nadam_args_f32 b = filled(FST_RULE_nadam, 0, hyper, step).nadam_f32;
            const double root = sqrt(1.0 - pow(0.5, step));
            CHECK_NEAR(a.gradient_size, 0.1 * (1.0 - mu) / (1.0 - product) * root, 1e-14);
            CHECK_NEAR(a.moment_size, 0.1 * later / (1.0 - product * later) * root, 1e-14);
            CHECK_NEAR(a.eps, 1e-8 * root, 1e-20);
            CHECK(a.keep == (step % 2 ? 1.0 - 0.1 * 0.2 : 1.0) && a.l2 == (step % 2 ? 0.0 : 0.2));
            ROUNDED(b, a, gradient_size);
            ROUNDED(b, a, moment_size);
            ROUNDED(b, a, one_minus_beta1);
            ROUNDED(b, a, one_minus_beta2);
            ROUNDED(b, a, keep);
            ROUNDED(b, a, l2);
            ROUNDED(b, a, eps);
        }
    }
}

/* eta and mu of the next step, in the precision of the step count and then in their own. */
static void numbers_of_asgd(void)
{
    for (int i = 0; i < 4; i++) {
        fst_numbers held = {.value = {0.1, 1.0}, .dtype = {FST_F64, FST_F64}, .wide_step = i % 2};
        if (i > 1)
            held.dtype[0] = held.dtype[1] = FST_BF16;
        for (int step = 1; step < 9; step++) {
            double hyper[FST_MAX_HYPER] = {0.1, 0.3, 0.75, 3.0, 0.2};
            const fst_numbers next = fst_rule_next_numbers(FST_RULE_asgd, held, hyper, step);
            const double eta = 0.1 / pow(1.0 + 0.3 * 0.1 * step, 0.75);
            const double mu = 1.0 / (step > 4 ? step - 3.0 : 1.0);
            const double wants[2] = {eta, mu};
            for (int k = 0; k < 2; k++) {
                const double want = i % 2 ? wants[k] : (double)(float)wants[k];
                CHECK_NEAR(next.value[k], fst_number_rounded(want, held.dtype[k]), 1e-16);
                CHECK(hyper[FST_NUMBER(k)] == held.value[k]);
            }
            const asgd_args_f64 a = filled(FST_RULE_asgd, 1, hyper, step).asgd_f64;
            const asgd_args_f32 b = filled(FST_RULE_asgd, 0, hyper, step).asgd_f32;
            CHECK(a.keep == 1.0 - 0.3 * held.value[0] && a.l2 == 0.2);
            CHECK(a.eta == held.value[0] && a.mu == held.value[1]);
            ROUNDED(b, a, keep);
            ROUNDED(b, a, eta);
            ROUNDED(b, a, mu);
            ROUNDED(b, a, l2);
            held = next;
        }
    }
}

int main(void)
{
    the_arrays_of_a_step_have_room();
    whole_powers();
    any_powers();
    numbers_of_nadam();
    numbers_of_asgd();
    scalars_that_depend_on_the_step();
    return check_report();
}
