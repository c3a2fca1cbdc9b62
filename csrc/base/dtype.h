/* dtype.h - the element types of tensors. */
#ifndef FST_BASE_DTYPE_H
#define FST_BASE_DTYPE_H

#include <stddef.h>

/* X(NAME, C storage type, suffix) */
#define FST_DTYPES(X)         \
    X(F32, float, f32)        \
    X(F64, double, f64)       \
    X(BF16, uint16_t, bf16)   \
    X(F16, uint16_t, f16)

typedef enum {
#define X(NAME, type, suffix) FST_##NAME,
    FST_DTYPES(X)
#undef X
        FST_DTYPE_COUNT
} fst_dtype;

/* Bytes of one element. */
static inline size_t fst_dtype_size(fst_dtype dtype)
{
    return dtype == FST_F64 ? 8u : dtype == FST_F32 ? 4u : 2u;
}

#endif
