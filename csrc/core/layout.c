#include "core/layout.h"

int64_t fst_layout_count(int ndim, const int64_t *shape)
{
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    return count;
}

/* Insertion sort: few dimensions, and stable, so that equal strides keep the order of the shape. */
int fst_layout_order(int ndim, const int64_t *shape, const int64_t *strides, int *order)
{
    int kept = 0;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] == 1)
            continue;
        int at = kept++;
        for (; at > 0 && strides[order[at - 1]] < strides[d]; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    return kept;
}

int fst_layout_describe(int order_count, const int *order, const int64_t *shape,
                        const int64_t *strides, fst_layout *layout)
{
    int n = 0;
    for (int k = 0; k < order_count; k++) {
        const int64_t size = shape[order[k]], stride = strides[order[k]];
        if (n > 0 && layout->stride[n - 1] == size * stride) {
            layout->shape[n - 1] *= size;
            layout->stride[n - 1] = stride;
        } else {
            layout->shape[n] = size;
            layout->stride[n++] = stride;
        }
    }
    layout->ndim = n;
    return n == 0 || (n == 1 && layout->stride[0] == 1);
}

int fst_layout_overlaps(const fst_layout *layout)
{
    int64_t reach = 0; /* offset of the last element of the dimensions that are further in */
    int order[FST_MAX_DIMS];
    const int n = fst_layout_order(layout->ndim, layout->shape, layout->stride, order);
    for (int k = n; k-- > 0;) {
        if (layout->stride[order[k]] <= reach)
            return 1;
        reach += (layout->shape[order[k]] - 1) * layout->stride[order[k]];
    }
    return 0;
}
