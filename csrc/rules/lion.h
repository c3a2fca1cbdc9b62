/* Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum. */
#define FST_LION_HYPER(X) X(lr) X(betas[0]) X(betas[1]) X(weight_decay)

typedef struct {
    REAL beta1, one_minus_beta1;
    REAL beta2, one_minus_beta2;
    REAL keep; /* 1 - lr * weight_decay */
    REAL lr, l2;
} FST_T(lion_args);

FST_FN void FST_T(lion_fill)(FST_T(lion_args) *a, const double *hyper, double step)
{
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], weight_decay = hyper[3];
    (void)step;
    a->beta1 = (REAL)beta1;
    a->one_minus_beta1 = (REAL)(1.0 - beta1);
    a->beta2 = (REAL)beta2;
    a->one_minus_beta2 = (REAL)(1.0 - beta2);
    a->keep = (REAL)(1.0 - lr * weight_decay);
    a->lr = (REAL)lr;
    a->l2 = (REAL)0;
}

FST_FN REAL FST_T(lion_rule)(REAL p, REAL g, REAL *s, const FST_T(lion_args) *a)
{
    const REAL u = a->beta1 * s[0] + a->one_minus_beta1 * g;
    const REAL sign = u > (REAL)0 ? (REAL)1 : u < (REAL)0 ? (REAL)-1 : u; /* 0 and NaN stay */
    s[0] = a->beta2 * s[0] + a->one_minus_beta2 * g;
    return p * a->keep - a->lr * sign;
}
