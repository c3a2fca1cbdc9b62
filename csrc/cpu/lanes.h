/* lanes.h - the lanes of a reduction: their start and their fold, as rules/tree.h lays down. */
#ifndef FST_CPU_LANES_H
#define FST_CPU_LANES_H

#include "cpu/kernels.h"
#include "rules/tree.h"

static void fill_lanes(double *lanes, size_t count, fst_norm norm)
{
    const double neutral = norm == FST_NORM_MIN ? (double)INFINITY : 0.0;
    const size_t used = count < FST_LANES ? count : FST_LANES;
    for (size_t i = 0; i < used; i++)
        lanes[i] = neutral;
}

/* Folds the lanes that hold something: with fewer elements than lanes the upper ones are neutral. */
static double fold_lanes(double *lanes, size_t count, fst_norm norm)
{
    size_t used = count < FST_LANES ? count : FST_LANES;
    if (used == 0)
        return norm == FST_NORM_MIN ? (double)INFINITY : 0.0;
    for (size_t half = FST_LANES / 2; half > 0; half /= 2) {
        for (size_t i = 0; i + half < used; i++) {
            if (norm == FST_NORM_MAX)
                lanes[i] = fst_tree_max(lanes[i], lanes[i + half]);
            else if (norm == FST_NORM_MIN)
                lanes[i] = fst_tree_min(lanes[i], lanes[i + half]);
            else
                lanes[i] += lanes[i + half];
        }
        if (used > half)
            used = half;
    }
    return lanes[0];
}

#endif
