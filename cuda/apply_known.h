/* apply_known.h - applies a rule to a thread's eight elements, by quick_math.h, in loops that know
 * it. */

#define RULE(name, states, hyper)                                                       \
    FST_DEVICE void name##_apply_known(fst_held_f32 *x, const name##_args_known *a,     \
                                       const int decays)                                \
    {                                                                                   \
        if (decays)                                                                     \
            fst_decay(x->g, x->p, a->l2);                                               \
        FST_UNROLL                                                                      \
        for (unsigned q = 0; q < 8; q++) {                                              \
            float s[FST_MAX_STATES] = {x->state[0][q], x->state[1][q], x->state[2][q]}; \
            x->p[q] = name##_rule_known(x->p[q], x->g[q], s, a);                        \
            FST_UNROLL                                                                  \
            for (int k = 0; k < (states); k++)                                          \
                x->state[k][q] = s[k];                                                  \
        }                                                                               \
    }
#include "rules/rules.def"
#undef RULE
