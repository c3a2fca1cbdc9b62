/* lanes.h - the lanes of a reduction: their start and their fold, as rules/tree.h lays down. */
#ifndef FST_CPU_LANES_H
#define FST_CPU_LANES_H

#include "cpu/kernels.h"

static void fill_lanes(double *lanes, size_t count, fst_norm_kind norm)
{
    const double neutral = fst_tree_neutral(norm);
    const size_t used = count < FST_LANES ? count : FST_LANES;
    for (size_t i = 0; i < used; i++)
        lanes[i] = neutral;
}

/* The number of lanes that take another one when the upper half of `half` lanes is folded into the
 * lower; the others are neutral. */
static size_t folded(size_t used, size_t half)
{
    return used <= half ? 0 : used - half < half ? used - half : half;
}

#define FOLD(name, expression)                                   \
    static void name(double *restrict lanes, size_t used)        \
    {                                                            \
        for (size_t half = FST_LANES / 2; half > 0; half /= 2) { \
            const double *upper = lanes + half;                  \
            const size_t count = folded(used, half);             \
            for (size_t i = 0; i < count; i++)                   \
                lanes[i] = (expression);                         \
            used = used < half ? used : half;                    \
        }                                                        \
    }
FOLD(fold_sum, lanes[i] + upper[i])
FOLD(fold_max, fst_tree_max(lanes[i], upper[i]))
FOLD(fold_min, fst_tree_min(lanes[i], upper[i]))
#undef FOLD

static double fold_lanes(double *lanes, size_t count, fst_norm_kind norm)
{
    const size_t used = count < FST_LANES ? count : FST_LANES;
    if (used == 0)
        return fst_tree_neutral(norm);
    if (norm == FST_NORM_MAX)
        fold_max(lanes, used);
    else if (norm == FST_NORM_MIN)
        fold_min(lanes, used);
    else
        fold_sum(lanes, used);
    return lanes[0];
}

#endif
