/* rule_loops.h - the loops of an update, of operands that are worked on in place: parameters of the
 * kind VALUE, gradients of GRAD and states of STATE, as kinds.h has them. Included once for each
 * set of kinds. */

/* The loop that the compiler vectorises. It counts single elements, or pairs. */
#define LOOP(name, states, decayed)                                           \
    for (size_t i = 0; i < KIND(END, STATE)(n); i++) {                        \
        REAL s[each][FST_MAX_STATES], now[each];                              \
        for (unsigned h = 0; h < each; h++) {                                 \
            s[h][0] = states > 0 ? KIND(LOAD, STATE)(s0, i, h) : 0;           \
            s[h][1] = states > 1 ? KIND(LOAD, STATE)(s1, i, h) : 0;           \
            s[h][2] = states > 2 ? KIND(LOAD, STATE)(s2, i, h) : 0;           \
            const REAL value = KIND(LOAD_VALUE, VALUE)(p, rest, i, h);        \
            const REAL grad = KIND(LOAD, GRAD)(g, i, h) * inv_scale * factor; \
            now[h] = FST_T(name##_rule)(value, decayed, s[h], &a);            \
            KIND(STAGES, STATE)(states, i, h)                                 \
        }                                                                     \
        KIND(STORE_VALUE, VALUE)(p, rest, i);                                 \
        if (states > 0)                                                       \
            KIND(STORE, STATE)(0, s0, i);                                     \
        if (states > 1)                                                       \
            KIND(STORE, STATE)(1, s1, i);                                     \
        if (states > 2)                                                       \
            KIND(STORE, STATE)(2, s2, i);                                     \
    }

/* Every array is a restrict parameter of its own. Compilers make a loop of its own for the usual
 * case, without weight decay that is coupled, but not where the loop is long. */
#define RULE(name, states, hyper)                                                             \
    FUNCTION(name)(size_t n, KIND(TYPE, VALUE) *restrict p,                                   \
                   KIND(REST, VALUE)(KIND(TYPE, VALUE) *restrict rest, )                      \
                       const KIND(TYPE, GRAD) *restrict g,                                    \
                   KIND(TYPE, STATE) *restrict s0, KIND(TYPE, STATE) *restrict s1,            \
                   KIND(TYPE, STATE) *restrict s2,                                            \
                   KIND(MOST, STATE)(int uncoupled, )                                         \
                       KIND(NOISE, STATE)(const uint16_t *restrict noise, ) const void *args, \
                   REAL inv_scale, REAL factor)                                               \
    {                                                                                         \
        const FST_T(name##_args) a = *(const FST_T(name##_args) *)args;                       \
        enum { each = KIND(EACH, VALUE) };                                                    \
        KIND(MOST, STATE)(uint32_t most[FST_MAX_STATES] = {0});                               \
        (void)n, (void)s0, (void)s1, (void)s2;                                                \
        if ((KIND(IS_LONG, VALUE) || KIND(IS_LONG, STATE)) && UNCOUPLED)                      \
            LOOP(name, states, grad)                                                          \
        else                                                                                  \
            LOOP(name, states, a.l2 != (REAL)0 ? grad + a.l2 * value : grad)                  \
        KIND(MOST, STATE)(if (states > 0) s0->largest = most[0];                              \
                          if (states > 1) s1->largest = most[1];                              \
                          if (states > 2) s2->largest = most[2];)                             \
    }
#include "rules/rules.def"
#undef RULE
#undef LOOP
#undef FUNCTION
#undef UNCOUPLED
