/* RAdam (Liu et al. 2020, arXiv:1908.03265): the second moment counts once its estimate has a
 * finite variance, times a factor for that variance. Weight decay is L2 or decoupled. */
#define FST_RADAM_HYPER(X) \
    X(lr) X(betas[0]) X(betas[1]) X(eps) X(weight_decay) X(decoupled_weight_decay)

typedef struct {
    REAL beta1, one_minus_beta1;
    REAL beta2, one_minus_beta2;
    REAL keep; /* 1 - lr * weight_decay if decoupled, else 1 */
    REAL l2;   /* weight_decay if not decoupled, else 0 */
    REAL step_size;
    REAL eps; /* -1 while the second moment does not count */
} FST_T(radam_args);

FST_FN void FST_T(radam_fill)(FST_T(radam_args) *a, const double *hyper, double step)
{
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], weight_decay = hyper[4];
    const int decoupled = hyper[5] != 0.0;
    const double correction1 = 1.0 - fst_pow_whole(beta1, step);
    const double power2 = fst_pow_whole(beta2, step), correction2 = 1.0 - power2;
    const double longest = 2.0 / (1.0 - beta2) - 1.0; /* of the simple moving average */
    const double length = longest - 2.0 * step * power2 / correction2;
    double factor = 1.0;
    if (length > 5.0)
        factor = sqrt(correction2) * sqrt((length - 4.0) * (length - 2.0) * longest /
                                          ((longest - 4.0) * (longest - 2.0) * length));
    a->beta1 = (REAL)beta1;
    a->one_minus_beta1 = (REAL)(1.0 - beta1);
    a->beta2 = (REAL)beta2;
    a->one_minus_beta2 = (REAL)(1.0 - beta2);
    a->keep = (REAL)(decoupled ? 1.0 - lr * weight_decay : 1.0);
    a->l2 = (REAL)(decoupled ? 0.0 : weight_decay);
    a->step_size = (REAL)(lr * factor / correction1);
    a->eps = (REAL)(length > 5.0 ? hyper[3] : -1.0);
}

FST_FN REAL FST_T(radam_rule)(REAL p, REAL g, REAL *s, const FST_T(radam_args) *a)
{
    s[0] = a->beta1 * s[0] + a->one_minus_beta1 * g;
    s[1] = a->beta2 * s[1] + a->one_minus_beta2 * g * g;
    return a->eps >= (REAL)0 ? FST_DESCEND(p * a->keep, a->step_size, s[0], s[1], a->eps)
                             : p * a->keep - a->step_size * s[0];
}
