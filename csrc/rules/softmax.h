/* softmax.h - the exponential of a softmax, the same operations on every backend. */
#pragma once

#include "base/portable.h"

/* e^x for x <= 0 within 1 ulp, by a fixed sequence of operations; NaN stays. What is below 2^-126.5
 * is 0. */
FST_FN float fst_softmax_exp(float x)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: the sum's last bits are the whole number */
    const float bounded = x < -88.0f ? -88.0f : x;
    const float shifted = bounded * 1.44269504f + rounder, twos = shifted - rounder;
    /* ln 2 in two parts, of which the first times `twos` is exact */
    const float rest = bounded - twos * 0.693359375f - twos * -2.12194440e-4f;
    float sum = 0.00138144649f;
    sum = sum * rest + 0.00836878084f;
    sum = sum * rest + 0.0416683927f;
    sum = sum * rest + 0.166665196f;
    sum = sum * rest + 0.49999994f;
    sum = sum * rest * rest + rest + 1.0f;
    /* the power of two: 127 plus the whole number as an exponent; -127 gives 0 */
    return sum * fst_f32_of_bits((fst_bits_of_f32(shifted) + 127u) << 23);
}
