/* RMSprop (Tieleman & Hinton 2012) as in torch: `centered` (Graves 2013, arXiv:1308.0850) divides
 * by an estimate of the standard deviation, and momentum is that of the quotient. The states are
 * the average of squares, then the buffer with momentum, then the average of gradients if centered.
 */
#define FST_RMSPROP_HYPER(X) X(lr) X(alpha) X(eps) X(weight_decay) X(momentum)

typedef struct {
    REAL alpha, one_minus_alpha;
    REAL lr, eps, l2, momentum;
} FST_T(rmsprop_args);

FST_FN void FST_T(rmsprop_fill)(FST_T(rmsprop_args) *a, const double *hyper, double step)
{
    (void)step;
    a->lr = (REAL)hyper[0];
    a->alpha = (REAL)hyper[1];
    a->one_minus_alpha = (REAL)(1.0 - hyper[1]);
    a->eps = (REAL)hyper[2];
    a->l2 = (REAL)hyper[3];
    a->momentum = (REAL)hyper[4];
}

FST_ARGS_OF(rmsprop_momentum, rmsprop)
FST_ARGS_OF(rmsprop_centered, rmsprop)
FST_ARGS_OF(rmsprop_centered_momentum, rmsprop)

/* Moves the average of squares. */
FST_FN void FST_T(rmsprop_squares)(REAL g, REAL *squares, const FST_T(rmsprop_args) *a)
{
    *squares = a->alpha * *squares + a->one_minus_alpha * g * g;
}

/* Moves that and the average of gradients; returns the square of the deviation from the latter. It
 * moves as torch's lerp does: it stops short of a constant gradient. The averages are rounded
 * apart, so their difference may be negative: then it is an error of rounding, and its size counts.
 * A square that overflows is left out: torch's fused multiply-add gives no NaN either. */
FST_FN REAL FST_T(rmsprop_variance)(REAL g, REAL *squares, REAL *mean, const FST_T(rmsprop_args) *a)
{
    const REAL gap = g - *mean;
    FST_T(rmsprop_squares)(g, squares, a);
    *mean = a->alpha > (REAL)0.5 ? *mean + a->one_minus_alpha * gap : g - a->alpha * gap;
    const REAL square = *mean * *mean;
    const REAL most = (REAL)(sizeof(REAL) == sizeof(float) ? FLT_MAX : DBL_MAX);
    return FST_SIZE(*squares - (square > most ? (REAL)0 : square));
}

FST_FN REAL FST_T(rmsprop_rule)(REAL p, REAL g, REAL *s, const FST_T(rmsprop_args) *a)
{
    FST_T(rmsprop_squares)(g, &s[0], a);
    return FST_DESCEND(p, a->lr, g, s[0], a->eps);
}

FST_FN REAL FST_T(rmsprop_momentum_rule)(REAL p, REAL g, REAL *s,
                                         const FST_T(rmsprop_momentum_args) *a)
{
    FST_T(rmsprop_squares)(g, &s[0], a);
    s[1] = a->momentum * s[1] + FST_DIVIDE(g, FST_SQRT(s[0]) + a->eps);
    return p - a->lr * s[1];
}

FST_FN REAL FST_T(rmsprop_centered_rule)(REAL p, REAL g, REAL *s,
                                         const FST_T(rmsprop_centered_args) *a)
{
    const REAL variance = FST_T(rmsprop_variance)(g, &s[0], &s[1], a);
    return FST_DESCEND(p, a->lr, g, variance, a->eps);
}

FST_FN REAL FST_T(rmsprop_centered_momentum_rule)(REAL p, REAL g, REAL *s,
                                                  const FST_T(rmsprop_centered_momentum_args) *a)
{
    const REAL variance = FST_T(rmsprop_variance)(g, &s[0], &s[2], a);
    s[1] = a->momentum * s[1] + FST_DIVIDE(g, FST_SQRT(variance) + a->eps);
    return p - a->lr * s[1];
}
