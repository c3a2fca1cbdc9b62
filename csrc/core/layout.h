/* layout.h - derives an order of iteration, common to several tensors, from shape and strides. */
#pragma once

#include "base/work.h"

/* The number of elements of a tensor. */
int64_t fst_layout_count(int ndim, const int64_t *shape);

/* Lists the dimensions of more than one element by falling stride, which is the tensor's order
 * in memory. Returns how many there are. */
int fst_layout_order(int ndim, const int64_t *shape, const int64_t *strides, int *order);

/* Describes a tensor in that order, with neighbouring dimensions merged where possible. Returns
 * 1 if it is contiguous in that order and needs no layout. */
int fst_layout_describe(int order_count, const int *order, const int64_t *shape,
                        const int64_t *strides, fst_layout *layout);

/* Whether two indices of the layout may name the same element (a stride of 0, or interleaved
 * strides). */
int fst_layout_overlaps(const fst_layout *layout);
