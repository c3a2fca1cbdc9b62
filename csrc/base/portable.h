/* portable.h - the macros that let one source serve gcc and clang (C11) and nvcc. */
#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define FST_FN static __host__ __device__ __forceinline__
#else
#define FST_FN static inline __attribute__((always_inline, unused))
#endif

FST_FN uint32_t fst_bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

FST_FN float fst_f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* bfloat16 is the upper half of a float: exact to widen. */
FST_FN float fst_bf16_to_f32(uint16_t half)
{
    return fst_f32_of_bits((uint32_t)half << 16);
}

/* Round to nearest even; every NaN becomes the quiet NaN 0x7FC0, as in torch. */
FST_FN uint16_t fst_f32_to_bf16(float value)
{
    const uint32_t bits = fst_bits_of_f32(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

/* The same in the upper half of a word, for loops over words alone. */
FST_FN uint32_t fst_f32_to_bf16_word(float value)
{
    const uint32_t bits = fst_bits_of_f32(value);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return value != value ? 0x7FC00000u : rounded;
}

/* A float in two halves, without loss: its bf16 number, a tie away from zero, and the remainder,
 * which is the lower half of its bits as a signed number, to be added to those of the bf16 number.
 * So the largest floats have the bf16 infinity and a remainder. Every NaN becomes the same. */
FST_FN uint16_t fst_f32_to_upper(float value)
{
    const uint32_t bits = fst_bits_of_f32(value);
    return (uint16_t)(value != value ? 0x7FC0u : (bits + 0x8000u) >> 16);
}

FST_FN uint16_t fst_f32_to_remainder(float value)
{
    return (uint16_t)(value != value ? 0u : fst_bits_of_f32(value));
}

/* The same for loops over words alone: a word whose lower half is the remainder, and whose upper
 * half, once 0x8000 has been added, is the bf16 number. */
FST_FN uint32_t fst_f32_to_split_word(float value)
{
    return value != value ? 0x7FC00000u : fst_bits_of_f32(value);
}

/* The float of both halves, each the upper half of a word that is zero below. Where somebody has
 * written the bf16 number since, it is one that rounds to that: zeros and infinities, beside some
 * remainders, are taken without. */
FST_FN float fst_joined_words(uint32_t upper, uint32_t remainder)
{
    const float alone = fst_f32_of_bits(upper);
    const float both = fst_f32_of_bits(upper + (uint32_t)((int32_t)remainder >> 16));
    return both != both ? alone : both;
}

FST_FN float fst_joined_f32(uint16_t upper, uint16_t remainder)
{
    return fst_joined_words((uint32_t)upper << 16, (uint32_t)remainder << 16);
}

/* IEEE binary16 to float. Subnormals go through an integer so that no float subnormal is
 * formed on the way: the result does not depend on the flush-to-zero mode of the thread. */
FST_FN float fst_f16_to_f32(uint16_t half)
{
    const uint32_t sign = ((uint32_t)half & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)half & 0x7FFFu;
    const uint32_t normal = (magnitude << 13) + 0x38000000u;
    const uint32_t special = (magnitude << 13) + 0x70000000u; /* exponent 31 -> 255 */
    const uint32_t subnormal = fst_bits_of_f32((float)(int32_t)magnitude * 0x1p-24f);
    const uint32_t bits =
        magnitude < 0x400u ? subnormal : (magnitude >= 0x7C00u ? special : normal);
    return fst_f32_of_bits(sign | bits);
}

/* Round to nearest even; too large becomes infinity, every NaN a quiet NaN. Results below the
 * normal range are rounded by adding 0.5, whose last place is the subnormals' spacing. */
FST_FN uint16_t fst_f32_to_f16(float value)
{
    const uint32_t bits = fst_bits_of_f32(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = fst_bits_of_f32(fst_f32_of_bits(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t huge = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    return (uint16_t)(sign | (magnitude >= 0x477FF000u ? huge : finite));
}

/* Rounds to fp32. gcc 12 leaves that rounding out where it makes vectors of neighbouring doubles.
 */
FST_FN double fst_rounded_to_f32(double value)
{
    float narrow = (float)value;
#if defined(__GNUC__) && !defined(__CUDACC__)
    __asm__("" : "+m"(narrow));
#endif
    return (double)narrow;
}

/* base^exponent for a whole exponent >= 0 by squaring: the C library's pow() differs in the last
 * bit between libraries and devices, a fixed sequence of products does not. */
FST_FN double fst_pow_whole(double base, double exponent)
{
    uint64_t left = (uint64_t)exponent;
    double result = 1.0;
    for (; left; left >>= 1) {
        if (left & 1u)
            result *= base;
        base *= base;
    }
    return result;
}

/* The natural logarithm of a positive number, by a fixed sequence of operations, as the power. */
FST_FN double fst_log(double x)
{
    const double subnormal = x < 0x1p-1022 ? 54.0 : 0.0;
    uint64_t bits;
    x = subnormal != 0.0 ? x * 0x1p54 : x;
    memcpy(&bits, &x, sizeof bits);
    double exponent = (double)(int64_t)(bits >> 52) - 1023.0 - subnormal;
    bits = (bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    memcpy(&x, &bits, sizeof x);
    if (x > 1.4142135623730951) {
        x *= 0.5;
        exponent += 1.0;
    }
    const double ratio = (x - 1.0) / (x + 1.0), square = ratio * ratio;
    double sum = 0.0; /* of ratio^k / k for odd k, over the ratio, which is 0.172 at most */
    for (int k = 25; k > 0; k -= 2)
        sum = sum * square + 1.0 / k;
    return exponent * 0.6931471805599453 + 2.0 * ratio * sum;
}

/* 2^exponent in the range of normal numbers. */
FST_FN double fst_power_of_two(int64_t exponent)
{
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* e^x, likewise. */
FST_FN double fst_exp(double x)
{
    if (!(x > -746.0 && x < 710.0))
        return x > 0.0 ? (double)INFINITY : x < 0.0 ? 0.0 : x;
    const int64_t twos = (int64_t)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    /* ln 2 in two parts, of which the first times `twos` is exact */
    const double rest =
        x - (double)twos * 6.93147180369123816490e-01 - (double)twos * 1.90821492927058770002e-10;
    double sum = 1.0;
    for (int k = 14; k > 0; k--)
        sum = 1.0 + rest * sum / k;
    return sum * fst_power_of_two(twos / 2) * fst_power_of_two(twos - twos / 2);
}

/* base^exponent for any exponent; NaN for a negative base, unless the exponent is whole. */
FST_FN double fst_pow(double base, double exponent)
{
    const double size = exponent < 0.0 ? -exponent : exponent;
    if (size < 0x1p53 && size == (double)(int64_t)size) {
        const double power = fst_pow_whole(base, size);
        return exponent < 0.0 ? 1.0 / power : power;
    }
    if (base > 0.0 && base < (double)INFINITY)
        return fst_exp(exponent * fst_log(base));
    if (base < 0.0 || base != base || exponent != exponent)
        return (double)NAN;
    return (base > 0.0) == (exponent > 0.0) ? (double)INFINITY : 0.0;
}
