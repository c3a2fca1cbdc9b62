/* update_chunk.h - updates and changes a chunk by a block; included once for float and once for
 * double. Elements that are not loaded by words are taken one by one, with `held` 1. */

typedef struct {
    REAL p[HELD], g[HELD], state[FST_MAX_STATES][HELD];
} FST_T(fst_held);

/* The scalars of a chunk's update. */
typedef struct {
    const void *args; /* of the rule */
    int32_t rule;
    REAL inv_scale, coefficient, sign;
    uint32_t warp, warps; /* this one, of those that work on the chunk */
    int32_t noisy;        /* bf16 states are rounded by the span's noise */
    const fst_device_span *span;
} FST_T(fst_step);

/* Multiplies by the inverse scale and then by the clip coefficient, in the order of unscale_ and
 * clip_grad_norm_. */
FST_DEVICE void FST_T(scale_grad)(FST_T(fst_held) *x, unsigned held, const FST_T(fst_step) *step)
{
    FST_UNROLL
    for (unsigned q = 0; q < held; q++)
        x->g[q] = x->g[q] * step->inv_scale * step->coefficient;
}

/* Applies the rule by quick_math.h, or exactly. */
FST_DEVICE void FST_T(apply)(FST_T(fst_held) *x, unsigned held, const FST_T(fst_step) *step,
                             const int quick)
{
#define APPLY(type, rule)                                                          \
    const type a = *(const type *)step->args;                                      \
    FST_UNROLL                                                                     \
    for (unsigned q = 0; q < held; q++) {                                          \
        REAL s[FST_MAX_STATES] = {x->state[0][q], x->state[1][q], x->state[2][q]}; \
        const REAL g = step->sign * x->g[q];                                       \
        const REAL decayed = a.l2 != (REAL)0 ? g + a.l2 * x->p[q] : g;             \
        x->p[q] = rule(x->p[q], decayed, s, &a);                                   \
        FST_UNROLL                                                                 \
        for (unsigned k = 0; k < FST_MAX_STATES; k++)                              \
            x->state[k][q] = s[k];                                                 \
    }
    switch (step->rule) {
#define RULE(name, states, hyper)                                 \
    case FST_RULE_##name:                                         \
        if (quick) {                                              \
            APPLY(FST_QUICK(name##_args), FST_QUICK(name##_rule)) \
        } else {                                                  \
            APPLY(FST_T(name##_args), FST_T(name##_rule))         \
        }                                                         \
        break;
#include "rules/rules.def"
#undef RULE
    default:
        break;
    }
#undef APPLY
}

/* The master, or the parameter where that is not the master rounded. */
FST_DEVICE REAL FST_T(newer)(REAL master, REAL param, int32_t dtype)
{
    return FST_T(rounded)(master, dtype) == param ? master : param;
}

/* The same for all elements of the words that hold the master. */
FST_DEVICE void FST_T(take_newer)(const fst_words *words, int32_t dtype, int32_t param_dtype,
                                  REAL *p)
{
    const unsigned held = HELD;
    REAL master[HELD];
    FST_T(widen)(words, dtype, master);
    switch (fst_hidden(param_dtype)) {
#define TYPE(dtype, name, items)                                                              \
    case dtype:                                                                               \
        FST_UNROLL                                                                            \
        for (unsigned first = 0; first < held; first += items) {                              \
            const fst_words narrow = narrow_numbers_##name(&master[first]);                   \
            REAL rounded[items];                                                              \
            widen_word_##name(&narrow, rounded);                                              \
            FST_UNROLL                                                                        \
            for (unsigned q = 0; q < items; q++)                                              \
                p[first + q] = rounded[q] == p[first + q] ? master[first + q] : p[first + q]; \
        }                                                                                     \
        break;
        FST_T(FST_TYPES)
#undef TYPE
    default:
        break;
    }
}

/* Numbers in halves (portable.h): from a word of bf16 and one of remainders, and back. */
FST_DEVICE void FST_T(join)(const fst_words *upper, const fst_words *remainder, REAL *p)
{
    FST_UNROLL
    for (unsigned q = 0; q < HELD; q++)
        p[q] = (REAL)fst_joined_f32((uint16_t)fst_item_of(upper, q, 8),
                                    (uint16_t)fst_item_of(remainder, q, 8));
}

FST_DEVICE void FST_T(store_halves)(const fst_tile *tile, const fst_place *upper,
                                    const fst_place *remainder, const REAL *p)
{
    fst_words high = fst_words_zero(), low = fst_words_zero();
    FST_UNROLL
    for (unsigned q = 0; q < HELD; q++) {
        high.word[q / 2] |= (uint32_t)fst_f32_to_upper((float)p[q]) << q % 2 * 16;
        low.word[q / 2] |= (uint32_t)fst_f32_to_remainder((float)p[q]) << q % 2 * 16;
    }
    if (tile->has_first) {
        *FST_T(first_of)(tile, upper) = high;
        *FST_T(first_of)(tile, remainder) = low;
    }
}

/* The noise of eight neighbours of state k, of which one is this element of the chunk. */
FST_DEVICE fst_words FST_T(noise_at)(const fst_share *share, uint32_t element, uint32_t k,
                                     const FST_T(fst_step) *step)
{
    const uint64_t eight = ((uint64_t)share->begin + element) / 8;
    const fst_device_span *span = step->span;
    fst_noise key = span->noise;
    fst_words noise;
    key.step = fst_noise_step(fst_scalar_read(&span->step));
    fst_noise_of_eight(&key, (uint32_t)eight, fst_noise_place(k, eight), noise.word);
    return noise;
}

/* Stores a word of state k in bf16, rounded by noise. */
FST_DEVICE void FST_T(store_by)(const fst_share *share, const fst_tile *tile,
                                const fst_place *place, const REAL *x, uint32_t k,
                                const FST_T(fst_step) *step)
{
    const fst_words noise = FST_T(noise_at)(share, tile->first, k, step);
    fst_words word = fst_words_zero();
    FST_UNROLL
    for (unsigned q = 0; q < HELD; q++)
        word.word[q / 2] |= (uint32_t)fst_f32_to_bf16_by((float)x[q], fst_item_of(&noise, q, 8))
                            << q % 2 * 16;
    if (tile->has_first)
        *FST_T(first_of)(tile, place) = word;
}

/* Stores an element of state k, which may be rounded by noise. */
FST_DEVICE void FST_T(set_state)(const fst_share *share, const fst_device_operand *op,
                                 uint32_t element, REAL x, uint32_t k, const FST_T(fst_step) *step)
{
    if (!step->noisy || op->dtype != FST_BF16) {
        FST_T(set)(share, op, element, x);
        return;
    }
    const fst_words noise = FST_T(noise_at)(share, element, k, step);
    const unsigned q = (unsigned)(((uint64_t)share->begin + element) % 8);
    uint32_t bits = 0;
    FST_UNROLL
    for (unsigned n = 0; n < 8; n++) /* nvcc keeps words in registers if it knows each place */
        bits = n == q ? fst_item_of(&noise, n, 8) : bits;
    fst_half_set(share, op, element, fst_f32_to_bf16_by((float)x, bits));
}

/* What the rule begins with: the parameter, its master, or the number of both halves. */
FST_DEVICE REAL FST_T(get_value)(const fst_share *share, const fst_device_operand *op,
                                 uint32_t element)
{
    const fst_device_operand *param = &op[FST_OP_PARAM], *master = &op[FST_OP_MASTER];
    if (!master->data)
        return FST_T(get)(share, param, element);
    if (master->dtype == FST_I16)
        return (REAL)fst_joined_f32(fst_half_get(share, param, element),
                                    fst_half_get(share, master, element));
    return FST_T(newer)(FST_T(get)(share, master, element), FST_T(get)(share, param, element),
                        param->dtype);
}

FST_DEVICE void FST_T(set_value)(const fst_share *share, const fst_device_operand *op,
                                 uint32_t element, REAL p)
{
    const fst_device_operand *param = &op[FST_OP_PARAM], *master = &op[FST_OP_MASTER];
    if (master->dtype == FST_I16) {
        fst_half_set(share, param, element, fst_f32_to_upper((float)p));
        fst_half_set(share, master, element, fst_f32_to_remainder((float)p));
        return;
    }
    if (master->data)
        FST_T(set)(share, master, element, p);
    FST_T(set)(share, param, element, p);
}

/* Where all operands lie. */
FST_DEVICE void FST_T(places_of)(const fst_share *share, const fst_device_operand *op,
                                 fst_place *at)
{
    FST_UNROLL
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        at[k] = fst_place_of(share, &op[k]);
}

/* Updates a thread's elements of a tile; floats by quick_math.h. Where a new parameter is NaN then,
 * stores nothing and returns 0. All loads but those of `op` are issued before the first of them is
 * waited for. */
FST_DEVICE int FST_T(update_words)(const fst_share *share, uint32_t base, fst_place *at,
                                   const fst_device_operand *op, const FST_T(fst_step) *step,
                                   int write_grad)
{
    const int quick = sizeof(REAL) == sizeof(float);
    const fst_tile tile = FST_T(tile_of)(share, base);
    const int has_master = op[FST_OP_MASTER].data != 0;
    fst_place master = {0, -1};
    fst_words words[FST_OP_COUNT][2];
    FST_T(fst_held) x;
    if (!tile.has_first)
        return 1;
    if (has_master)
        master = fst_place_of(share, &op[FST_OP_MASTER]);
    FST_T(fetch_items)(&tile, &at[FST_OP_GRAD], words[FST_OP_GRAD]);
    FST_T(fetch)(&tile, &master, words[FST_OP_MASTER]);
    FST_UNROLL
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        if (k != FST_OP_MASTER && k != FST_OP_GRAD)
            FST_T(fetch)(&tile, &at[k], words[k]);
    FST_T(pack)(&at[FST_OP_GRAD], words[FST_OP_GRAD]);
    FST_T(widen)(words[FST_OP_PARAM], at[FST_OP_PARAM].dtype, x.p);
    if (fst_hidden(master.dtype) == FST_I16)
        FST_T(join)(words[FST_OP_PARAM], words[FST_OP_MASTER], x.p);
    else if (has_master)
        FST_T(take_newer)(words[FST_OP_MASTER], master.dtype, at[FST_OP_PARAM].dtype, x.p);
    FST_T(widen)(words[FST_OP_GRAD], at[FST_OP_GRAD].dtype, x.g);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        FST_T(widen)(words[FST_OP_STATE + k], at[FST_OP_STATE + k].dtype, x.state[k]);
    FST_T(scale_grad)(&x, HELD, step);
    FST_T(apply)(&x, HELD, step, quick);
    if (quick && FST_T(any_nan)(x.p))
        return 0;
    if (!quick) { /* doubles leave no registers to keep the places in */
        fst_read_again();
        FST_T(places_of)(share, op, at);
    }
    if (write_grad)
        FST_T(store_items)(&tile, &at[FST_OP_GRAD], x.g, !quick);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (fst_hidden(step->noisy) && at[FST_OP_STATE + k].dtype == FST_BF16)
            FST_T(store_by)(share, &tile, &at[FST_OP_STATE + k], x.state[k], k, step);
        else if (at[FST_OP_STATE + k].dtype >= 0)
            FST_T(store)(&tile, &at[FST_OP_STATE + k], x.state[k], !quick);
    const fst_place there = fst_place_of(share, &op[FST_OP_MASTER]);
    if (fst_hidden(there.dtype) == FST_I16) {
        FST_T(store_halves)(&tile, &at[FST_OP_PARAM], &there, x.p);
        return 1;
    }
    FST_T(store)(&tile, &at[FST_OP_PARAM], x.p, !quick);
    if (has_master)
        FST_T(store)(&tile, &there, x.p, !quick);
    return 1;
}

/* New states in codes go to `coded`, as they are stored by blocks. */
FST_DEVICE void FST_T(update_one)(const fst_share *share, uint32_t element,
                                  const fst_device_operand *op, const FST_T(fst_step) *step,
                                  int write_grad, uint32_t block, float *coded)
{
    FST_T(fst_held) x;
    x.p[0] = FST_T(get_value)(share, op, element);
    x.g[0] = FST_T(get)(share, &op[FST_OP_GRAD], element);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++) {
        const fst_device_operand *state = &op[FST_OP_STATE + k];
        if (!state->data)
            x.state[k][0] = (REAL)0;
        else if (fst_is_coded(state))
            x.state[k][0] =
                (REAL)fst_of_code(*fst_code_at(share, state, element),
                                  *fst_scale_at(share, step->span, block, k), fst_has_signs(state));
        else
            x.state[k][0] = FST_T(get)(share, state, element);
    }
    FST_T(scale_grad)(&x, 1, step);
    if (write_grad)
        FST_T(set)(share, &op[FST_OP_GRAD], element, x.g[0]);
    FST_T(apply)(&x, 1, step, 0);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (fst_is_coded(&op[FST_OP_STATE + k]))
            coded[k] = (float)x.state[k][0];
        else if (op[FST_OP_STATE + k].data)
            FST_T(set_state)(share, &op[FST_OP_STATE + k], element, x.state[k][0], k, step);
    FST_T(set_value)(share, op, element, x.p[0]);
}

/* The sum += factor * term, and then += factor * more if there are two terms. With `start` the
 * old sum is not used. Each product is rounded before it is added. */
FST_DEVICE REAL FST_T(summed)(REAL sum, REAL term, REAL more, int two, REAL factor, int start)
{
    const REAL first = start ? term * factor : sum + term * factor;
    return two ? first + more * factor : first;
}

FST_DEVICE void FST_T(accumulate)(const fst_device_tables *tables, const fst_device_operand *op,
                                  int two, const fst_device_chunk *chunk, REAL factor, int start)
{
    fst_share share = fst_share_of(tables, chunk, threadIdx.x, FST_DEVICE_BLOCK);
    const fst_place result = fst_place_of(&share, &op[0]);
    const int loose = sizeof(REAL) == sizeof(float);
    fst_place at[3];
    FST_T(share_with)(&share, &op[0], 0);
    FST_T(share_with)(&share, &op[1], loose);
    if (two)
        FST_T(share_with)(&share, &op[2], loose);
    fst_share_close(&share);
    FST_UNROLL
    for (unsigned k = 0; k < 3; k++) {
        at[k] = fst_place_of(&share, &op[k < 2 || two ? k : 1]);
        at[k].dtype = (k == 0 && start) || (k == 2 && !two) ? -1 : at[k].dtype;
    }
    for (uint32_t base = 0; base < share.whole; base += FST_DEVICE_BLOCK * HELD) {
        const fst_tile tile = FST_T(tile_of)(&share, base);
        fst_words words[3][2];
        REAL x[3][HELD];
        FST_UNROLL
        for (unsigned k = 0; k < 3; k++)
            FST_T(fetch_items)(&tile, &at[k], words[k]);
        FST_UNROLL
        for (unsigned k = 0; k < 3; k++) {
            FST_T(pack)(&at[k], words[k]);
            FST_T(widen)(words[k], at[k].dtype, x[k]);
        }
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            x[0][q] = FST_T(summed)(x[0][q], x[1][q], x[2][q], two, factor, start);
        FST_T(store)(&tile, &result, x[0], 1);
    }
    for (uint32_t i = share.whole + threadIdx.x; i < share.count; i += FST_DEVICE_BLOCK) {
        const REAL sum = start ? (REAL)0 : FST_T(get)(&share, &op[0], i);
        const REAL more = two ? FST_T(get)(&share, &op[2], i) : (REAL)0;
        FST_T(set)(&share, &op[0], i,
                   FST_T(summed)(sum, FST_T(get)(&share, &op[1], i), more, two, factor, start));
    }
}

/* x = factor * x, or x to [-factor, factor]. */
FST_DEVICE REAL FST_T(changed)(REAL x, REAL factor, int clamp)
{
    const REAL above = x < -factor ? -factor : x;
    return !clamp ? x * factor : above > factor ? factor : above;
}

FST_DEVICE void FST_T(change)(const fst_device_tables *tables, const fst_device_operand *op,
                              const fst_device_chunk *chunk, REAL factor, int clamp)
{
    fst_share share = fst_share_of(tables, chunk, threadIdx.x, FST_DEVICE_BLOCK);
    const fst_place at = fst_place_of(&share, op);
    FST_T(share_with)(&share, op, 0);
    fst_share_close(&share);
    for (uint32_t base = 0; base < share.whole; base += FST_DEVICE_BLOCK * HELD) {
        const fst_tile tile = FST_T(tile_of)(&share, base);
        fst_words words[2];
        REAL x[HELD];
        FST_T(fetch)(&tile, &at, words);
        FST_T(widen)(words, at.dtype, x);
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            x[q] = FST_T(changed)(x[q], factor, clamp);
        FST_T(store)(&tile, &at, x, 1);
    }
    for (uint32_t i = share.whole + threadIdx.x; i < share.count; i += FST_DEVICE_BLOCK)
        FST_T(set)(&share, op, i, FST_T(changed)(FST_T(get)(&share, op, i), factor, clamp));
}
