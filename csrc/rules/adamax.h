/* Adamax (Kingma & Ba 2015, arXiv:1412.6980): Adam with the infinity norm in place of the second
 * moment. As in torch, eps is added to |g| and not to the denominator. */
#define FST_ADAMAX_HYPER(X) X(lr) X(betas[0]) X(betas[1]) X(eps) X(weight_decay)

typedef struct {
    REAL beta1, one_minus_beta1, beta2;
    REAL step_size, eps, l2;
} FST_T(adamax_args);

FST_FN void FST_T(adamax_fill)(FST_T(adamax_args) *a, const double *hyper, double step)
{
    a->beta1 = (REAL)hyper[1];
    a->one_minus_beta1 = (REAL)(1.0 - hyper[1]);
    a->beta2 = (REAL)hyper[2];
    a->step_size = (REAL)(hyper[0] / (1.0 - fst_pow_whole(hyper[1], step)));
    a->eps = (REAL)hyper[3];
    a->l2 = (REAL)hyper[4];
}

FST_FN REAL FST_T(adamax_rule)(REAL p, REAL g, REAL *s, const FST_T(adamax_args) *a)
{
    const REAL decayed = a->beta2 * s[1], size = (g < (REAL)0 ? -g : g) + a->eps;
    s[0] = a->beta1 * s[0] + a->one_minus_beta1 * g;
    s[1] = decayed > size || decayed != decayed ? decayed : size; /* a NaN on either side stays */
    return p - a->step_size * FST_DIVIDE(s[0], s[1]);
}
