/* The two halves of a step of Adam that accumulates gradients in the moments (AdamA, Zhang et
 * al. 2023, arXiv:2305.19982). `moments` adds a gradient to them; the first one of a step lets
 * them decay before (keep is beta, else 1). `from_moments` then updates the parameter, without a
 * gradient. */
#define FST_MOMENTS_HYPER(X) X(keep1) X(keep2) X(beta1) X(beta2)

typedef struct {
    REAL keep1, one_minus_beta1;
    REAL keep2, one_minus_beta2;
    REAL l2;
} FST_T(moments_args);

FST_FN void FST_T(moments_fill)(FST_T(moments_args) *a, const double *hyper, double step)
{
    (void)step;
    a->keep1 = (REAL)hyper[0];
    a->keep2 = (REAL)hyper[1];
    a->one_minus_beta1 = (REAL)(1.0 - hyper[2]);
    a->one_minus_beta2 = (REAL)(1.0 - hyper[3]);
    a->l2 = (REAL)0;
}

FST_FN REAL FST_T(moments_rule)(REAL p, REAL g, REAL *s, const FST_T(moments_args) *a)
{
    s[0] = a->keep1 * s[0] + a->one_minus_beta1 * g;
    s[1] = a->keep2 * s[1] + a->one_minus_beta2 * g * g;
    return p;
}

typedef FST_T(adam_args) FST_T(from_moments_args);

FST_FN void FST_T(from_moments_fill)(FST_T(from_moments_args) *a, const double *hyper, double step)
{
    FST_T(adam_fill)(a, hyper, step);
}

FST_FN REAL FST_T(from_moments_rule)(REAL p, REAL g, REAL *s, const FST_T(from_moments_args) *a)
{
    (void)g;
    return FST_DESCEND(p * a->keep, a->step_size, s[0], s[1], a->eps);
}
