/* Rprop (Riedmiller & Braun 1993) as in torch: where the gradient's sign has turned, the step size
 * shrinks and this gradient counts as 0. The learning rate is the first step size, which the state
 * begins with. */
#define FST_RPROP_HYPER(X) X(lr) X(etas[0]) X(etas[1]) X(step_sizes[0]) X(step_sizes[1])

typedef struct {
    REAL minus, plus;
    REAL smallest, largest, l2;
} FST_T(rprop_args);

FST_FN void FST_T(rprop_fill)(FST_T(rprop_args) *a, const double *hyper, double step)
{
    (void)step;
    a->minus = (REAL)hyper[1];
    a->plus = (REAL)hyper[2];
    a->smallest = (REAL)hyper[3];
    a->largest = (REAL)hyper[4];
    a->l2 = (REAL)0;
}

FST_FN REAL FST_T(rprop_rule)(REAL p, REAL g, REAL *s, const FST_T(rprop_args) *a)
{
    const REAL product = g * s[0];
    const REAL size = s[1] * (product > (REAL)0 ? a->plus : product < (REAL)0 ? a->minus : (REAL)1);
    const REAL least = size < a->smallest ? a->smallest : size;
    s[1] = least > a->largest ? a->largest : least;
    s[0] = product < (REAL)0 ? (REAL)0 : g;
    return p - s[1] * (s[0] > (REAL)0 ? (REAL)1 : s[0] < (REAL)0 ? (REAL)-1 : (REAL)0);
}
