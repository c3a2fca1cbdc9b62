/* update_known.h - updates a chunk by a loop that knows its rule and its types: PARAM is that of
 * parameter and gradient, STATE that of the states (typed_words.h), and a word holds so many
 * elements of them. With OR_PARAM and OR_STATE all are of the first types or of these, which a warp
 * asks for once. With MASTERS the parameter has a master in fp32. Included once for each set of
 * types.
 *
 * A warp takes tiles of 256 elements, 8 of each thread, TURNS of them one after another. All loads
 * of an iteration are issued before the first of them is waited for; addresses and arguments are in
 * registers. Roots and quotients are taken by quick_math.h. Where these are not sure, the thread
 * stores nothing of the tile and sets its bit in `unsure`. Rules behind
 * FST_LAST_KNOWN have no such loop.
 *
 * Where the gradient is not aligned to 16 bytes (`loose`), rules up to FST_LAST_LOOSE have a loop
 * that moves it by elements, with fewer turns. */

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

FST_DEVICE FST_K(fst_places)
    FST_K(places_of)(const fst_share *share, const fst_device_operand *op, int states)
{
    const uint64_t first = (uint64_t)share->begin + share->thread * (uint32_t)FST_K(RUN);
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

/* A thread's word n of a turn, of the tiles that begin at element `base` of the chunk. */
FST_DEVICE fst_words *FST_K(word_of)(fst_words *first, uint32_t base, unsigned turn, unsigned n,
                                     unsigned items)
{
    const unsigned words_of_run = FST_K(RUN) / items;
    const unsigned run = turn * (8 / FST_K(RUN)) + n / words_of_run;
    fst_words *of_base = (fst_words *)((char *)first + (uint64_t)base * (16 / items));
    return of_base + run * FST_WARP * words_of_run + n % words_of_run;
}

/* A thread's element q of a turn, of a gradient. */
FST_DEVICE FST_ITEM(PARAM_ITEMS) *
    FST_K(item_of)(fst_words *first, uint32_t base, unsigned turn, unsigned q)
{
    fst_words *word = FST_K(word_of)(first, base, turn, q / PARAM_ITEMS, PARAM_ITEMS);
    return (FST_ITEM(PARAM_ITEMS) *)word + q % PARAM_ITEMS;
}

FST_DEVICE void FST_K(load)(const FST_K(fst_places) * at, uint32_t base, unsigned turn,
                            const int loose, int states, FST_K(fst_loaded) * words)
{
    if (loose) {
        FST_UNROLL
        for (unsigned q = 0; q < 8; q++)
            words->grad[q / 4].word[q % 4] = *FST_K(item_of)(at->grad, base, turn, q);
    } else {
        FST_UNROLL
        for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)
            words->grad[n] = *FST_K(word_of)(at->grad, base, turn, n, PARAM_ITEMS);
    }
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)
        words->param[n] = *FST_K(word_of)(at->param, base, turn, n, PARAM_ITEMS);
#if MASTERS
    words->master[0] = *FST_K(word_of)(at->master, base, turn, 0, 4);
    words->master[1] = *FST_K(word_of)(at->master, base, turn, 1, 4);
#endif
    FST_UNROLL
    for (int k = 0; k < states; k++)
        FST_UNROLL
    for (unsigned n = 0; n < FST_K(STATE_WORDS); n++)
        words->state[k][n] = *FST_K(word_of)(at->state[k], base, turn, n, STATE_ITEMS);
}

/* Whether the parameter is of the type OR_PARAM. */
#ifdef OR_PARAM
FST_DEVICE int FST_K(has_other)(const fst_device_operand *op)
{
    return fst_uniform(op[FST_OP_PARAM].dtype != FST_BF16);
}
#else
#define OR_PARAM PARAM
#define OR_STATE STATE
#define FST_ONE_PARAM
FST_DEVICE int FST_K(has_other)(const fst_device_operand *op)
{
    (void)op;
    return 0;
}
#endif

