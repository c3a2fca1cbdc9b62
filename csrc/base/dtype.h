/* dtype.h - the element types of tensors. */
#pragma once

#include <stddef.h>

typedef enum {
    FST_F32,
    FST_F64,
    FST_BF16,
    FST_F16,
    FST_DTYPE_COUNT, /* those above */
    /* Integers: what else a counter may be; FST_U8 and FST_I8 are also states in codes
     * (rules/codes.h), and FST_I16 a remainder (work.h). */
    FST_U8 = FST_DTYPE_COUNT,
    FST_I8,
    FST_I16,
    FST_I32,
    FST_I64,
} fst_dtype;

/* Whether a state of this type is one in codes (rules/codes.h). */
static inline int fst_is_code(fst_dtype dtype)
{
    return dtype == FST_U8 || dtype == FST_I8;
}

/* Bytes of one element of a type of floats, or of FST_I16. */
static inline size_t fst_dtype_size(fst_dtype dtype)
{
    return dtype == FST_F64 ? 8u : dtype == FST_F32 ? 4u : 2u;
}

/* The same of a state in codes too. */
static inline size_t fst_operand_size(fst_dtype dtype)
{
    return fst_is_code(dtype) ? 1u : fst_dtype_size(dtype);
}
