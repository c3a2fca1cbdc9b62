/* lanes.h - starts and folds the lanes of a reduction as rules/tree.h defines it. */
#pragma once

#include "cpu/kernels.h"

enum { FEWEST_LANES = 8 }; /* the widest vector's */

/* The lanes that a chunk of `count` elements reaches, rounded up to a power of two. Folds over
 * the others are left out. */
static size_t lanes_of(size_t count)
{
    size_t used = FEWEST_LANES;
    while (used < count && used < FST_LANES)
        used *= 2;
    return used;
}

static void fill_lanes(double *lanes, size_t count, fst_norm_kind norm)
{
    const double neutral = fst_tree_neutral(norm);
    const size_t used = lanes_of(count);
    for (size_t i = 0; i < used; i++)
        lanes[i] = neutral;
}

/* Folds whole vectors first, and the last eight lanes one by one. */
#define FOLD(name, join)                                                              \
    static double name(double *lanes, size_t used)                                    \
    {                                                                                 \
        for (size_t half = used / 2; half >= FEWEST_LANES; half /= 2)                 \
            for (size_t i = 0; i < half; i += FEWEST_LANES)                           \
                for (size_t j = i; j < i + FEWEST_LANES; j++)                         \
                    lanes[j] = join(lanes[j], lanes[half + j]);                       \
        const double even = join(join(lanes[0], lanes[4]), join(lanes[2], lanes[6])); \
        return join(even, join(join(lanes[1], lanes[5]), join(lanes[3], lanes[7])));  \
    }
#define ADD(a, b) ((a) + (b))
FOLD(fold_sum, ADD)
FOLD(fold_max, fst_tree_max)
FOLD(fold_min, fst_tree_min)
#undef ADD
#undef FOLD

static double fold_lanes(double *lanes, size_t count, fst_norm_kind norm)
{
    const size_t used = lanes_of(count);
    return norm == FST_NORM_MAX   ? fold_max(lanes, used)
           : norm == FST_NORM_MIN ? fold_min(lanes, used)
                                  : fold_sum(lanes, used);
}
