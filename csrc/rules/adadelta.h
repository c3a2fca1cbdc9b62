/* Adadelta (Zeiler 2012, arXiv:1212.5701), with torch's learning rate. */
#define FST_ADADELTA_HYPER(X) X(lr) X(rho) X(eps) X(weight_decay)

typedef struct {
    REAL rho, one_minus_rho;
    REAL lr, eps, l2;
} FST_T(adadelta_args);

FST_FN void FST_T(adadelta_fill)(FST_T(adadelta_args) *a, const double *hyper, double step)
{
    (void)step;
    a->lr = (REAL)hyper[0];
    a->rho = (REAL)hyper[1];
    a->one_minus_rho = (REAL)(1.0 - hyper[1]);
    a->eps = (REAL)hyper[2];
    a->l2 = (REAL)hyper[3];
}

FST_FN REAL FST_T(adadelta_rule)(REAL p, REAL g, REAL *s, const FST_T(adadelta_args) *a)
{
    s[0] = a->rho * s[0] + a->one_minus_rho * g * g;
    const REAL delta = FST_DIVIDE(FST_SQRT(s[1] + a->eps), FST_SQRT(s[0] + a->eps)) * g;
    s[1] = a->rho * s[1] + a->one_minus_rho * delta * delta;
    return p - a->lr * delta;
}
