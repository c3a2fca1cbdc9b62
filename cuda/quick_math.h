/* quick_math.h - roots and quotients without the branches that sqrtf and / take for each operand.
 *
 * Where the short way may not give the bits of sqrtf or /, the result is NaN, as it is for a NaN.
 * Every rule's root and quotient reach the new parameter by sums and products alone, so that this
 * is NaN then. A loop looks for NaNs among several parameters at once, and computes these again. */
#ifndef FST_CUDA_QUICK_MATH_H
#define FST_CUDA_QUICK_MATH_H

#include "rules/numbers.h"
#include "words.h"

/* The root of x, from 1 / sqrt(x) as the hardware gives it or, for 0, any number. The operations
 * are those of nvcc's own sqrtf from 2^-101 on, where the residual x - root^2 is exact. */
FST_FN float fst_root_from(float x, float inverse)
{
    const float root = x * inverse;
    const float refined = fmaf(fmaf(-root, root, x), inverse * 0.5f, root);
    return (x >= 0x1p-101f) | (x == 0.0f) ? refined : NAN;
}

/* x / y for y > 0, from 1 / y to 23 bits, which is 0 where it would be subnormal. The residual is
 * exact unless its last place lies below 2^-149; its sign is such that -0 / y is -0. */
FST_FN float fst_quotient_from(float x, float y, float inverse)
{
    const float nearer = fmaf(inverse, fmaf(-y, inverse, 1.0f), inverse);
    const float quotient = x * nearer;
    const float refined = fmaf(-nearer, fmaf(y, quotient, -x), quotient);
    const int exact = (fabsf(x) >= 0x1p-100f) & (fabsf(refined) >= 0x1p-100f);
    return exact | (x == 0.0f) ? refined : NAN;
}

/* 1 / sqrt(x), but 2^64 for 0; NaN below 0. */
FST_DEVICE float fst_inverse_root(float x)
{
#if defined(__CUDACC__)
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, 0f5F800000;" : "+f"(inverse));
    return inverse;
#else
    return inverse > 0x1p64f ? 0x1p64f : inverse;
#endif
#else
    return x == 0.0f ? 0x1p64f : (float)(1.0 / sqrt((double)x));
#endif
}

FST_DEVICE float fst_inverse(float y)
{
    float inverse;
#if defined(__CUDACC__)
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
#else
    inverse = fabsf(y) > 0x1p126f ? 0.0f : 1.0f / y;
#endif
    return inverse;
}

FST_DEVICE float fst_quick_sqrt(float x)
{
    return fst_root_from(x, fst_inverse_root(x));
}

FST_DEVICE float fst_quick_divide(float x, float y)
{
    return fst_quotient_from(x, y, fst_inverse(y));
}

/* The rules with these in place of sqrtf and /. Their arguments are those of float. */
#define REAL float
#define FST_T(name) name##_quick
#define FST_SQRT fst_quick_sqrt
#define FST_DIVIDE fst_quick_divide
#include "rules/each.h"
#undef REAL
#undef FST_T
#undef FST_SQRT
#undef FST_DIVIDE

#endif
