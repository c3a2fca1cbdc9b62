/* reference_rules.h - what each rule makes of one element; included by reference.h, which
 * says how it rounds. */
#pragma once

static inline double expected_adam(const update_case *c, double p, double g, double *s)
{
    const double lr = c->hyper[0], beta1 = c->hyper[1], beta2 = c->hyper[2];
    const double decay = c->hyper[4], root = sqrt(1.0 - power(beta2, c->step));
    const double step_size = R(lr * root / (1.0 - power(beta1, c->step)));
    if (c->hyper[5] == 0.0 && R(decay) != 0.0)
        g = R(g + R(R(decay) * p));
    s[0] = R(R(R(beta1) * s[0]) + R(R(1.0 - beta1) * g));
    s[1] = R(R(R(beta2) * s[1]) + R(R(R(1.0 - beta2) * g) * g));
    double v = s[1];
    if (c->rule == FST_RULE_amsgrad)
        v = s[2] = isnan(v) || isnan(s[2]) ? (double)NAN : s[2] > v ? s[2] : v;
    const double denominator = R(R(sqrt(v)) + R(c->hyper[3] * root));
    const double kept = c->hyper[5] != 0.0 ? R(p * R(1.0 - lr * decay)) : p;
    return R(kept - R(step_size * R(s[0] / denominator)));
}

/* A call for each moment: gcc 12 makes one vector of both, and loses roundings to float there. */
__attribute__((noinline)) static double moved(const update_case *c, double moment, double keep,
                                              double term)
{
    return R(R(R(keep) * moment) + term);
}

static inline double expected_sgd(const update_case *c, double p, double g, double *s)
{
    const double lr = R(c->hyper[0]), momentum = R(c->hyper[1]), decay = R(c->hyper[3]);
    if (decay != 0.0)
        g = R(g + R(decay * p));
    double direction = g;
    if (c->rule == FST_RULE_momentum) {
        if (c->step == 1.0)
            s[0] = R(R(0.0 * s[0]) + g); /* 0 but for a buffer that is not finite */
        else
            s[0] = R(R(momentum * s[0]) + R(R(1.0 - c->hyper[2]) * g));
        direction = c->hyper[4] != 0.0 ? R(g + R(momentum * s[0])) : s[0];
    }
    return R(p - R(lr * direction));
}

static inline double expected_lion(const update_case *c, double p, double g, double *s)
{
    const double lr = c->hyper[0], beta1 = c->hyper[1], beta2 = c->hyper[2];
    const double u = R(R(R(beta1) * s[0]) + R(R(1.0 - beta1) * g));
    const double direction = isnan(u) || u == 0.0 ? u : copysign(1.0, u);
    s[0] = R(R(R(beta2) * s[0]) + R(R(1.0 - beta2) * g));
    return R(R(p * R(1.0 - lr * c->hyper[3])) - R(R(lr) * direction));
}

/* The gradient with an L2 penalty, by the hyper-parameter of that index. */
static inline double with_l2(const update_case *c, double p, double g, unsigned index)
{
    const double decay = R(c->hyper[index]);
    return decay != 0.0 ? R(g + R(decay * p)) : g;
}

static inline double expected_adagrad(const update_case *c, double p, double g, double *s)
{
    const double lr = R(c->hyper[0] / (1.0 + (c->step - 1.0) * c->hyper[1]));
    g = with_l2(c, p, g, 2);
    s[0] = R(s[0] + R(g * g));
    return R(p - R(lr * R(g / R(R(sqrt(s[0])) + R(c->hyper[3])))));
}

static inline double expected_rmsprop(const update_case *c, double p, double g, double *s)
{
    const double alpha = c->hyper[1];
    const int has_buffer =
        c->rule == FST_RULE_rmsprop_momentum || c->rule == FST_RULE_rmsprop_centered_momentum;
    g = with_l2(c, p, g, 3);
    s[0] = moved(c, s[0], alpha, R(R(R(1.0 - alpha) * g) * g));
    double variance = s[0];
    if (c->rule == FST_RULE_rmsprop_centered || c->rule == FST_RULE_rmsprop_centered_momentum) {
        double *mean = &s[has_buffer ? 2 : 1];
        const double gap = R(g - *mean);
        *mean = R(alpha) > 0.5 ? R(*mean + R(R(1.0 - alpha) * gap)) : R(g - R(R(alpha) * gap));
        const double square = R(*mean * *mean);
        variance = fabs(R(s[0] - (isinf(square) ? 0.0 : square)));
    }
    double update = R(g / R(R(sqrt(variance)) + R(c->hyper[2])));
    if (has_buffer)
        update = s[1] = moved(c, s[1], c->hyper[4], update);
    return R(p - R(R(c->hyper[0]) * update));
}

static inline double expected_adamax(const update_case *c, double p, double g, double *s)
{
    const double beta1 = c->hyper[1];
    const double step_size = R(c->hyper[0] / (1.0 - power(beta1, c->step)));
    g = with_l2(c, p, g, 4);
    const double decayed = R(R(c->hyper[2]) * s[1]), size = R(fabs(g) + R(c->hyper[3]));
    s[0] = moved(c, s[0], beta1, R(R(1.0 - beta1) * g));
    s[1] = isnan(decayed) || isnan(size) ? (double)NAN : fmax(decayed, size);
    return R(p - R(step_size * R(s[0] / s[1])));
}