/* Widens parameters, gradients and states of these types, and rounds the masters to the first. */
#define TAKE(type, of_states)                                                                     \
    do {                                                                                          \
        FST_UNROLL                                                                                \
        for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {                                       \
            FST_TYPED(widen_word, type)(&words->param[n], &x->p[n * PARAM_ITEMS]);                \
            FST_TYPED(widen_word, type)(&words->grad[n], &x->g[n * PARAM_ITEMS]);                 \
            if (MASTERS) {                                                                        \
                const fst_words narrow =                                                          \
                    FST_TYPED(narrow_numbers, type)(&master[n * PARAM_ITEMS]);                    \
                FST_TYPED(widen_word, type)(&narrow, &rounded[n * PARAM_ITEMS]);                  \
            }                                                                                     \
        }                                                                                         \
        FST_UNROLL                                                                                \
        for (unsigned q = 0; loose && q < 8; q++)                                                 \
            x->g[q] = FST_TYPED(widen_item, type)(words->grad[q / 4].word[q % 4]);                \
        FST_UNROLL                                                                                \
        for (int n = 0; n < states * FST_K(STATE_WORDS); n++) {                                   \
            const int k = n / FST_K(STATE_WORDS), w = n % FST_K(STATE_WORDS);                     \
            FST_TYPED(widen_word, of_states)(&words->state[k][w], &x->state[k][w * STATE_ITEMS]); \
        }                                                                                         \
    } while (0)

FST_DEVICE void FST_K(widen)(const FST_K(fst_loaded) * words, const int loose, int other,
                             int states, fst_held_f32 *x)
{
    float master[8] = {0}, rounded[8] = {0};
    FST_UNROLL
    for (int q = 0; q < 8 * MASTERS; q++)
        master[q] = fst_f32_of_bits(words->master[q / 4].word[q % 4]);
    if (other)
        TAKE(OR_PARAM, OR_STATE);
    else
        TAKE(PARAM, STATE);
    FST_UNROLL
    for (int q = 0; q < 8 * MASTERS; q++)
        x->p[q] = rounded[q] == x->p[q] ? master[q] : x->p[q];
    FST_UNROLL
    for (int k = states; k < FST_MAX_STATES; k++)
        FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        x->state[k][q] = 0.0f;
}

/* Stores parameters and states in these types. */
#define PUT(type, of_states)                                                                     \
    do {                                                                                         \
        FST_UNROLL                                                                               \
        for (int n = 0; n < states * FST_K(STATE_WORDS); n++) {                                  \
            const int k = n / FST_K(STATE_WORDS), w = n % FST_K(STATE_WORDS);                    \
            fst_store_once(FST_K(word_of)(at->state[k], base, turn, (unsigned)w, STATE_ITEMS),   \
                           FST_TYPED(narrow_numbers, of_states)(&x->state[k][w * STATE_ITEMS])); \
        }                                                                                        \
        FST_UNROLL                                                                               \
        for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++)                                        \
            *FST_K(word_of)(at->param, base, turn, n, PARAM_ITEMS) =                             \
                FST_TYPED(narrow_numbers, type)(&x->p[n * PARAM_ITEMS]);                         \
    } while (0)

FST_DEVICE void FST_K(store)(const FST_K(fst_places) * at, uint32_t base, unsigned turn, int other,
                             int states, const fst_held_f32 *x)
{
#if MASTERS
    fst_store_once(FST_K(word_of)(at->master, base, turn, 0, 4), narrow_numbers_of_f32(&x->p[0]));
    fst_store_once(FST_K(word_of)(at->master, base, turn, 1, 4), narrow_numbers_of_f32(&x->p[4]));
#endif
    if (other)
        PUT(OR_PARAM, OR_STATE);
    else
        PUT(PARAM, STATE);
}

/* Stores the gradients unscaled and clipped, from what was loaded: those that the rule was given
 * have the sign of a maximization, and weight decay. */
FST_DEVICE void FST_K(store_grad)(const FST_K(fst_places) * at, uint32_t base, unsigned turn,
                                  const int loose, int other, const FST_K(fst_loaded) * words,
                                  const fst_step_f32 *step)
{
    FST_UNROLL
    for (unsigned n = 0; n < FST_K(PARAM_WORDS); n++) {
        fst_words to;
        float x[PARAM_ITEMS];
        fst_words from = words->grad[n];
        if (PARAM_ITEMS == 8 && loose)
            from = fst_pack(words->grad);
        if (other)
            FST_TYPED(widen_word, OR_PARAM)(&from, x);
        else
            FST_TYPED(widen_word, PARAM)(&from, x);
        FST_UNROLL
        for (unsigned q = 0; q < PARAM_ITEMS; q++)
            x[q] = x[q] * step->inv_scale * step->coefficient;
        if (other)
            to = FST_TYPED(narrow_word, OR_PARAM)(x);
        else
            to = FST_TYPED(narrow_word, PARAM)(x);
        if (!loose)
            *FST_K(word_of)(at->grad, base, turn, n, PARAM_ITEMS) = to;
        FST_UNROLL
        for (unsigned q = 0; loose && q < PARAM_ITEMS; q++)
            *FST_K(item_of)(at->grad, base, turn, n * PARAM_ITEMS + q) =
                (FST_ITEM(PARAM_ITEMS))fst_item_of(&to, q, PARAM_ITEMS);
    }
}

