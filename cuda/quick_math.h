/* quick_math.h - roots and quotients without the branches that sqrtf and / take for each operand.
 *
 * There are two quick ways, for two kinds of loops, and both leave to sqrtf and / what they are not
 * sure of.
 *
 * Loops for all types have FST_SQRT and FST_DIVIDE, whose result is NaN where it may not have the
 * bits of sqrtf or /, as it is for a NaN. Every rule's root and quotient reach the new parameter by
 * sums and products alone, so that this is NaN then.
 *
 * Loops that know their types also have FST_DESCEND, which most rules end with. It does not look at
 * its operands. Its result is NaN, or below FST_QUICK_MIN, or has the bits: a quotient that is too
 * small to be exact is also too small to change a parameter that is not. */
#pragma once

#include "rules/rules.h"
#include "words.h"

#define FST_QUICK_MIN 0x1p-32f /* a parameter below this is an exception */

FST_FN float fst_refined_root(float x, float inverse)
{
    const float root = x * inverse;
    return fmaf(fmaf(-root, root, x), inverse * 0.5f, root);
}

/* The root of x, from 1 / sqrt(x) as the hardware gives it or, for 0, any number. The operations
 * are those of nvcc's own sqrtf from 2^-101 on, where the residual x - root^2 is exact. */
FST_FN float fst_root_from(float x, float inverse)
{
    const float refined = fst_refined_root(x, inverse);
    return (x >= 0x1p-101f) | (x == 0.0f) ? refined : NAN;
}

/* x / y for y > 0, from 1 / y to 23 bits, which is 0 where it would be subnormal. The residual is
 * exact unless its last place lies below 2^-149; its sign is such that -0 / y is -0. */
FST_FN float fst_refined_quotient(float x, float y, float inverse)
{
    const float nearer = fmaf(inverse, fmaf(-y, inverse, 1.0f), inverse);
    const float quotient = x * nearer;
    return fmaf(-nearer, fmaf(y, quotient, -x), quotient);
}

FST_FN float fst_quotient_from(float x, float y, float inverse)
{
    const float refined = fst_refined_quotient(x, y, inverse);
    const int exact = (fabsf(x) >= 0x1p-100f) & (fabsf(refined) >= 0x1p-100f);
    return exact | (x == 0.0f) ? refined : NAN;
}

/* 1 / sqrt(x); NaN below 0. */
FST_DEVICE float fst_inverse_root(float x)
{
#if defined(__CUDACC__)
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
#else
    return (float)(1.0 / sqrt((double)x));
#endif
}

/* The same, but 2^64 for 0; it stays -inf for -0, whose root is left to sqrtf. */
FST_DEVICE float fst_inverse_root_or_most(float x)
{
    float inverse = fst_inverse_root(x);
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, 0f5F800000;" : "+f"(inverse));
    return inverse;
#else
    return inverse > 0x1p64f ? 0x1p64f : inverse;
#endif
}

FST_DEVICE float fst_inverse(float y)
{
    float inverse;
#if defined(__CUDACC__)
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
#else
    const float nearest = 1.0f / y; /* the hardware's may be off in its last place */
    const uint32_t off = isfinite(nearest) ? fst_bits_of_f32(y) % 3 - 1 : 0;
    inverse = fabsf(y) > 0x1p126f ? 0.0f : fst_f32_of_bits(fst_bits_of_f32(nearest) + off);
#endif
    return inverse;
}

FST_DEVICE float fst_quick_sqrt(float x)
{
    return fst_root_from(x, fst_inverse_root_or_most(x));
}

FST_DEVICE float fst_quick_divide(float x, float y)
{
    return fst_quotient_from(x, y, fst_inverse(y));
}

/* 2^24 times the root of v, exactly; NaN from 2^80 on. The residual is exact for every v. 2^-126
 * more under the root only changes that of 0, to 2^-63. */
FST_DEVICE float fst_large_root(float v)
{
    const float square = fmaf(v, 0x1p48f, 0x1p-126f);
    return fst_refined_root(square, fst_inverse_root(square));
}

/* p - size * x / (sqrt(v) + eps), exactly, if that is NaN, at least FST_QUICK_MIN, or 0 with x = 0.
 *
 * The large root of 0, times 2^-24, is lost beside eps. The quotient q has its bits
 * unless |x| or |q| is below 2^-100. Then |size * q| is at most 2^-60, whatever its last bits are,
 * and so less than a quarter of the last place of FST_QUICK_MIN. */
FST_DEVICE float fst_quick_descent(float p, float size, float x, float v, float eps)
{
    const float least_eps = fmaf(fabsf(size), 0x1p-40f, 0x1p-60f);
    const float offset = (eps >= least_eps) & (eps <= 1.0f) ? eps : NAN;
    const float y = fmaf(fst_large_root(v), 0x1p-24f, offset);
    return p - size * fst_refined_quotient(x, y, fst_inverse(y));
}

/* Whether all of a thread's parameters are at least FST_QUICK_MIN, and `large` is set. */
FST_DEVICE int fst_all_large(const float *p, int large)
{
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        large &= fabsf(p[q]) >= FST_QUICK_MIN;
    return large;
}

/* Whether those that are not are 0, with no gradient and no first moment, of which every x is a
 * sum. */
FST_DEVICE int fst_others_zero(const float *p, const float *g, const float *moment)
{
    int zero = 1;
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        zero &= (fabsf(p[q]) >= FST_QUICK_MIN) |
                ((p[q] == 0.0f) & (g[q] == 0.0f) & (moment[q] == 0.0f));
    return zero;
}

/* Adds a multiple of a thread's parameters to its gradients. */
FST_DEVICE void fst_decay(float *g, const float *p, float l2)
{
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        g[q] = g[q] + l2 * p[q];
}

/* The rules with these in place of sqrtf and /, for either kind of loops. Their arguments are those
 * of float. */
#define REAL float
#define FST_T(name) name##_quick
#define FST_SQRT fst_quick_sqrt
#define FST_SIZE fabsf
#define FST_DIVIDE fst_quick_divide
#include "rules/each.h"
#undef REAL
#undef FST_T
#undef FST_DESCEND
#define REAL float
#define FST_T(name) name##_known
#define FST_DESCEND fst_quick_descent
#include "rules/each.h"
#undef REAL
#undef FST_T
#undef FST_SQRT
#undef FST_SIZE
#undef FST_DIVIDE
#undef FST_DESCEND
