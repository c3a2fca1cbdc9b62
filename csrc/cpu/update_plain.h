/* update_plain.h - the update of operands that are worked on in place: parameter and gradient of
 * REAL, and states of STATE, which WIDENED and NARROWED convert. Included once for each STATE. */

/* The loop that the compiler vectorises: every array is a restrict parameter of its own. */
#define RULE(name, states, hyper)                                                              \
    __attribute__((noinline)) static void FST_S(fst_loop_##name)(                              \
        size_t n, REAL *restrict p, const REAL *restrict g, STATE *restrict s0,                \
        STATE *restrict s1, STATE *restrict s2, const void *args, REAL inv_scale, REAL factor) \
    {                                                                                          \
        const FST_T(name##_args) a = *(const FST_T(name##_args) *)args;                        \
        (void)s0, (void)s1, (void)s2;                                                          \
        for (size_t i = 0; i < n; i++) {                                                       \
            REAL s[FST_MAX_STATES] = {states > 0 ? WIDENED(s0[i]) : 0,                         \
                                      states > 1 ? WIDENED(s1[i]) : 0,                         \
                                      states > 2 ? WIDENED(s2[i]) : 0};                        \
            const REAL grad = g[i] * inv_scale * factor;                                       \
            const REAL decayed = a.l2 != (REAL)0 ? grad + a.l2 * p[i] : grad;                  \
            p[i] = FST_T(name##_rule)(p[i], decayed, s, &a);                                   \
            if (states > 0)                                                                    \
                s0[i] = NARROWED(s[0]);                                                        \
            if (states > 1)                                                                    \
                s1[i] = NARROWED(s[1]);                                                        \
            if (states > 2)                                                                    \
                s2[i] = NARROWED(s[2]);                                                        \
        }                                                                                      \
    }
#include "rules/rules.def"
#undef RULE

typedef void (*FST_S(rule_loop))(size_t n, REAL *p, const REAL *g, STATE *s0, STATE *s1, STATE *s2,
                                 const void *args, REAL inv_scale, REAL factor);

static const struct {
    FST_S(rule_loop) loop;
    unsigned states;
} FST_S(rules)[FST_RULE_COUNT] = {
#define RULE(name, states, hyper) [FST_RULE_##name] = {FST_S(fst_loop_##name), states},
#include "rules/rules.def"
#undef RULE
};

static void FST_S(update_plain)(const fst_operand *op, int64_t begin, size_t count,
                                const fst_update_args *args, double inv_scale, REAL factor,
                                int write_grad)
{
    const unsigned states = FST_S(rules)[args->rule].states;
    STATE *s[FST_MAX_STATES] = {NULL, NULL, NULL};
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        REAL *g = (REAL *)op[FST_OP_GRAD].data + at;
        FST_T(prefetch)(&op[FST_OP_PARAM], at, reach(count, done));
        FST_T(prefetch)(&op[FST_OP_GRAD], at, reach(count, done));
        for (unsigned k = 0; k < states; k++) {
            FST_T(prefetch)(&op[FST_OP_STATE + k], at, reach(count, done));
            s[k] = (STATE *)op[FST_OP_STATE + k].data + at;
        }
        if (write_grad)
            FST_T(scale_grads)(n, g, args, inv_scale);
        FST_S(rules)
        [args->rule].loop(n, (REAL *)op[FST_OP_PARAM].data + at, g, s[0], s[1], s[2],
                          &args->rule_args, (REAL)(write_grad ? 1.0 : inv_scale), factor);
    }
}

#undef STATE
#undef WIDENED
#undef NARROWED
#undef FST_S
