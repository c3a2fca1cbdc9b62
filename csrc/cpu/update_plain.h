/* update_plain.h - the update by the loops of rule_loops.h, of which it is included once for each
 * set of kinds. */

#define FUNCTION(name) __attribute__((noinline)) static void FST_S(fst_loop_##name)
#define UNCOUPLED (a.l2 == (REAL)0)
#include "cpu/rule_loops.h"

typedef void (*FST_S(rule_loop))(
    size_t n, KIND(TYPE, VALUE) * p,
    KIND(REST, VALUE)(KIND(TYPE, VALUE) * rest, ) const KIND(TYPE, GRAD) * g,
    KIND(TYPE, STATE) * s0, KIND(TYPE, STATE) * s1, KIND(TYPE, STATE) * s2,
    KIND(NOISE, STATE)(const uint16_t *noise, ) const void *args, REAL inv_scale, REAL factor);

static const struct {
    FST_S(rule_loop) loop;
    unsigned states;
} FST_S(rules)[FST_RULE_COUNT] = {
#define RULE(name, states, hyper) [FST_RULE_##name] = {FST_S(fst_loop_##name), states},
#include "rules/rules.def"
#undef RULE
};

/* Returns how many elements are done: all, or but for one that is no pair; none of a rule without a
 * loop. Gradients that are written are REAL. */
static size_t FST_S(update_plain)(const fst_operand *op, int64_t begin, size_t count,
                                  const fst_update_args *args, double inv_scale, REAL factor,
                                  int write_grad)
{
    const unsigned states = FST_S(rules)[args->rule].states;
    const size_t each = KIND(EACH, VALUE), all = count / each * each;
    KIND(TYPE, STATE) * s[FST_MAX_STATES] = {NULL, NULL, NULL};
    const void *rule_args = &args->rule_args;
    KIND(NOISE, STATE)(noise_room room);
    if (!FST_S(rules)[args->rule].loop)
        return 0;
    for (size_t done = 0; done < all; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = all - done < STRIP ? all - done : STRIP;
        KIND(TYPE, GRAD) *g = FROM(GRAD, op[FST_OP_GRAD], at);
        prefetch(&op[FST_OP_PARAM], at, reach(count, done));
        KIND(REST, VALUE)(prefetch(&op[FST_OP_MASTER], at, reach(count, done)));
        prefetch(&op[FST_OP_GRAD], at, reach(count, done));
        for (unsigned k = 0; k < states; k++) {
            prefetch(&op[FST_OP_STATE + k], at, reach(count, done));
            s[k] = FROM(STATE, op[FST_OP_STATE + k], at);
        }
        if (write_grad)
            FST_T(scale_grads)(n, (REAL *)(void *)g, args, inv_scale);
        FST_S(rules)
        [args->rule].loop(n / each, FROM(VALUE, op[FST_OP_PARAM], at),
                          KIND(REST, VALUE)(FROM(VALUE, op[FST_OP_MASTER], at), ) g, s[0], s[1],
                          s[2],
                          KIND(NOISE, STATE)(noise_for(room, args, states, at, n), ) rule_args,
                          (REAL)(write_grad ? 1.0 : inv_scale), factor);
    }
    return all;
}

#undef STATE
#undef FST_S
