/* update_known.h - updates a chunk by a loop that knows its rule and its types: PARAM is that of
 * parameter and gradient, STATE that of the states (typed_words.h), and a word holds so many
 * elements of them. All loads of an iteration are issued before the first of them is waited for.
 * Addresses and arguments are in registers. Included once for each pair of types. */

enum {
    FST_K(PARAM_WORDS) = 8 / PARAM_ITEMS, /* of a thread's 8 elements */
    FST_K(STATE_WORDS) = 8 / STATE_ITEMS,
    FST_K(RUN) = PARAM_ITEMS > STATE_ITEMS ? PARAM_ITEMS : STATE_ITEMS, /* of neighbours */
    FST_K(ELEMENTS) = 8 * FST_DEVICE_BLOCK,
};

/* Where a thread's first word of an operand lies; its next one lies `step` words behind. */
FST_DEVICE fst_words *FST_K(first_word)(const fst_share *share, const fst_device_operand *op,
                                        unsigned items)
{
    const uint64_t element = (uint64_t)share->begin + share->thread * (uint32_t)FST_K(RUN);
    return (fst_words *)fst_global(op->data + element * (16 / items));
}

#define STEP_OF(items) ((items) == FST_K(RUN) ? (unsigned)FST_DEVICE_BLOCK : 1u)

#define RULE(name, states, hyper)                                                                 \
    FST_DEVICE uint32_t FST_K(name##_known)(const fst_share *share, const fst_device_operand *op, \
                                            const fst_step_f32 *step, const int write_grad)       \
    {                                                                                             \
        const name##_args_f32 a = *(const name##_args_f32 *)step->args;                           \
        const float inv_scale = step->inv_scale, coefficient = step->coefficient;                 \
        const float sign = step->sign;                                                            \
        const uint32_t whole = share->whole;                                                      \
        fst_words *const param = FST_K(first_word)(share, &op[FST_OP_PARAM], PARAM_ITEMS);        \
        fst_words *const grad = FST_K(first_word)(share, &op[FST_OP_GRAD], PARAM_ITEMS);          \
        fst_words *state[FST_MAX_STATES];                                                         \
        uint32_t base = 0;                                                                        \
        FST_UNROLL                                                                                \
        for (int k = 0; k < (states); k++)                                                        \
            state[k] = FST_K(first_word)(share, &op[FST_OP_STATE + k], STATE_ITEMS);              \
        for (; base + FST_K(ELEMENTS) <= whole; base += FST_K(ELEMENTS)) {                        \
            fst_words p_words[2], g_words[2], s_words[FST_MAX_STATES][2];                         \
            float p[8], g[8], s[FST_MAX_STATES][8];                                               \
            FST_UNROLL                                                                            \
            for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {                                   \
                p_words[n] = param[base / PARAM_ITEMS + n * STEP_OF(PARAM_ITEMS)];                \
                g_words[n] = grad[base / PARAM_ITEMS + n * STEP_OF(PARAM_ITEMS)];                 \
            }                                                                                     \
            FST_UNROLL                                                                            \
            for (int k = 0; k < (states); k++)                                                    \
                FST_UNROLL                                                                        \
            for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)                                     \
                s_words[k][n] = state[k][base / STATE_ITEMS + n * STEP_OF(STATE_ITEMS)];          \
            FST_UNROLL                                                                            \
            for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {                                   \
                FST_TYPED(widen_word, PARAM)(&p_words[n], &p[n * PARAM_ITEMS]);                   \
                FST_TYPED(widen_word, PARAM)(&g_words[n], &g[n * PARAM_ITEMS]);                   \
            }                                                                                     \
            FST_UNROLL                                                                            \
            for (int k = 0; k < (states); k++)                                                    \
                FST_UNROLL                                                                        \
            for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)                                     \
                FST_TYPED(widen_word, STATE)(&s_words[k][n], &s[k][n * STATE_ITEMS]);             \
            FST_UNROLL                                                                            \
            for (unsigned q = 0; q < 8; q++)                                                      \
                g[q] = g[q] * inv_scale * coefficient;                                            \
            if (write_grad)                                                                       \
                FST_UNROLL                                                                        \
            for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)                                     \
                grad[base / PARAM_ITEMS + n * STEP_OF(PARAM_ITEMS)] =                             \
                    FST_TYPED(narrow_word, PARAM)(&g[n * PARAM_ITEMS]);                           \
            FST_UNROLL                                                                            \
            for (unsigned q = 0; q < 8; q++) {                                                    \
                float own[FST_MAX_STATES];                                                        \
                FST_UNROLL                                                                        \
                for (int k = 0; k < (states); k++)                                                \
                    own[k] = s[k][q];                                                             \
                p[q] = name##_rule_f32(p[q], sign * g[q], own, &a);                               \
                FST_UNROLL                                                                        \
                for (int k = 0; k < (states); k++)                                                \
                    s[k][q] = own[k];                                                             \
            }                                                                                     \
            FST_UNROLL                                                                            \
            for (int k = 0; k < (states); k++)                                                    \
                FST_UNROLL                                                                        \
            for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)                                     \
                fst_store_once(&state[k][base / STATE_ITEMS + n * STEP_OF(STATE_ITEMS)],          \
                               FST_TYPED(narrow_word, STATE)(&s[k][n * STATE_ITEMS]));            \
            FST_UNROLL                                                                            \
            for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)                                     \
                param[base / PARAM_ITEMS + n * STEP_OF(PARAM_ITEMS)] =                            \
                    FST_TYPED(narrow_word, PARAM)(&p[n * PARAM_ITEMS]);                           \
        }                                                                                         \
        return base;                                                                              \
    }
#include "rules/rules.def"
#undef RULE
#undef STEP_OF

/* Updates as many elements as fill 8 of every thread, as often as there are so many; returns how
 * many. */
FST_DEVICE uint32_t FST_K(update_known)(const fst_share *share, const fst_device_operand *op,
                                        const fst_step_f32 *step, const int write_grad)
{
    switch (step->rule) {
#define RULE(name, states, hyper) \
    case FST_RULE_##name:         \
        return FST_K(name##_known)(share, op, step, write_grad);
#include "rules/rules.def"
#undef RULE
    default:
        return 0;
    }
}
