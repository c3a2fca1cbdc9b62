/* strided.h - moves elements between a contiguous strip and an operand with a layout: strides,
 * or flipped signs. */
#pragma once

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

/* Flips the signs of the numbers in a strip, in words of 8 bytes, so the strip must have room
 * for a whole last word. The sign is the highest bit of every dtype. */
static inline void fst_flip_signs(char *strip, size_t count, size_t size)
{
    const uint64_t signs = size == 8   ? UINT64_C(0x8000000000000000)
                           : size == 4 ? UINT64_C(0x8000000080000000)
                                       : UINT64_C(0x8000800080008000);
    for (size_t at = 0; at < count * size; at += sizeof signs) {
        uint64_t bits;
        memcpy(&bits, strip + at, sizeof bits);
        bits ^= signs;
        memcpy(strip + at, &bits, sizeof bits);
    }
}

/* Copies the bits of `count` elements from `begin` on: out of the operand into `strip`, or the
 * other way round. */
static inline void fst_strided_move(const fst_operand *op, char *packed, int64_t begin,
                                    size_t count, int into_operand)
{
    const size_t size = fst_dtype_size(op->dtype);
    fst_cursor at;
    if (op->layout->ndim == 1 && op->layout->stride[0] == 1) {
        char *from = (char *)op->data + begin * (int64_t)size;
        memcpy(into_operand ? from : packed, into_operand ? packed : from, count * size);
        return;
    }
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

/* Copies `count` elements from `begin` on: out of the operand into `strip`, or the other way round,
 * after which `strip` is of no use. */
static inline void fst_strided_copy(const fst_operand *op, char *strip, int64_t begin, size_t count,
                                    int into_operand)
{
    const size_t size = fst_dtype_size(op->dtype);
    if (op->layout->negated && into_operand)
        fst_flip_signs(strip, count, size);
    fst_strided_move(op, strip, begin, count, into_operand);
    if (op->layout->negated && !into_operand)
        fst_flip_signs(strip, count, size);
}
