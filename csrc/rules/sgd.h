/* SGD with momentum (Sutskever et al. 2013) as in torch: the first buffer is the gradient itself,
 * without dampening, and the learning rate multiplies the buffer, not the gradient. */
#define FST_SGD_HYPER(X) X(lr) X(momentum) X(dampening) X(weight_decay) X(nesterov)

typedef struct {
    REAL lr, l2;
    REAL momentum;   /* for Nesterov's look-ahead */
    REAL keep, take; /* buffer = keep * buffer + take * gradient */
    REAL nesterov;   /* 0 or 1 */
} FST_T(momentum_args);

FST_FN void FST_T(momentum_fill)(FST_T(momentum_args) *a, const double *hyper, double step)
{
    const int first = step <= 1.0;
    a->lr = (REAL)hyper[0];
    a->momentum = (REAL)hyper[1];
    a->keep = first ? (REAL)0 : (REAL)hyper[1];
    a->take = first ? (REAL)1 : (REAL)(1.0 - hyper[2]);
    a->l2 = (REAL)hyper[3];
    a->nesterov = (REAL)(hyper[4] != 0.0);
}

FST_ARGS_OF(sgd, momentum)

FST_FN REAL FST_T(momentum_rule)(REAL p, REAL g, REAL *s, const FST_T(momentum_args) *a)
{
    s[0] = a->keep * s[0] + a->take * g;
    return p - a->lr * (a->nesterov != (REAL)0 ? g + a->momentum * s[0] : s[0]);
}

FST_FN REAL FST_T(sgd_rule)(REAL p, REAL g, REAL *s, const FST_T(sgd_args) *a)
{
    (void)s;
    return p - a->lr * g;
}
