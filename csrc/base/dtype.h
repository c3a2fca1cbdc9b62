/* dtype.h - the element types of tensors. */
#pragma once

#include <stddef.h>

typedef enum { FST_F32, FST_F64, FST_BF16, FST_F16, FST_DTYPE_COUNT } fst_dtype;

/* Bytes of one element. */
static inline size_t fst_dtype_size(fst_dtype dtype)
{
    return dtype == FST_F64 ? 8u : dtype == FST_F32 ? 4u : 2u;
}
