/* ASGD (Polyak & Juditsky 1992) as in torch: SGD with a learning rate eta that decays by the step,
 * and the average of the parameter, to which each step adds mu times the difference. eta and mu
 * are numbers of each tensor, which a step makes for the next one. */
#define FST_ASGD_HYPER(X) X(lr) X(lambd) X(alpha) X(t0) X(weight_decay)

typedef struct {
    REAL l2, keep, eta, mu;
} FST_T(asgd_args);

/* torch makes both in its default dtype, which is that of the step count. */
FST_FN fst_numbers FST_T(asgd_next)(fst_numbers held, const double *hyper, double step)
{
    const double lr = hyper[0], past = step - hyper[3];
    const double eta = lr / fst_pow(1.0 + hyper[1] * lr * step, hyper[2]);
    const double mu = 1.0 / (past > 1.0 ? past : 1.0);
    held.value[0] = held.wide_step ? eta : fst_rounded_to_f32(eta);
    held.value[1] = held.wide_step ? mu : fst_rounded_to_f32(mu);
    return held;
}

FST_FN void FST_T(asgd_fill)(FST_T(asgd_args) *a, const double *hyper, double step)
{
    const double eta = hyper[FST_NUMBER(0)];
    (void)step;
    a->l2 = (REAL)hyper[4];
    a->keep = (REAL)(1.0 - hyper[1] * eta);
    a->eta = (REAL)eta;
    a->mu = (REAL)hyper[FST_NUMBER(1)];
}

FST_FN REAL FST_T(asgd_rule)(REAL p, REAL g, REAL *s, const FST_T(asgd_args) *a)
{
    p = p * a->keep - a->eta * g;
    s[0] = a->mu == (REAL)1 ? p : s[0] + a->mu * (p - s[0]);
    return p;
}
