/* update.h - the update pass over one chunk, included once for float and once for double. */

/* x = factor * x */
__attribute__((noinline)) static void FST_T(fst_loop_scale)(size_t n, REAL *restrict x, REAL factor)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= factor;
}

/* Prefetches the strip after next. The hardware's prefetchers stop at the end of a page, and up
 * to seven streams run here. */
static void FST_T(prefetch)(const fst_operand *op, int64_t at, size_t left)
{
    if (!op->data || op->layout || left < PREFETCH + STRIP)
        return;
    const size_t size = fst_dtype_size(op->dtype);
    const char *from = (const char *)op->data + ((size_t)at + PREFETCH) * size;
    for (size_t line = 0; line < STRIP * size; line += 64)
        __builtin_prefetch(from + line);
}

/* Unscales and clips gradients that are written back. */
static void FST_T(scale_grads)(size_t n, REAL *g, const fst_update_args *args, double inv_scale)
{
    FST_T(fst_loop_scale)(n, g, (REAL)inv_scale);
    FST_T(fst_loop_scale)(n, g, (REAL)args->clip_coefficient);
}

#define STATE REAL
#define WIDENED(x) (x)
#define NARROWED(x) (x)
#define FST_S(name) FST_T(name)
#include "cpu/update_plain.h"

#ifdef BF16_STATES
#define STATE uint16_t
#define WIDENED(x) fst_bf16_to_f32(x)
#define NARROWED(x) fst_f32_to_bf16(x)
#define FST_S(name) FST_T(name##_beside_bf16)
#include "cpu/update_plain.h"
#endif

/* Whether all operands are worked on in place, and the states are of this type. */
static int FST_T(is_plain)(const fst_operand *op, unsigned states, fst_dtype state)
{
    int plain = !op[FST_OP_MASTER].data && FST_T(in_place)(&op[FST_OP_PARAM]) &&
                FST_T(in_place)(&op[FST_OP_GRAD]);
    for (unsigned k = FST_OP_STATE; k < FST_OP_STATE + states; k++)
        plain = plain && !op[k].layout && op[k].dtype == state;
    return plain;
}

/* p = round(p) == now ? p : now */
__attribute__((noinline)) static void FST_T(fst_loop_follow)(size_t n, REAL *restrict p,
                                                             const REAL *restrict rounded,
                                                             const REAL *restrict now)
{
    for (size_t i = 0; i < n; i++)
        p[i] = rounded[i] == now[i] ? p[i] : now[i];
}

/* Takes over the elements of a parameter that are not the master's rounded. */
static void FST_T(follow)(const fst_operand *param, REAL *p, int64_t at, size_t n)
{
    char raw[STRIP * sizeof(double)] ALIGNED;
    REAL scratch[2][STRIP] ALIGNED;
    const fst_operand narrow = {.data = raw, .dtype = param->dtype};
    FST_T(store)(&narrow, p, 0, n);
    FST_T(fst_loop_follow)(n, p, FST_T(load)(&narrow, scratch[0], 0, n),
                           FST_T(load)(param, scratch[1], at, n));
}

static void FST_T(update)(const fst_operand *op, int64_t begin, size_t count,
                          const fst_update_args *args, double inv_scale, int write_grad)
{
    REAL scratch[FST_OP_COUNT][STRIP] ALIGNED;
    const double factor = write_grad ? args->sign : args->sign * args->clip_coefficient;
    const unsigned states = FST_T(rules)[args->rule].states;
    if (FST_T(is_plain)(op, states, (fst_dtype)FST_T(SELF))) {
        FST_T(update_plain)(op, begin, count, args, inv_scale, (REAL)factor, write_grad);
        return;
    }
#ifdef BF16_STATES
    if (FST_T(is_plain)(op, states, FST_BF16)) {
        FST_T(update_plain_beside_bf16)(op, begin, count, args, inv_scale, (REAL)factor,
                                        write_grad);
        return;
    }
#endif
    const fst_operand *value = op[FST_OP_MASTER].data ? &op[FST_OP_MASTER] : &op[FST_OP_PARAM];
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        REAL *s[FST_MAX_STATES] = {NULL, NULL, NULL};
        FST_T(prefetch)(value, at, reach(count, done));
        FST_T(prefetch)(&op[FST_OP_GRAD], at, reach(count, done));
        for (unsigned k = 0; k < states; k++) {
            FST_T(prefetch)(&op[FST_OP_STATE + k], at, reach(count, done));
            s[k] = FST_T(load)(&op[FST_OP_STATE + k], scratch[FST_OP_STATE + k], at, n);
        }
        REAL *p = FST_T(load)(value, scratch[FST_OP_PARAM], at, n);
        REAL *g = FST_T(load)(&op[FST_OP_GRAD], scratch[FST_OP_GRAD], at, n);
        if (value != &op[FST_OP_PARAM])
            FST_T(follow)(&op[FST_OP_PARAM], p, at, n);
        if (write_grad) {
            FST_T(scale_grads)(n, g, args, inv_scale);
            FST_T(store)(&op[FST_OP_GRAD], g, at, n);
        }
        FST_T(rules)[args->rule].loop(n, p, g, s[0], s[1], s[2], &args->rule_args,
                                      (REAL)(write_grad ? 1.0 : inv_scale), (REAL)factor);
        for (unsigned k = 0; k < states; k++)
            FST_T(store)(&op[FST_OP_STATE + k], s[k], at, n);
        FST_T(store)(value, p, at, n);
        if (value != &op[FST_OP_PARAM])
            FST_T(store)(&op[FST_OP_PARAM], p, at, n);
    }
}