/* So many that a thread has some 8 loads in flight. */
#define WORDS(states) (2 * FST_K(PARAM_WORDS) + 2 * MASTERS + (states) * FST_K(STATE_WORDS))
#define TURNS(states) (WORDS(states) <= 2 && !loose ? 4 : WORDS(states) <= 4 ? 2 : 1)

#define RULE(name, states, hyper)                                                                 \
    FST_DEVICE uint32_t FST_K(name##_known)(const fst_share *share, const fst_device_operand *op, \
                                            const fst_step_f32 *step, const int write_grad,       \
                                            const int loose, uint64_t *unsure)                    \
    {                                                                                             \
        const uint32_t run = 8 * FST_WARP * TURNS(states);                                        \
        const uint32_t stride = step->warps * run, known = share->whole - share->whole % run;     \
        const name##_args_known a = *(const name##_args_known *)step->args;                       \
        const int decays = fst_uniform(a.l2 != 0.0f), other = FST_K(has_other)(op);               \
        const float inv_scale = step->inv_scale, coefficient = step->sign * step->coefficient;    \
        const FST_K(fst_places) at = FST_K(places_of)(share, op, states);                         \
        for (uint32_t base = step->warp * run; base < known; base += stride) {                    \
            FST_K(fst_loaded) words[4];                                                           \
            FST_UNROLL                                                                            \
            for (unsigned turn = 0; turn < TURNS(states); turn++)                                 \
                FST_K(load)(&at, base, turn, loose, states, &words[turn]);                        \
            __syncwarp(); /* nvcc moves no load past it */                                        \
            FST_UNROLL                                                                            \
            for (unsigned turn = 0; turn < TURNS(states); turn++) {                               \
                fst_held_f32 x;                                                                   \
                FST_K(widen)(&words[turn], loose, other, states, &x);                             \
                FST_UNROLL                                                                        \
                for (unsigned q = 0; q < 8; q++)                                                  \
                    x.g[q] = x.g[q] * inv_scale * coefficient;                                    \
                name##_apply_known(&x, &a, decays);                                               \
                if (!fst_all_large(x.p, !write_grad)) {                                           \
                    if (!fst_others_zero(x.p, x.g, x.state[0])) {                                 \
                        fst_leave(unsure, base, turn);                                            \
                        continue;                                                                 \
                    }                                                                             \
                    if (write_grad)                                                               \
                        FST_K(store_grad)(&at, base, turn, loose, other, &words[turn], step);     \
                }                                                                                 \
                FST_K(store)(&at, base, turn, other, states, &x);                                 \
            }                                                                                     \
        }                                                                                         \
        return known;                                                                             \
    }
#include "rules/rules.def"
#undef RULE
#undef WORDS
#undef TURNS
#undef TAKE
#undef PUT

/* Updates the tiles that fill all turns of a warp; returns the number of their elements. */
FST_DEVICE uint32_t FST_K(update_known)(const fst_share *share, const fst_device_operand *op,
                                        const fst_step_f32 *step, const int write_grad,
                                        uint64_t *unsure)
{
    const int loose = fst_uniform(!fst_aligned(share, &op[FST_OP_GRAD]));
    switch (step->rule) {
#define RULE(name, states, hyper)                                               \
    case FST_RULE_##name:                                                       \
        if (!loose && FST_RULE_##name <= FST_LAST_KNOWN)                        \
            return FST_K(name##_known)(share, op, step, write_grad, 0, unsure); \
        if (loose && FST_RULE_##name <= FST_LAST_LOOSE)                         \
            return FST_K(name##_known)(share, op, step, write_grad, 1, unsure); \
        return 0;
#include "rules/rules.def"
#undef RULE
    default:
        return 0;
    }
}

#ifdef FST_ONE_PARAM
#undef OR_PARAM
#undef OR_STATE
#undef FST_ONE_PARAM
#endif
