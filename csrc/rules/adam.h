/* Adam (Kingma & Ba 2015, arXiv:1412.6980), with decoupled weight decay AdamW (Loshchilov & Hutter
 * 2019, arXiv:1711.05101); amsgrad (Reddi, Kale & Kumar 2018, arXiv:1904.09237) keeps the largest
 * v.
 *
 * p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps) is computed with one square root and one
 * division: step_size = lr * sqrt(bc2) / bc1, and eps * sqrt(bc2) takes the place of eps. */
#define FST_ADAM_HYPER(X) \
    X(lr) X(betas[0]) X(betas[1]) X(eps) X(weight_decay) X(decoupled_weight_decay)

typedef struct {
    REAL beta1, one_minus_beta1;
    REAL beta2, one_minus_beta2;
    REAL keep; /* 1 - lr * weight_decay if decoupled, else 1 */
    REAL l2;   /* weight_decay if not decoupled, else 0 */
    REAL step_size, eps;
} FST_T(adam_args);

FST_FN void FST_T(adam_fill)(FST_T(adam_args) *a, const double *hyper, double step)
{
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], eps = hyper[3];
    const double weight_decay = hyper[4];
    const int decoupled = hyper[5] != 0.0;
    const double correction1 = 1.0 - fst_pow_whole(beta1, step);
    const double correction2_sqrt = sqrt(1.0 - fst_pow_whole(beta2, step));
    a->beta1 = (REAL)beta1;
    a->one_minus_beta1 = (REAL)(1.0 - beta1);
    a->beta2 = (REAL)beta2;
    a->one_minus_beta2 = (REAL)(1.0 - beta2);
    a->keep = (REAL)(decoupled ? 1.0 - lr * weight_decay : 1.0);
    a->l2 = (REAL)(decoupled ? 0.0 : weight_decay);
    a->step_size = (REAL)(lr * correction2_sqrt / correction1);
    a->eps = (REAL)(eps * correction2_sqrt);
}

FST_ARGS_OF(amsgrad, adam)

/* Moves the moments m = s[0] and v = s[1] towards the gradient and its square. */
FST_FN void FST_T(adam_moments)(REAL g, REAL *s, const FST_T(adam_args) *a)
{
    s[0] = a->beta1 * s[0] + a->one_minus_beta1 * g;
    s[1] =
        a->beta2 * s[1] + a->one_minus_beta2 * g *
                              g; /* in this order |g| may reach 5.8e20 in fp32 before v overflows */
}

FST_FN REAL FST_T(adam_rule)(REAL p, REAL g, REAL *s, const FST_T(adam_args) *a)
{
    FST_T(adam_moments)(g, s, a);
    return FST_DESCEND(p * a->keep, a->step_size, s[0], s[1], a->eps);
}

FST_FN REAL FST_T(amsgrad_rule)(REAL p, REAL g, REAL *s, const FST_T(amsgrad_args) *a)
{
    FST_T(adam_moments)(g, s, a);
    s[2] = s[2] > s[1] || s[2] != s[2] ? s[2] : s[1]; /* a NaN on either side stays */
    return FST_DESCEND(p * a->keep, a->step_size, s[0], s[2], a->eps);
}
