/* update.h - the update pass over one chunk, included once for float and once for double. */

/* Rounds to bf16 by noise. */
__attribute__((noinline)) static void FST_T(fst_loop_narrow_bf16_by)(size_t n,
                                                                     uint16_t *restrict to,
                                                                     const REAL *restrict from,
                                                                     const uint16_t *restrict noise)
{
    for (size_t i = 0; i < n; i++)
        to[i] = fst_f32_to_bf16_by((float)from[i], noise[i]);
}

/* The same, into an operand. */
static void FST_T(store_by)(const fst_operand *op, const REAL *strip, int64_t at, size_t n,
                            const uint16_t *noise)
{
    char raw[STRIP * sizeof(uint16_t)] ALIGNED;
    FST_T(fst_loop_narrow_bf16_by)(n, halves_of(op, raw, at, n, 0), strip, noise);
    if (op->layout)
        fst_strided_copy(op, raw, at, n, 1);
}

/* x = factor * x */
__attribute__((noinline)) static void FST_T(fst_loop_scale)(size_t n, REAL *restrict x, REAL factor)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= factor;
}

/* Unscales and clips gradients that are written back. */
static void FST_T(scale_grads)(size_t n, REAL *g, const fst_update_args *args, double inv_scale)
{
    FST_T(fst_loop_scale)(n, g, (REAL)inv_scale);
    FST_T(fst_loop_scale)(n, g, (REAL)args->clip_coefficient);
}

#define VALUE real
#define GRAD real
#define STATE real
#define FST_S(name) FST_T(name)
#include "cpu/update_plain.h"
#ifdef NARROW_OPERANDS
#define STATE bf16
#define FST_S(name) FST_T(name##_beside_bf16)
#include "cpu/update_plain.h"
#define STATE noisy
#define FST_S(name) FST_T(name##_beside_noisy)
#include "cpu/update_plain.h"
#undef VALUE
#undef GRAD
#define VALUE halves
#define GRAD bf16
#define STATE real
#define FST_S(name) FST_T(name##_of_halves)
#include "cpu/update_plain.h"
#undef VALUE
#undef GRAD
#define VALUE halves_pair
#define GRAD pair
#define STATE pair
#define FST_S(name) FST_T(name##_of_halves_beside_bf16)
#include "cpu/update_plain.h"
#define STATE noisy_pair
#define FST_S(name) FST_T(name##_of_halves_beside_noisy)
#include "cpu/update_plain.h"
#undef VALUE
#undef GRAD
/* Of other rules these are seldom: they take the way of all operands, below. */
#define FEW_RULES
#define VALUE real
#define GRAD real
#define FST_S(name) FST_T(name##_beside_codes)
#include "cpu/update_codes.h"
#undef VALUE
#define VALUE halves
#define STATE real
#define FST_S(name) FST_T(name##_of_halves_by_fp32)
#include "cpu/update_plain.h"
#undef VALUE
#define VALUE halves_pair
#define STATE pair
#define FST_S(name) FST_T(name##_of_halves_by_fp32_beside_bf16)
#include "cpu/update_plain.h"
#define FST_S(name) FST_T(name##_of_halves_by_fp32_beside_codes)
#include "cpu/update_codes.h"
#undef GRAD
#define GRAD pair
#define FST_S(name) FST_T(name##_of_halves_beside_codes)
#include "cpu/update_codes.h"
#undef FEW_RULES
#endif
#undef VALUE
#undef GRAD

/* Whether all operands are worked on in place: gradient and states of these types, or the states in
 * codes, the parameter in halves, or of the type that is computed in and alone. */
static int FST_T(is_plain)(const fst_operand *op, unsigned states, int halves, int grad, int state)
{
    const fst_operand *param = &op[FST_OP_PARAM], *rest = &op[FST_OP_MASTER];
    int plain = !param->layout && !op[FST_OP_GRAD].layout && (int)op[FST_OP_GRAD].dtype == grad;
    if (halves)
        plain = plain && param->dtype == FST_BF16 && fst_is_remainder(rest) && !rest->layout;
    else
        plain = plain && (int)param->dtype == FST_T(SELF) &&!rest->data;
    for (unsigned k = FST_OP_STATE; k < FST_OP_STATE + states; k++)
        plain = plain && !op[k].layout &&
                (state == IN_CODES ? is_in_codes(&op[k], k == FST_OP_STATE)
                                   : (int)op[k].dtype == state);
    return plain;
}

/* The update by one of the loops above, if there is one for these operands. Returns how many
 * elements are done. */
