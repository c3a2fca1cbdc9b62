/* The table of rules and the arguments that it reads in a step, against the formulas in long
 * double. */
#include "common.h"
#include "core/rule_args.h"

static void table_names_every_rule(void)
{
    static const char *const names[] = {"adam",
                                        "amsgrad",
                                        "sgd",
                                        "momentum",
                                        "lion",
                                        "adagrad",
                                        "rmsprop",
                                        "rmsprop_momentum",
                                        "rmsprop_centered",
                                        "rmsprop_centered_momentum",
                                        "adamax",
                                        "adadelta",
                                        "radam",
                                        "rprop",
                                        "nadam",
                                        "asgd"};
    static const unsigned states[] = {2, 3, 0, 1, 1, 1, 1, 2, 2, 3, 2, 2, 2, 2, 2, 1};
    static const char *const adam[] = {"lr",  "betas[0]",     "betas[1]",
                                       "eps", "weight_decay", "decoupled_weight_decay"};
    static const char *const sgd[] = {"lr", "momentum", "dampening", "weight_decay", "nesterov"};
    static const char *const lion[] = {"lr", "betas[0]", "betas[1]", "weight_decay"};
    static const char *const adagrad[] = {"lr", "lr_decay", "weight_decay", "eps"};
    static const char *const rmsprop[] = {"lr", "alpha", "eps", "weight_decay", "momentum"};
    static const char *const adamax[] = {"lr", "betas[0]", "betas[1]", "eps", "weight_decay"};
    static const char *const adadelta[] = {"lr", "rho", "eps", "weight_decay"};
    static const char *const rprop[] = {"lr", "etas[0]", "etas[1]", "step_sizes[0]",
                                        "step_sizes[1]"};
    static const char *const nadam[] = {"lr",
                                        "betas[0]",
                                        "betas[1]",
                                        "eps",
                                        "weight_decay",
                                        "decoupled_weight_decay",
                                        "momentum_decay"};
    static const char *const asgd[] = {"lr", "lambd", "alpha", "t0", "weight_decay"};
    static const char *const *const hyper[] = {adam,    adam,    sgd,     sgd,     lion,   adagrad,
                                               rmsprop, rmsprop, rmsprop, rmsprop, adamax, adadelta,
                                               adam,    rprop,   nadam,   asgd};
    static const unsigned counts[] = {6, 6, 5, 5, 4, 4, 5, 5, 5, 5, 5, 4, 6, 5, 7, 5};
    CHECK_INT(FST_RULE_COUNT, 16);
    for (unsigned i = 0; i < FST_RULE_COUNT; i++) {
        const fst_rule_entry *known = &fst_rules[i];
        CHECK(!strcmp(known->name, names[i]));
        CHECK_INT(known->states, states[i]);
        CHECK(known->states <= FST_MAX_STATES);
        CHECK_INT(known->hyper_count, counts[i]);
        CHECK(counts[i] + fst_numbers_count((int32_t)i) <= FST_MAX_HYPER);
        CHECK_INT(fst_numbers_count((int32_t)i), i == FST_RULE_nadam  ? 1
                                                 : i == FST_RULE_asgd ? 2
                                                                      : 0);
        for (unsigned k = 0; k < counts[i]; k++)
            CHECK(!strcmp(known->hyper[k], hyper[i][k]));
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

static void adam_scalars(fst_rule rule, double decoupled)
{
    static const double steps[] = {1, 2, 3, 10, 999, 1e5, 1e7};
    const double hyper[FST_MAX_HYPER] = {3e-4, 0.9, 0.999, 1e-8, 0.1, decoupled};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        const fst_rule_args both = filled(rule, 1, hyper, steps[i]),
                            f = filled(rule, 0, hyper, steps[i]);
        const adam_args_f64 a = rule == FST_RULE_adam ? both.adam_f64 : both.amsgrad_f64;
        const adam_args_f32 b = rule == FST_RULE_adam ? f.adam_f32 : f.amsgrad_f32;
        const long double root = sqrtl(1.0L - powl(0.999, (long double)steps[i]));
        const long double size = 3e-4L * root / (1.0L - powl(0.9, (long double)steps[i]));
        CHECK_NEAR(a.step_size, (double)size, 1e-12 * (double)size);
        CHECK_NEAR(a.eps, (double)(1e-8L * root), 1e-20);
        CHECK(a.beta1 == 0.9 && a.beta2 == 0.999);
        CHECK(a.one_minus_beta1 == 1.0 - 0.9 && a.one_minus_beta2 == 1.0 - 0.999);
        CHECK(a.keep == (decoupled != 0.0 ? 1.0 - 3e-4 * 0.1 : 1.0));
        CHECK(a.l2 == (decoupled != 0.0 ? 0.0 : 0.1));
        ROUNDED(b, a, beta1);
        ROUNDED(b, a, one_minus_beta1);
        ROUNDED(b, a, beta2);
        ROUNDED(b, a, one_minus_beta2);
        ROUNDED(b, a, keep);
        ROUNDED(b, a, l2);
        ROUNDED(b, a, step_size);
        ROUNDED(b, a, eps);
    }
}

/* The first buffer is the gradient itself: dampening and momentum begin with the second step. */
static void sgd_scalars(fst_rule rule)
{
    for (int step = 1; step <= 3; step++) {
        const double hyper[FST_MAX_HYPER] = {0.1, 0.8, 0.9, 0.01, step == 2 ? 0.0 : 1.0};
        const fst_rule_args both = filled(rule, 1, hyper, step), f = filled(rule, 0, hyper, step);
        const momentum_args_f64 a = rule == FST_RULE_sgd ? both.sgd_f64 : both.momentum_f64;
        const momentum_args_f32 b = rule == FST_RULE_sgd ? f.sgd_f32 : f.momentum_f32;
        CHECK(a.lr == 0.1 && a.l2 == 0.01 && a.momentum == 0.8);
        CHECK(a.keep == (step == 1 ? 0.0 : 0.8));
        CHECK(a.take == (step == 1 ? 1.0 : 1.0 - 0.9));
        CHECK(a.nesterov == hyper[4]);
        ROUNDED(b, a, lr);
        ROUNDED(b, a, l2);
        ROUNDED(b, a, momentum);
        ROUNDED(b, a, keep);
        ROUNDED(b, a, take);
        ROUNDED(b, a, nesterov);
    }
}

static void lion_scalars(void)
{
    const double hyper[FST_MAX_HYPER] = {1e-4, 0.9, 0.99, 0.3};
    const lion_args_f64 a = filled(FST_RULE_lion, 1, hyper, 5.0).lion_f64;
    const lion_args_f32 b = filled(FST_RULE_lion, 0, hyper, 5.0).lion_f32;
    CHECK(a.lr == 1e-4 && a.beta1 == 0.9 && a.beta2 == 0.99 && a.keep == 1.0 - 1e-4 * 0.3);
    CHECK(a.one_minus_beta1 == 1.0 - 0.9 && a.one_minus_beta2 == 1.0 - 0.99);
    ROUNDED(b, a, lr);
    ROUNDED(b, a, beta1);
    ROUNDED(b, a, beta2);
    ROUNDED(b, a, keep);
    ROUNDED(b, a, one_minus_beta1);
    ROUNDED(b, a, one_minus_beta2);
}

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
    table_names_every_rule();
    whole_powers();
    any_powers();
    numbers_of_nadam();
    numbers_of_asgd();
    for (int decoupled = 0; decoupled < 2; decoupled++) {
        adam_scalars(FST_RULE_adam, decoupled);
        adam_scalars(FST_RULE_amsgrad, decoupled);
    }
    sgd_scalars(FST_RULE_sgd);
    sgd_scalars(FST_RULE_momentum);
    lion_scalars();
    scalars_that_depend_on_the_step();
    return check_report();
}
