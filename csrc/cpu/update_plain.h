/* update_plain.h - the update of operands that are worked on in place: parameters of the kind
 * VALUE, gradients of GRAD and states of STATE, which update.h loads and stores. Included once for
 * each set of kinds. */

/* The loop that the compiler vectorises: every array is a restrict parameter of its own. */
#define RULE(name, states, hyper)                                                              \
    __attribute__((noinline)) static void FST_S(fst_loop_##name)(                              \
        size_t n, KIND(TYPE, VALUE) *restrict p,                                               \
        KIND(REST, VALUE)(uint16_t *restrict rest, ) const KIND(TYPE, GRAD) *restrict g,       \
        KIND(TYPE, STATE) *restrict s0, KIND(TYPE, STATE) *restrict s1,                        \
        KIND(TYPE, STATE) *restrict s2,                                                        \
        KIND(NOISE, STATE)(const uint16_t *restrict noise, ) const void *args, REAL inv_scale, \
        REAL factor)                                                                           \
    {                                                                                          \
        const FST_T(name##_args) a = *(const FST_T(name##_args) *)args;                        \
        (void)s0, (void)s1, (void)s2;                                                          \
        for (size_t i = 0; i < n; i++) {                                                       \
            REAL s[FST_MAX_STATES] = {states > 0 ? KIND(LOAD, STATE)(s0[i]) : 0,               \
                                      states > 1 ? KIND(LOAD, STATE)(s1[i]) : 0,               \
                                      states > 2 ? KIND(LOAD, STATE)(s2[i]) : 0};              \
            const REAL value = KIND(LOAD_VALUE, VALUE)(p[i], rest[i]);                         \
            const REAL grad = KIND(LOAD, GRAD)(g[i]) * inv_scale * factor;                     \
            const REAL decayed = a.l2 != (REAL)0 ? grad + a.l2 * value : grad;                 \
            const REAL now = FST_T(name##_rule)(value, decayed, s, &a);                        \
            KIND(STORE_VALUE, VALUE)(p[i], rest[i], now);                                      \
            if (states > 0)                                                                    \
                s0[i] = KIND(STORE, STATE)(s[0], noise[i]);                                    \
            if (states > 1)                                                                    \
                s1[i] = KIND(STORE, STATE)(s[1], noise[NOISE_ROOM + i]);                       \
            if (states > 2)                                                                    \
                s2[i] = KIND(STORE, STATE)(s[2], noise[2 * NOISE_ROOM + i]);                   \
        }                                                                                      \
    }
#include "rules/rules.def"
#undef RULE

typedef void (*FST_S(rule_loop))(size_t n, KIND(TYPE, VALUE) * p,
                                 KIND(REST, VALUE)(uint16_t *rest, ) const KIND(TYPE, GRAD) * g,
                                 KIND(TYPE, STATE) * s0, KIND(TYPE, STATE) * s1,
                                 KIND(TYPE, STATE) * s2,
                                 KIND(NOISE, STATE)(const uint16_t *noise, ) const void *args,
                                 REAL inv_scale, REAL factor);

static const struct {
    FST_S(rule_loop) loop;
    unsigned states;
} FST_S(rules)[FST_RULE_COUNT] = {
#define RULE(name, states, hyper) [FST_RULE_##name] = {FST_S(fst_loop_##name), states},
#include "rules/rules.def"
#undef RULE
};

/* Gradients that are written are REAL. */
static void FST_S(update_plain)(const fst_operand *op, int64_t begin, size_t count,
                                const fst_update_args *args, double inv_scale, REAL factor,
                                int write_grad)
{
    const unsigned states = FST_S(rules)[args->rule].states;
    KIND(TYPE, STATE) * s[FST_MAX_STATES] = {NULL, NULL, NULL};
    const void *rule_args = &args->rule_args;
    KIND(NOISE, STATE)(noise_room room);
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        KIND(TYPE, GRAD) *g = (KIND(TYPE, GRAD) *)op[FST_OP_GRAD].data + at;
        FST_T(prefetch)(&op[FST_OP_PARAM], at, reach(count, done));
        KIND(REST, VALUE)(FST_T(prefetch)(&op[FST_OP_MASTER], at, reach(count, done)));
        FST_T(prefetch)(&op[FST_OP_GRAD], at, reach(count, done));
        for (unsigned k = 0; k < states; k++) {
            FST_T(prefetch)(&op[FST_OP_STATE + k], at, reach(count, done));
            s[k] = (KIND(TYPE, STATE) *)op[FST_OP_STATE + k].data + at;
        }
        if (write_grad)
            FST_T(scale_grads)(n, (REAL *)(void *)g, args, inv_scale);
        FST_S(rules)
        [args->rule].loop(n, (KIND(TYPE, VALUE) *)op[FST_OP_PARAM].data + at,
                          KIND(REST, VALUE)((uint16_t *)op[FST_OP_MASTER].data + at, ) g, s[0],
                          s[1], s[2],
                          KIND(NOISE, STATE)(noise_for(room, args, states, at, n), ) rule_args,
                          (REAL)(write_grad ? 1.0 : inv_scale), factor);
    }
}

#undef STATE
#undef FST_S
