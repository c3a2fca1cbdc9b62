/* update_codes.h - the update by the loops of rule_loops.h where all states are in codes. Blocks
 * stay in the first-level cache from their old codes to the new ones. Included once for each set of
 * kinds. */

#define STATE codes
#define FUNCTION(name) FST_FN void FST_S(block_##name)
#define UNCOUPLED uncoupled
#include "cpu/rule_loops.h"

typedef void (*FST_S(block_loop))(size_t n, KIND(TYPE, VALUE) * p,
                                  KIND(REST, VALUE)(KIND(TYPE, VALUE) * rest, )
                                          const KIND(TYPE, GRAD) *
                                      g,
                                  KIND(TYPE, STATE) * s0, KIND(TYPE, STATE) * s1,
                                  KIND(TYPE, STATE) * s2, int uncoupled, const void *args,
                                  REAL inv_scale, REAL factor);

/* The block of an operand that is updated. */
#define OPERAND(kind, name, k)                                                             \
    char *name = strip->data[k] + ((int64_t)b - 1) * (int64_t)(FST_BLOCK * ELEMENT(kind)); \
    if (b - 1 < strip->far)                                                                \
        prefetch_lines(name + PREFETCH * ELEMENT(kind), FST_BLOCK * ELEMENT(kind));        \
    name = b - 1 < blocks ? name : room[k]

/* The update of a strip by a rule's loop over a block. At each turn one block is updated, that
 * before it encoded, and that after it decoded; at both ends something else is updated instead. */
FST_FN void FST_S(over_blocks)(FST_S(block_loop) loop, unsigned states, int uncoupled,
                               const code_strip *of, const fst_rule_args *args, REAL inv_scale,
                               REAL factor)
{
    enum { PAIRS = KIND(EACH, VALUE) == 2 };
    const fst_rule_args own = *args; /* copies, which no code that is stored can change */
    const code_strip copy = *of, *strip = &copy;
    const size_t blocks = strip->blocks;
    code_stages s[FST_MAX_STATES];
    char room[FST_OP_STATE][FST_BLOCK * sizeof(float)] ALIGNED;
    memset(s, 0, sizeof s);
    memset(room, 0, sizeof room);
    for (size_t b = 0; b < blocks + 2; b++) {
        for (unsigned k = 0; k < states; k++) {
            uint8_t *codes = (uint8_t *)strip->data[FST_OP_STATE + k] + b * FST_BLOCK;
            uint16_t *scales = strip->scales[k] + b;
            if (b < strip->far) {
                __builtin_prefetch(scales + PREFETCH / FST_BLOCK);
                prefetch_lines(codes + PREFETCH, FST_BLOCK);
            }
            scale_block(&s[k], !k);
            if (b < blocks)
                take_block(&s[k], codes, *scales, !k, PAIRS);
        }
        OPERAND(VALUE, p, FST_OP_PARAM);
        KIND(REST, VALUE)(OPERAND(VALUE, rest, FST_OP_MASTER));
        OPERAND(GRAD, g, FST_OP_GRAD);
        loop(0, (void *)p, KIND(REST, VALUE)((void *)rest, )(void *)g, &s[0], &s[1], &s[2],
             uncoupled, &own, inv_scale, factor);
        for (unsigned k = 0; k < states && b >= 2; k++)
            put_block(&s[k], (uint8_t *)strip->data[FST_OP_STATE + k] + (b - 2) * FST_BLOCK,
                      strip->scales[k] + b - 2, PAIRS);
    }
}

#define OVER(name, states, uncoupled) \
    FST_S(over_blocks)(FST_S(block_##name), states, uncoupled, strip, args, inv_scale, factor)
#define RULE(name, states, hyper)                                                        \
    __attribute__((noinline)) static void FST_S(fst_loop_##name)(                        \
        const code_strip *strip, const fst_rule_args *args, REAL inv_scale, REAL factor) \
    {                                                                                    \
        const FST_T(name##_args) *a = (const void *)args;                                \
        if (a->l2 == (REAL)0)                                                            \
            OVER(name, states, 1);                                                       \
        else                                                                             \
            OVER(name, states, 0);                                                       \
    }
#include "rules/rules.def"
#undef RULE
#undef OVER

typedef void (*FST_S(strip_loop))(const code_strip *strip, const fst_rule_args *args,
                                  REAL inv_scale, REAL factor);

static const FST_S(strip_loop) FST_S(rules)[FST_RULE_COUNT] = {
#define RULE(name, states, hyper) [FST_RULE_##name] = FST_S(fst_loop_##name),
#include "rules/rules.def"
#undef RULE
};

/* As update_plain. */
static size_t FST_S(update_codes)(const fst_operand *op, int64_t begin, size_t count,
                                  const fst_update_args *args, double inv_scale, REAL factor,
                                  int write_grad)
{
    const fst_operand *of_states = &op[FST_OP_STATE];
    const int64_t end = begin + (int64_t)count;
    code_block at = {.at = begin, .segment_end = begin}, copied[ROOM_BLOCKS];
    const FST_S(strip_loop) loop = FST_S(rules)[args->rule];
    strip_rooms rooms;
    if (!loop)
        return 0;
    for (at = block_after(of_states, at, end); at.n;) {
        const size_t far = reach(count, (size_t)(at.at - begin)), whole = whole_in_row(at);
        const int in_place = whole >= FEWEST_BLOCKS;
        code_strip strip;
        size_t blocks = 0;
        if (in_place) {
            blocks = whole;
            strip = strip_from(op, at, blocks);
            strip.far = far < PREFETCH ? 0 : (far - PREFETCH) / FST_BLOCK;
            at.n = blocks * FST_BLOCK;
            at.scale += (int64_t)blocks - 1;
            at = block_after(of_states, at, end);
        } else {
            while (at.n && blocks < ROOM_BLOCKS && whole_in_row(at) < FEWEST_BLOCKS) {
                copy_block(&rooms, blocks, op, at, 0, 0);
                copied[blocks++] = at;
                at = block_after(of_states, at, end);
            }
            strip = strip_in(&rooms, blocks);
        }
        void *g = strip.data[FST_OP_GRAD];
        if (write_grad)
            FST_T(scale_grads)(blocks * FST_BLOCK, g, args, inv_scale);
        loop(&strip, &args->rule_args, (REAL)(write_grad ? 1.0 : inv_scale), factor);
        for (size_t b = 0; !in_place && b < blocks; b++)
            copy_block(&rooms, b, op, copied[b], 1, write_grad);
    }
    return count;
}

#undef OPERAND
#undef STATE
#undef FST_S