static size_t FST_T(update_in_place)(const fst_operand *op, int64_t begin, size_t count,
                                     const fst_update_args *args, double inv_scale, REAL factor,
                                     int write_grad)
{
    const unsigned states = FST_T(rules)[args->rule].states;
#define SET(halves, grad, state, name)                      \
    if ((!write_grad || (int)(grad) == (int)FST_T(SELF)) && \
        FST_T(is_plain)(op, states, halves, grad, state))   \
        return FST_T(name)(op, begin, count, args, inv_scale, factor, write_grad);
    SET(0, FST_T(SELF), FST_T(SELF), update_plain)
#ifdef NARROW_OPERANDS
    SET(1, FST_F32, FST_F32, update_plain_of_halves_by_fp32)
    SET(1, FST_BF16, FST_F32, update_plain_of_halves)
    SET(0, FST_F32, IN_CODES, update_codes_beside_codes)
    SET(1, FST_F32, IN_CODES, update_codes_of_halves_by_fp32_beside_codes)
    SET(1, FST_BF16, IN_CODES, update_codes_of_halves_beside_codes)
    if (args->noisy) {
        SET(0, FST_F32, FST_BF16, update_plain_beside_noisy)
        SET(1, FST_BF16, FST_BF16, update_plain_of_halves_beside_noisy)
        return 0;
    }
    SET(0, FST_F32, FST_BF16, update_plain_beside_bf16)
    SET(1, FST_F32, FST_BF16, update_plain_of_halves_by_fp32_beside_bf16)
    SET(1, FST_BF16, FST_BF16, update_plain_of_halves_beside_bf16)
#endif
#undef SET
    return 0;
}

/* As load and store, of a state in codes. */
static REAL *FST_T(load_codes)(const fst_operand *op, REAL *scratch, int64_t at, size_t n)
{
    float narrow[STRIP] ALIGNED;
    const int is_narrow = sizeof(REAL) == sizeof narrow[0];
    FST_OF_ISA(fst_convert_codes)(op, is_narrow ? (float *)(void *)scratch : narrow, at, n, 0);
    if (!is_narrow)
        FST_T(fst_loop_widen_other)(n, scratch, (const OTHER *)(const void *)narrow);
    return scratch;
}

static void FST_T(store_codes)(const fst_operand *op, REAL *strip, int64_t at, size_t n)
{
    float narrow[STRIP] ALIGNED;
    const int is_narrow = sizeof(REAL) == sizeof narrow[0];
    if (!is_narrow)
        FST_T(fst_loop_narrow_other)(n, (OTHER *)(void *)narrow, strip);
    FST_OF_ISA(fst_convert_codes)(op, is_narrow ? (float *)(void *)strip : narrow, at, n, 1);
}

static void FST_T(update)(const fst_operand *op, int64_t begin, size_t count,
                          const fst_update_args *args, double inv_scale, int write_grad)
{
    REAL scratch[FST_OP_STATE][STRIP] ALIGNED, of_states[FST_MAX_STATES][STRIP] ALIGNED;
    noise_room room;
    const uint16_t *noise = NULL;
    const double factor = write_grad ? args->sign : args->sign * args->clip_coefficient;
    const unsigned states = FST_T(rules)[args->rule].states;
    size_t done =
        FST_T(update_in_place)(op, begin, count, args, inv_scale, (REAL)factor, write_grad);
    if (done == count)
        return;
    const fst_operand *codes = state_in_codes(op, states);
    for (size_t n; done < count; done += n) {
        const int64_t at = begin + (int64_t)done;
        n = count - done < STRIP ? count - done : STRIP;
        if (codes)
            n = whole_blocks(codes, at, n, count - done);
        REAL *s[FST_MAX_STATES] = {NULL, NULL, NULL};
        for (unsigned k = 0; k < FST_OP_STATE + states; k++)
            if (!op[k].scales)
                prefetch(&op[k], at, reach(count, done));
        for (unsigned k = 0; k < states; k++) {
            const fst_operand *state = &op[FST_OP_STATE + k];
            s[k] = (state->scales ? FST_T(load_codes) : FST_T(load))(state, of_states[k], at, n);
        }
        REAL *p = FST_T(load_value)(op, scratch[FST_OP_PARAM], at, n);
        REAL *g = FST_T(load)(&op[FST_OP_GRAD], scratch[FST_OP_GRAD], at, n);
        if (write_grad) {
            FST_T(scale_grads)(n, g, args, inv_scale);
            FST_T(store)(&op[FST_OP_GRAD], g, at, n);
        }
        FST_T(rules)[args->rule].loop(n, p, g, s[0], s[1], s[2], &args->rule_args,
                                      (REAL)(write_grad ? 1.0 : inv_scale), (REAL)factor);
        if (args->noisy)
            noise = noise_for(room, args, states, at, n);
        for (unsigned k = 0; k < states; k++)
            if (op[FST_OP_STATE + k].scales)
                FST_T(store_codes)(&op[FST_OP_STATE + k], s[k], at, n);
            else if (args->noisy && op[FST_OP_STATE + k].dtype == FST_BF16)
                FST_T(store_by)(&op[FST_OP_STATE + k], s[k], at, n, noise + k * NOISE_ROOM);
            else
                FST_T(store)(&op[FST_OP_STATE + k], s[k], at, n);
        FST_T(store_value)(op, p, at, n);
    }
}