static inline double expected_adadelta(const update_case *c, double p, double g, double *s)
{
    const double rho = c->hyper[1], eps = R(c->hyper[2]);
    g = with_l2(c, p, g, 3);
    s[0] = moved(c, s[0], rho, R(R(R(1.0 - rho) * g) * g));
    const double delta = R(R(R(sqrt(R(s[1] + eps))) / R(sqrt(R(s[0] + eps)))) * g);
    s[1] = moved(c, s[1], rho, R(R(R(1.0 - rho) * delta) * delta));
    return R(p - R(R(c->hyper[0]) * delta));
}

static inline double expected_radam(const update_case *c, double p, double g, double *s)
{
    const double lr = c->hyper[0], beta1 = c->hyper[1], beta2 = c->hyper[2];
    const double power2 = power(beta2, c->step), longest = 2.0 / (1.0 - beta2) - 1.0;
    const double length = longest - 2.0 * c->step * power2 / (1.0 - power2);
    double factor = 1.0;
    if (length > 5.0)
        factor = sqrt(1.0 - power2) * sqrt((length - 4.0) * (length - 2.0) * longest /
                                           ((longest - 4.0) * (longest - 2.0) * length));
    const double step_size = R(lr * factor / (1.0 - power(beta1, c->step)));
    if (c->hyper[5] == 0.0)
        g = with_l2(c, p, g, 4);
    s[0] = moved(c, s[0], beta1, R(R(1.0 - beta1) * g));
    s[1] = moved(c, s[1], beta2, R(R(R(1.0 - beta2) * g) * g));
    const double update = length > 5.0 ? R(s[0] / R(R(sqrt(s[1])) + R(c->hyper[3]))) : s[0];
    const double kept = c->hyper[5] != 0.0 ? R(p * R(1.0 - lr * c->hyper[4])) : p;
    return R(kept - R(step_size * update));
}

static inline double expected_rprop(const update_case *c, double p, double g, double *s)
{
    const double product = R(g * s[0]);
    double size = s[1];
    if (product > 0.0 || product < 0.0)
        size = R(size * R(c->hyper[product > 0.0 ? 2 : 1]));
    if (size < R(c->hyper[3]))
        size = R(c->hyper[3]);
    if (size > R(c->hyper[4]))
        size = R(c->hyper[4]);
    s[0] = product < 0.0 ? 0.0 : g;
    s[1] = size;
    return R(p - R(size * (double)((s[0] > 0.0) - (s[0] < 0.0))));
}

/* The product of all mu is hyper-parameter 7. */
static inline double expected_nadam(const update_case *c, double p, double g, double *s)
{
    const double lr = c->hyper[0], decay = c->hyper[4], product = c->hyper[7];
    const double mu = c->hyper[1] * (1.0 - 0.5 * fst_pow(0.96, c->step * c->hyper[6]));
    const double later = c->hyper[1] * (1.0 - 0.5 * fst_pow(0.96, (c->step + 1.0) * c->hyper[6]));
    const double root = sqrt(1.0 - power(c->hyper[2], c->step));
    const double of_g = R(lr * (1.0 - mu) / (1.0 - product) * root);
    const double of_m = R(lr * later / (1.0 - product * later) * root);
    const double one_minus1 = R(1.0 - c->hyper[1]), one_minus2 = R(1.0 - c->hyper[2]);
    if (c->hyper[5] == 0.0)
        g = with_l2(c, p, g, 4);
    s[0] = moved(c, s[0], R(1.0 - one_minus1), R(one_minus1 * g));
    s[1] = moved(c, s[1], R(1.0 - one_minus2), R(R(one_minus2 * g) * g));
    const double update = R(R(of_g * g) + R(of_m * s[0]));
    const double kept = c->hyper[5] != 0.0 ? R(p * R(1.0 - lr * decay)) : p;
    return R(kept - R(update / R(R(sqrt(s[1])) + R(c->hyper[3] * root))));
}

/* eta and mu are hyper-parameters 7 and 6. */
static inline double expected_asgd(const update_case *c, double p, double g, double *s)
{
    const double eta = c->hyper[7], mu = R(c->hyper[6]);
    g = with_l2(c, p, g, 4);
    p = R(R(p * R(1.0 - c->hyper[1] * eta)) - R(R(eta) * g));
    s[0] = mu == 1.0 ? p : R(s[0] + R(mu * R(p - s[0])));
    return p;
}

static inline double expected_rule(const update_case *c, double p, double g, double *s)
{
    switch (c->rule) {
    case FST_RULE_adam:
    case FST_RULE_amsgrad:
        return expected_adam(c, p, g, s);
    case FST_RULE_sgd:
    case FST_RULE_momentum:
        return expected_sgd(c, p, g, s);
    case FST_RULE_lion:
        return expected_lion(c, p, g, s);
    case FST_RULE_adagrad:
        return expected_adagrad(c, p, g, s);
    case FST_RULE_rmsprop:
    case FST_RULE_rmsprop_momentum:
    case FST_RULE_rmsprop_centered:
    case FST_RULE_rmsprop_centered_momentum:
        return expected_rmsprop(c, p, g, s);
    case FST_RULE_adamax:
        return expected_adamax(c, p, g, s);
    case FST_RULE_adadelta:
        return expected_adadelta(c, p, g, s);
    case FST_RULE_radam:
        return expected_radam(c, p, g, s);
    case FST_RULE_rprop:
        return expected_rprop(c, p, g, s);
    case FST_RULE_nadam:
        return expected_nadam(c, p, g, s);
    case FST_RULE_asgd:
        return expected_asgd(c, p, g, s);
    case FST_RULE_COUNT:
        break;
    }
    return (double)NAN;
}
