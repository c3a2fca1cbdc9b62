/* dtype.h - the element types of tensors. */
#pragma once

#include <stddef.h>

typedef enum { FST_F32, FST_F64, FST_BF16, FST_F16, FST_DTYPE_COUNT } fst_dtype;

/* Integers: what else a counter may be, and with FST_I16 a remainder (work.h). */
enum { FST_U8 = FST_DTYPE_COUNT, FST_I8, FST_I16, FST_I32, FST_I64 };

/* Bytes of one element. */
static inline size_t fst_dtype_size(fst_dtype dtype)
{
    return dtype == FST_F64 ? 8u : dtype == FST_F32 ? 4u : 2u;
}
