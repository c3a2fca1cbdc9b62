/* update_known.h - updates a chunk by a loop that knows its rule and its types: PARAM is that of
 * parameter and gradient, STATE that of the states (typed_words.h), and a word holds so many
 * elements of them. With MASTERS the parameter has a master in fp32. Included once for each set of
 * types.
 *
 * A warp takes tiles of 256 elements, 8 of each thread, TURNS of them one after another. All loads
 * of an iteration are issued before the first of them is waited for; addresses and arguments are in
 * registers. Roots and quotients are taken by quick_math.h. Where a new parameter is NaN, the
 * thread stores nothing of the tile and sets its bit in `again`. */

enum {
    FST_K(PARAM_WORDS) = 8 / PARAM_ITEMS, /* of a thread's 8 elements */
    FST_K(STATE_WORDS) = 8 / STATE_ITEMS,
    FST_K(RUN) = PARAM_ITEMS > STATE_ITEMS ? PARAM_ITEMS : STATE_ITEMS, /* of neighbours */
};

/* Addresses of a thread's first elements. */
typedef struct {
    fst_words *param, *grad, *master, *state[FST_MAX_STATES];
} FST_K(fst_places);

/* A thread's words of one turn. */
typedef struct {
    fst_words param[2], grad[2], master[2], state[FST_MAX_STATES][2];
} FST_K(fst_loaded);

FST_DEVICE FST_K(fst_places) FST_K(places_of)(const fst_share *share, const fst_device_operand *op,
                                              uint32_t ahead, int states)
{
    const uint64_t first = (uint64_t)share->begin + ahead + share->thread * (uint32_t)FST_K(RUN);
    FST_K(fst_places) at;
    at.param = (fst_words *)fst_global(op[FST_OP_PARAM].data + first * (16 / PARAM_ITEMS));
    at.grad = (fst_words *)fst_global(op[FST_OP_GRAD].data + first * (16 / PARAM_ITEMS));
    at.master = (fst_words *)fst_global(op[FST_OP_MASTER].data + first * 4);
    FST_UNROLL
    for (int k = 0; k < states; k++)
        at.state[k] =
            (fst_words *)fst_global(op[FST_OP_STATE + k].data + first * (16 / STATE_ITEMS));
    return at;
}

/* How far behind its first word a thread's word n of a turn lies. */
FST_DEVICE uint32_t FST_K(word_of)(unsigned turn, unsigned n, unsigned items)
{
    const unsigned words_of_run = FST_K(RUN) / items;
    const unsigned run = turn * (8 / FST_K(RUN)) + n / words_of_run;
    return run * FST_WARP * words_of_run + n % words_of_run;
}

FST_DEVICE void FST_K(load)(const FST_K(fst_places) * at, uint32_t base, unsigned turn, int states,
                            FST_K(fst_loaded) * words)
{
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {
        const uint32_t word = base / PARAM_ITEMS + FST_K(word_of)(turn, n, PARAM_ITEMS);
        words->param[n] = at->param[word];
        words->grad[n] = at->grad[word];
    }
#if MASTERS
    words->master[0] = at->master[base / 4 + FST_K(word_of)(turn, 0, 4)];
    words->master[1] = at->master[base / 4 + FST_K(word_of)(turn, 1, 4)];
#endif
    FST_UNROLL
    for (int k = 0; k < states; k++)
        FST_UNROLL
    for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)
        words->state[k][n] =
            at->state[k][base / STATE_ITEMS + FST_K(word_of)(turn, n, STATE_ITEMS)];
}

FST_DEVICE void FST_K(widen)(const FST_K(fst_loaded) * words, int states, fst_held_f32 *x)
{
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {
        FST_TYPED(widen_word, PARAM)(&words->param[n], &x->p[n * PARAM_ITEMS]);
        FST_TYPED(widen_word, PARAM)(&words->grad[n], &x->g[n * PARAM_ITEMS]);
    }
#if MASTERS
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++) {
        const float master = fst_f32_of_bits(words->master[q / 4].word[q % 4]);
        x->p[q] = newer_f32(master, x->p[q], PARAM_DTYPE);
    }
#endif
    FST_UNROLL
    for (int k = 0; k < states; k++)
        FST_UNROLL
    for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)
        FST_TYPED(widen_word, STATE)(&words->state[k][n], &x->state[k][n * STATE_ITEMS]);
    FST_UNROLL
    for (int k = states; k < FST_MAX_STATES; k++)
        FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        x->state[k][q] = 0.0f;
}

