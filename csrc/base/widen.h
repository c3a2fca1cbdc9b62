/* widen.h - conversions of rows: token ids to wider integers, and numbers to the floats that a
 * model takes. */
#pragma once

#include "base/dtype.h"

/* Both ends may lie at any address. */
typedef void (*fst_widen)(char *restrict to, const char *restrict from, size_t items);

/* Numbers that become floats; bool is a byte. */
typedef enum {
    FST_OF_U8,
    FST_OF_I8,
    FST_OF_I16,
    FST_OF_I32,
    FST_OF_F16,
    FST_OF_BF16,
    FST_OF_F32,
    FST_OF_F64,
    FST_NUMBER_COUNT,
} fst_number;

static inline size_t fst_number_size(fst_number number)
{
    static const size_t sizes[FST_NUMBER_COUNT] = {1, 1, 2, 4, 2, 2, 4, 8};
    return sizes[number];
}

/* A conversion to floats: each number is rounded to fp32, becomes (number * scale - mean) / std
 * with each operation rounded, and is rounded to `to`. */
typedef struct {
    fst_number from;
    fst_dtype to; /* not fp64 */
    float scale;
    float *mean, *std; /* NULL: the numbers stay as they are */
    size_t run;        /* items of a row that share a mean and a std */
} fst_float_form;

/* Items [first, first + count) of a row. Both ends may lie at any address but for fp32 in `to`. */
typedef void (*fst_to_floats)(const fst_float_form *form, char *restrict to,
                              const char *restrict from, size_t first, size_t count);

/* Conversions of a field. Unsigned tokens are widened, as torch has next to no operators for
 * them. In place of the tokens a batch may hold each one's position in its document, or the
 * number of its document in the row. */
typedef enum {
    FST_AS_IS, /* items are bytes */
    FST_U16_TO_I32,
    FST_U16_TO_I64,
    FST_U32_TO_I64,
    FST_U16_TO_I32_POSITIONS,
    FST_U16_TO_I64_POSITIONS,
    FST_U32_TO_I64_POSITIONS,
    FST_U16_TO_I32_DOCUMENTS,
    FST_U16_TO_I64_DOCUMENTS,
    FST_U32_TO_I64_DOCUMENTS,
    FST_U8_TO_I64,
    FST_I8_TO_I64,
    FST_I16_TO_I64,
    FST_I32_TO_I64,
    FST_TO_FLOATS,   /* as `floats` says */
    FST_ROW_NUMBERS, /* not the row, but its number in its leaf, in 64 bits */
    FST_CONVERSION_COUNT,
} fst_conversion;

typedef struct {
    fst_widen integers[FST_CONVERSION_COUNT]; /* NULL: of other conversions */
    fst_to_floats to_floats;
} fst_widen_loops;
