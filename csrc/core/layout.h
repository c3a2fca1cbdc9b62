/* layout.h - from shape and strides to an order of iteration that several tensors share. */
#ifndef FST_CORE_LAYOUT_H
#define FST_CORE_LAYOUT_H

#include "base/work.h"

/* Elements of a tensor. */
int64_t fst_layout_count(int ndim, const int64_t *shape);

/* Puts into `order` the dimensions of more than one element, from the largest stride of this tensor
 * to the smallest: its order in memory. Returns how many there are. */
int fst_layout_order(int ndim, const int64_t *shape, const int64_t *strides, int *order);

/* Describes a tensor in that order, with neighbouring dimensions merged where they can be. Returns
 * 1 if its elements then lie one after another, so that no layout is needed. */
int fst_layout_describe(int order_count, const int *order, const int64_t *shape,
                        const int64_t *strides, fst_layout *layout);

/* Nonzero if two indices of the layout may name one element (a stride of 0, or interleaved
 * strides). */
int fst_layout_overlaps(const fst_layout *layout);

#endif
