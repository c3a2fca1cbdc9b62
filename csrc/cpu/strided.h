/* strided.h - moves a run of elements between a contiguous block and an operand with strides of its
 * own. */
#ifndef FST_CPU_STRIDED_H
#define FST_CPU_STRIDED_H

#include <string.h>

#include "base/work.h"

/* A position in a layout: coordinates and the element offset they stand for. */
typedef struct {
    int64_t index[FST_MAX_DIMS];
    int64_t offset;
} fst_cursor;

static inline void fst_cursor_seek(fst_cursor *at, const fst_layout *layout, int64_t element)
{
    at->offset = 0;
    for (int d = layout->ndim; d-- > 0;) {
        at->index[d] = element % layout->shape[d];
        element /= layout->shape[d];
        at->offset += at->index[d] * layout->stride[d];
    }
}

static inline void fst_cursor_next(fst_cursor *at, const fst_layout *layout)
{
    for (int d = layout->ndim; d-- > 0;) {
        at->offset += layout->stride[d];
        if (++at->index[d] < layout->shape[d])
            return;
        at->offset -= layout->stride[d] * layout->shape[d];
        at->index[d] = 0;
    }
}

/* Copies `count` elements from `begin` on: out of the operand into `block`, or the other way round.
 */
static inline void fst_strided_copy(const fst_operand *op, void *block, int64_t begin, size_t count,
                                    int into_operand)
{
    const size_t size = fst_dtype_size(op->dtype);
    char *packed = block;
    fst_cursor at;
    fst_cursor_seek(&at, op->layout, begin);
    for (size_t i = 0; i < count; i++, packed += size) {
        char *element = (char *)op->data + at.offset * (int64_t)size;
        if (into_operand)
            memcpy(element, packed, size);
        else
            memcpy(packed, element, size);
        fst_cursor_next(&at, op->layout);
    }
}

#endif
