/* Adagrad (Duchi, Hazan & Singer 2011), with torch's decay of the learning rate by the step. */
#define FST_ADAGRAD_HYPER(X) X(lr) X(lr_decay) X(weight_decay) X(eps)

typedef struct {
    REAL lr, l2, eps;
} FST_T(adagrad_args);

FST_FN void FST_T(adagrad_fill)(FST_T(adagrad_args) *a, const double *hyper, double step)
{
    a->lr = (REAL)(hyper[0] / (1.0 + (step - 1.0) * hyper[1]));
    a->l2 = (REAL)hyper[2];
    a->eps = (REAL)hyper[3];
}

FST_FN REAL FST_T(adagrad_rule)(REAL p, REAL g, REAL *s, const FST_T(adagrad_args) *a)
{
    s[0] = s[0] + g * g;
    return FST_DESCEND(p, a->lr, g, s[0], a->eps);
}
