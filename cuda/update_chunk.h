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
} FST_T(fst_step);

/* Multiplies by the inverse scale and then by the clip coefficient, in the order of unscale_ and
 * clip_grad_norm_. */
FST_DEVICE void FST_T(scale_grad)(FST_T(fst_held) *x, unsigned held, const FST_T(fst_step) *step)
{
    FST_UNROLL
    for (unsigned q = 0; q < held; q++)
        x->g[q] = x->g[q] * step->inv_scale * step->coefficient;
}

FST_DEVICE void FST_T(apply)(FST_T(fst_held) *x, unsigned held, const FST_T(fst_step) *step)
{
    switch (step->rule) {
#define RULE(name, states, hyper)                                                      \
    case FST_RULE_##name: {                                                            \
        const FST_T(name##_args) a = *(const FST_T(name##_args) *)step->args;          \
        FST_UNROLL                                                                     \
        for (unsigned q = 0; q < held; q++) {                                          \
            REAL s[FST_MAX_STATES] = {x->state[0][q], x->state[1][q], x->state[2][q]}; \
            x->p[q] = FST_T(name##_rule)(x->p[q], step->sign * x->g[q], s, &a);        \
            FST_UNROLL                                                                 \
            for (unsigned k = 0; k < FST_MAX_STATES; k++)                              \
                x->state[k][q] = s[k];                                                 \
        }                                                                              \
        break;                                                                         \
    }
#include "rules/rules.def"
#undef RULE
    default:
        break;
    }
}

/* The master, or the parameter where that is not the master rounded. */
FST_DEVICE REAL FST_T(newer)(REAL master, REAL param, int32_t dtype)
{
    return FST_T(rounded)(master, dtype) == param ? master : param;
}

FST_DEVICE void FST_T(update_words)(const fst_share *share, uint32_t base,
                                    const fst_device_operand *op, const FST_T(fst_step) *step,
                                    int write_grad)
{
    const fst_device_operand *value = &op[op[FST_OP_MASTER].data ? FST_OP_MASTER : FST_OP_PARAM];
    const int has_master = op[FST_OP_MASTER].data != 0;
    fst_words words[2 + FST_MAX_STATES][2], param[2];
    FST_T(fst_held) x;
    param[0] = param[1] = fst_words_zero();
    if (has_master)
        FST_T(fetch)(share, base, &op[FST_OP_PARAM], param);
    FST_T(fetch)(share, base, value, words[0]);
    FST_T(fetch)(share, base, &op[FST_OP_GRAD], words[1]);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++) {
        words[2 + k][0] = words[2 + k][1] = fst_words_zero();
        if (op[FST_OP_STATE + k].data)
            FST_T(fetch)(share, base, &op[FST_OP_STATE + k], words[2 + k]);
    }
    FST_T(widen)(words[0], value->dtype, x.p);
    if (has_master) {
        FST_T(widen)(param, op[FST_OP_PARAM].dtype, x.g);
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            x.p[q] = FST_T(newer)(x.p[q], x.g[q], op[FST_OP_PARAM].dtype);
    }
    FST_T(widen)(words[1], op[FST_OP_GRAD].dtype, x.g);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        FST_T(widen)(words[2 + k], op[FST_OP_STATE + k].dtype, x.state[k]);
    FST_T(scale_grad)(&x, HELD, step);
    if (write_grad)
        FST_T(store)(share, base, &op[FST_OP_GRAD], x.g);
    FST_T(apply)(&x, HELD, step);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (op[FST_OP_STATE + k].data)
            FST_T(store)(share, base, &op[FST_OP_STATE + k], x.state[k]);
    FST_T(store)(share, base, value, x.p);
    if (has_master)
        FST_T(store)(share, base, &op[FST_OP_PARAM], x.p);
    if (op[FST_OP_COPY].data)
        FST_T(store)(share, base, &op[FST_OP_COPY], x.p);
}

FST_DEVICE void FST_T(update_one)(const fst_share *share, uint32_t element,
                                  const fst_device_operand *op, const FST_T(fst_step) *step,
                                  int write_grad)
{
    const fst_device_operand *value = &op[op[FST_OP_MASTER].data ? FST_OP_MASTER : FST_OP_PARAM];
    FST_T(fst_held) x;
    x.p[0] = FST_T(get)(share, value, element);
    if (op[FST_OP_MASTER].data)
        x.p[0] = FST_T(newer)(x.p[0], FST_T(get)(share, &op[FST_OP_PARAM], element),
                              op[FST_OP_PARAM].dtype);
    x.g[0] = FST_T(get)(share, &op[FST_OP_GRAD], element);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        x.state[k][0] =
            op[FST_OP_STATE + k].data ? FST_T(get)(share, &op[FST_OP_STATE + k], element) : (REAL)0;
    FST_T(scale_grad)(&x, 1, step);
    if (write_grad)
        FST_T(set)(share, &op[FST_OP_GRAD], element, x.g[0]);
    FST_T(apply)(&x, 1, step);
    FST_UNROLL
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (op[FST_OP_STATE + k].data)
            FST_T(set)(share, &op[FST_OP_STATE + k], element, x.state[k][0]);
    FST_T(set)(share, value, element, x.p[0]);
    if (op[FST_OP_MASTER].data)
        FST_T(set)(share, &op[FST_OP_PARAM], element, x.p[0]);
    if (op[FST_OP_COPY].data)
        FST_T(set)(share, &op[FST_OP_COPY], element, x.p[0]);
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
    FST_T(share_with)(&share, &op[0]);
    FST_T(share_with)(&share, &op[1]);
    if (two)
        FST_T(share_with)(&share, &op[2]);
    fst_share_close(&share);
    for (uint32_t base = 0; base < share.whole; base += FST_DEVICE_BLOCK * HELD) {
        fst_words words[3][2];
        REAL sum[HELD], term[HELD], more[HELD];
        FST_T(fetch)(&share, base, &op[1], words[1]);
        words[0][0] = words[0][1] = words[2][0] = words[2][1] = fst_words_zero();
        if (two)
            FST_T(fetch)(&share, base, &op[2], words[2]);
        if (!start)
            FST_T(fetch)(&share, base, &op[0], words[0]);
        FST_T(widen)(words[0], op[0].dtype, sum);
        FST_T(widen)(words[1], op[1].dtype, term);
        FST_T(widen)(words[2], op[two ? 2 : 1].dtype, more);
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            sum[q] = FST_T(summed)(sum[q], term[q], more[q], two, factor, start);
        FST_T(store)(&share, base, &op[0], sum);
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
    FST_T(share_with)(&share, op);
    fst_share_close(&share);
    for (uint32_t base = 0; base < share.whole; base += FST_DEVICE_BLOCK * HELD) {
        fst_words words[2];
        REAL x[HELD];
        FST_T(fetch)(&share, base, op, words);
        FST_T(widen)(words, op->dtype, x);
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            x[q] = FST_T(changed)(x[q], factor, clamp);
        FST_T(store)(&share, base, op, x);
    }
    for (uint32_t i = share.whole + threadIdx.x; i < share.count; i += FST_DEVICE_BLOCK)
        FST_T(set)(&share, op, i, FST_T(changed)(FST_T(get)(&share, op, i), factor, clamp));
}
