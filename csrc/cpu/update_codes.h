/* update_codes.h - the update by the loops of rule_loops.h where all states are in codes. A strip
 * of blocks stays in the first-level cache from its old codes to the new ones. Included once for
 * each set of kinds. */

#define STATE terms
#include "cpu/rule_loops.h"

/* As update_plain. */
static size_t FST_S(update_codes)(const fst_operand *op, int64_t begin, size_t count,
                                  const fst_update_args *args, double inv_scale, REAL factor,
                                  int write_grad)
{
    const unsigned states = FST_S(rules)[args->rule].states, parts = 2 * states + 1;
    REAL s[FST_MAX_STATES][FST_CODES_STRIP] ALIGNED;
    largest_sizes largest[FST_MAX_STATES];
    strip_room room;
    void *data[FST_OP_COUNT];
    if (!FST_S(rules)[args->rule].loop)
        return 0;
    for (size_t done = 0, n; done < count; done += n) {
        const int64_t at = begin + (int64_t)done;
        const fst_segment segment = fst_segment_at(at, op[FST_OP_STATE].row);
        const int64_t scale = segment.scale + (at - segment.begin) / FST_BLOCK;
        n = codes_strip(segment.end - at, count - done);
        const size_t blocks = (n + FST_BLOCK - 1) / FST_BLOCK, whole = blocks * FST_BLOCK;
        size_t part = 0;
        uint16_t *scales[FST_MAX_STATES] = {NULL, NULL, NULL};
        for (unsigned k = 0; k < FST_OP_COUNT; k++)
            data[k] = whole_strip(&op[k], room[k], at, n);
        for (unsigned k = 0; k < states; k++) {
            scales[k] = op[FST_OP_STATE + k].scales + scale;
            __builtin_prefetch(scales[k] + PREFETCH / FST_BLOCK);
            prefetch_part(op, at, n, reach(count, done), part++, parts);
            FST_OF_ISA(fst_of_codes)(!k, blocks, s[k], data[FST_OP_STATE + k], scales[k]);
        }
        if (write_grad)
            FST_T(scale_grads)(n, data[FST_OP_GRAD], args, inv_scale);
        prefetch_part(op, at, n, reach(count, done), part++, parts);
        FST_S(rules)
        [args->rule].loop(whole, data[FST_OP_PARAM],
                          KIND(REST, VALUE)(data[FST_OP_MASTER], ) data[FST_OP_GRAD], s[0], s[1],
                          s[2], largest, &args->rule_args, (REAL)(write_grad ? 1.0 : inv_scale),
                          factor);
        for (unsigned k = 0; k < states; k++) {
            prefetch_part(op, at, n, reach(count, done), part++, parts);
            FST_OF_ISA(fst_to_codes)
            (!k, blocks, data[FST_OP_STATE + k], scales[k], s[k], largest[k]);
        }
        for (unsigned k = 0; k < FST_OP_COUNT; k++)
            if (k != FST_OP_GRAD || write_grad)
                write_strip(&op[k], data[k], at, n);
    }
    return count;
}

#undef STATE
#undef FST_S
