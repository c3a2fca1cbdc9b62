/* NAdam (Dozat 2016) as in torch: Adam with Nesterov's momentum, whose coefficient mu grows by the
 * step. The product of all mu so far is a number of each tensor. Weight decay is L2 or decoupled.
 * As in adam.h, sqrt(bc2) has moved from the denominator into the step sizes and into eps. */
#define FST_NADAM_HYPER(X) \
    X(lr) X(betas[0]) X(betas[1]) X(eps) X(weight_decay) X(decoupled_weight_decay) X(momentum_decay)

typedef struct {
    REAL one_minus_beta1, one_minus_beta2;
    REAL keep; /* 1 - lr * weight_decay if decoupled, else 1 */
    REAL l2;   /* weight_decay if not decoupled, else 0 */
    REAL gradient_size, moment_size, eps;
} FST_T(nadam_args);

FST_FN double FST_T(nadam_mu)(const double *hyper, double step)
{
    return hyper[1] * (1.0 - 0.5 * fst_pow(0.96, step * hyper[6]));
}

/* torch rounds mu to fp32 before it multiplies a product that is not held in fp64. */
FST_FN fst_numbers FST_T(nadam_next)(fst_numbers held, const double *hyper, double step)
{
    const double mu = FST_T(nadam_mu)(hyper, step);
    held.value[0] *= held.dtype[0] == FST_F64 ? mu : fst_rounded_to_f32(mu);
    return held;
}

FST_FN void FST_T(nadam_fill)(FST_T(nadam_args) *a, const double *hyper, double step)
{
    const double lr = hyper[0], weight_decay = hyper[4], product = hyper[FST_NUMBER(0)];
    const int decoupled = hyper[5] != 0.0;
    const double mu = FST_T(nadam_mu)(hyper, step), mu_next = FST_T(nadam_mu)(hyper, step + 1.0);
    const double correction2_sqrt = sqrt(1.0 - fst_pow_whole(hyper[2], step));
    a->one_minus_beta1 = (REAL)(1.0 - hyper[1]);
    a->one_minus_beta2 = (REAL)(1.0 - hyper[2]);
    a->keep = (REAL)(decoupled ? 1.0 - lr * weight_decay : 1.0);
    a->l2 = (REAL)(decoupled ? 0.0 : weight_decay);
    a->gradient_size = (REAL)(lr * (1.0 - mu) / (1.0 - product) * correction2_sqrt);
    a->moment_size = (REAL)(lr * mu_next / (1.0 - product * mu_next) * correction2_sqrt);
    a->eps = (REAL)(hyper[3] * correction2_sqrt);
}

FST_FN REAL FST_T(nadam_rule)(REAL p, REAL g, REAL *s, const FST_T(nadam_args) *a)
{
    const REAL beta1 = (REAL)1 - a->one_minus_beta1, beta2 = (REAL)1 - a->one_minus_beta2;
    s[0] = beta1 * s[0] + a->one_minus_beta1 * g;
    s[1] = beta2 * s[1] + a->one_minus_beta2 * g * g;
    const REAL update = a->gradient_size * g + a->moment_size * s[0];
    return FST_DESCEND(p * a->keep, (REAL)1, update, s[1], a->eps);
}
