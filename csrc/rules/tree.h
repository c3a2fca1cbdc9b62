/* tree.h - the fixed order of every reduction, for all backends.
 *
 * Lane j of FST_LANES accumulates elements j, j + FST_LANES, ... of a chunk in turn, in double.
 * The lanes are then folded in halves: lane j takes lane j + 128, then j + 64, and so on. The
 * chunks' results are reduced by the same tree, in the order of the chunk list. Lanes without an
 * element hold the neutral element, so leaving out folds over them changes no bit. A warp of a
 * GPU holds 8 lanes per thread, which suits 16-byte loads of any dtype. */
#pragma once

#include "base/portable.h"

enum { FST_LANES = 256 };

/* What a norm sums or compares, for each element x. */
typedef enum {
    FST_NORM_SQUARES, /* x * x */
    FST_NORM_ABS,     /* |x| */
    FST_NORM_MAX,     /* max |x|, NaN wins */
    FST_NORM_MIN,     /* min |x|, NaN wins */
    FST_NORM_NONZERO, /* x != 0 */
    FST_NORM_POWER,   /* |x|^p */
} fst_norm_kind;

/* Max and min that a NaN on either side wins. */
FST_FN double fst_tree_max(double a, double b)
{
    return a >= b || a != a ? a : b;
}

FST_FN double fst_tree_min(double a, double b)
{
    return a <= b || a != a ? a : b;
}

/* The neutral element, which starts a lane. */
FST_FN double fst_tree_neutral(fst_norm_kind norm)
{
    return norm == FST_NORM_MIN ? (double)INFINITY : 0.0;
}

/* Joins two results of a reduction; `a` comes first. */
FST_FN double fst_tree_join(double a, double b, fst_norm_kind norm)
{
    return norm == FST_NORM_MAX   ? fst_tree_max(a, b)
           : norm == FST_NORM_MIN ? fst_tree_min(a, b)
                                  : a + b;
}