FST_DEVICE void FST_K(store)(const FST_K(fst_places) * at, uint32_t base, unsigned turn, int states,
                             const fst_held_f32 *x)
{
    FST_UNROLL
    for (int k = 0; k < states; k++)
        FST_UNROLL
    for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)
        fst_store_once(&at->state[k][base / STATE_ITEMS + FST_K(word_of)(turn, n, STATE_ITEMS)],
                       FST_TYPED(narrow_numbers, STATE)(&x->state[k][n * STATE_ITEMS]));
#if MASTERS
    fst_store_once(&at->master[base / 4 + FST_K(word_of)(turn, 0, 4)],
                   narrow_numbers_of_f32(&x->p[0]));
    fst_store_once(&at->master[base / 4 + FST_K(word_of)(turn, 1, 4)],
                   narrow_numbers_of_f32(&x->p[4]));
#endif
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)
        at->param[base / PARAM_ITEMS + FST_K(word_of)(turn, n, PARAM_ITEMS)] =
            FST_TYPED(narrow_numbers, PARAM)(&x->p[n * PARAM_ITEMS]);
}

FST_DEVICE void FST_K(store_grad)(const FST_K(fst_places) * at, uint32_t base, unsigned turn,
                                  float sign, const float *g)
{
    float x[8];
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        x[q] = sign * g[q];
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)
        at->grad[base / PARAM_ITEMS + FST_K(word_of)(turn, n, PARAM_ITEMS)] =
            FST_TYPED(narrow_word, PARAM)(&x[n * PARAM_ITEMS]);
}

/* So many that a thread has some 8 loads in flight. */
#define WORDS(states) (2 * FST_K(PARAM_WORDS) + 2 * MASTERS + (states) * FST_K(STATE_WORDS))
#define TURNS(states) (WORDS(states) <= 2 ? 4 : WORDS(states) <= 4 ? 2 : 1)

#define RULE(name, states, hyper)                                                                 \
    FST_DEVICE uint32_t FST_K(name##_known)(const fst_share *share, const fst_device_operand *op, \
                                            const fst_step_f32 *step, const int write_grad,       \
                                            uint64_t *again)                                      \
    {                                                                                             \
        const uint32_t run = 8 * FST_WARP * TURNS(states), ahead = step->warp * run;              \
        const uint32_t stride = step->warps * run, known = share->whole - share->whole % run;     \
        const name##_args_quick a = *(const name##_args_quick *)step->args;                       \
        const float inv_scale = step->inv_scale, sign = step->sign;                               \
        const float coefficient = sign * step->coefficient;                                       \
        const FST_K(fst_places) at = FST_K(places_of)(share, op, ahead, states);                  \
        for (uint32_t base = 0; base + ahead < known; base += stride) {                           \
            FST_K(fst_loaded) words[TURNS(states)];                                               \
            FST_UNROLL                                                                            \
            for (unsigned turn = 0; turn < TURNS(states); turn++)                                 \
                FST_K(load)(&at, base, turn, states, &words[turn]);                               \
            __syncwarp(); /* nvcc moves no load past it */                                        \
            FST_UNROLL                                                                            \
            for (unsigned turn = 0; turn < TURNS(states); turn++) {                               \
                fst_held_f32 x;                                                                   \
                FST_K(widen)(&words[turn], states, &x);                                           \
                FST_UNROLL                                                                        \
                for (unsigned q = 0; q < 8; q++) {                                                \
                    float s[FST_MAX_STATES] = {x.state[0][q], x.state[1][q], x.state[2][q]};      \
                    x.g[q] = x.g[q] * inv_scale * coefficient;                                    \
                    x.p[q] = name##_rule_quick(x.p[q], x.g[q], s, &a);                            \
                    FST_UNROLL                                                                    \
                    for (int k = 0; k < (states); k++)                                            \
                        x.state[k][q] = s[k];                                                     \
                }                                                                                 \
                if (any_nan_f32(x.p)) {                                                           \
                    fst_again(again, base + ahead, turn);                                         \
                    continue;                                                                     \
                }                                                                                 \
                if (write_grad)                                                                   \
                    FST_K(store_grad)(&at, base, turn, sign, x.g);                                \
                FST_K(store)(&at, base, turn, states, &x);                                        \
            }                                                                                     \
        }                                                                                         \
        return known;                                                                             \
    }
#include "rules/rules.def"
#undef RULE
#undef WORDS
#undef TURNS

/* Updates the tiles that fill all turns of a warp; returns the number of their elements. */
FST_DEVICE uint32_t FST_K(update_known)(const fst_share *share, const fst_device_operand *op,
                                        const fst_step_f32 *step, const int write_grad,
                                        uint64_t *again)
{
    switch (step->rule) {
#define RULE(name, states, hyper) \
    case FST_RULE_##name:         \
        return FST_K(name##_known)(share, op, step, write_grad, again);
#include "rules/rules.def"
#undef RULE
    default:
        return 0;
    }
}
