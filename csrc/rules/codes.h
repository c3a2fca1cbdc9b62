/* codes.h - states in 8 bits: a code per element, and a scale in bf16 per block of them.
 *
 * A block ends after FST_BLOCK elements, at each multiple of FST_CHUNK elements of the tensor, and
 * with `row` at the end of each row of so many. Each chunk has room for as many scales as any
 * chunk of such rows has blocks. So a chunk finds its scales whoever works on the others.
 *
 * A scale is the largest magnitude of its block, rounded up but for FST_SLACK, by which a number
 * may come back larger. A block of zeros, or of numbers under 2^-126, has the scale 0. One with a
 * NaN, or with a number above FST_MOST, has the scale NaN and codes of 0: all of it becomes NaN.
 *
 * Signed codes are a soft sign: q = 254 x / (s + |x|), to the nearest even, and x = s q / (254 -
 * |q|). Codes of numbers that are not negative are those of the root: q = 255 sqrt(x) / s, at least
 * 1 where x > 0, and x = (s q / 255)^2, where s is the root of the largest, rounded up.
 *
 * Quotients are products with an inverse, as a step is bound by its divisions otherwise. */
#pragma once

#include "base/portable.h"
#include "base/work.h"

enum { FST_BLOCK = 64, FST_SCALE_NAN = 0x7FC0 };
#define FST_MOST 0x7E800000u /* the bits of 2^126 */
#define FST_SLACK 16u        /* units in the last place of a float */

/* What a length of rows does to the blocks; 0: nothing, as those under a block and those that are
 * whole blocks. */
FST_FN uint32_t fst_code_row(int64_t length)
{
    const int counts = length > FST_BLOCK && length % FST_BLOCK && length <= (int64_t)UINT32_MAX;
    return counts ? (uint32_t)length : 0;
}

/* The scales that a chunk has room for. */
FST_FN int64_t fst_scale_room(uint32_t row)
{
    return FST_CHUNK / FST_BLOCK + (row ? FST_CHUNK / (int64_t)row + 2 : 0);
}

FST_FN int64_t fst_scale_count(int64_t count, uint32_t row)
{
    return row ? (count + FST_CHUNK - 1) / FST_CHUNK * fst_scale_room(row)
               : (count + FST_BLOCK - 1) / FST_BLOCK;
}

/* Elements whose blocks have FST_BLOCK elements but for the last: to the end of a chunk or a row.
 */
typedef struct {
    int64_t begin, end;
    int64_t scale; /* of the first block */
} fst_segment;

/* The segment of an element. The tensor may end before it does. */
FST_FN fst_segment fst_segment_at(int64_t element, uint32_t row)
{
    const int64_t chunk = element / FST_CHUNK, begin = chunk * FST_CHUNK;
    fst_segment found = {begin, begin + FST_CHUNK, chunk * fst_scale_room(row)};
    if (!row)
        return found;
    const int64_t of_row = element / row * row;
    if (of_row > begin) {
        const int64_t first =
            (begin + row - 1) / row * row - begin; /* of a row that began before */
        found.scale += (first + FST_BLOCK - 1) / FST_BLOCK +
                       (of_row - begin - first) / row * ((row + FST_BLOCK - 1) / FST_BLOCK);
        found.begin = of_row;
    }
    found.end = of_row + row < found.end ? of_row + row : found.end;
    return found;
}

/* The bits of a number that are compared to find the largest: NaN is the largest of all, and so is
 * a negative number where there should be none. */
FST_FN uint32_t fst_signed_size(float x)
{
    return fst_bits_of_f32(x) & 0x7FFFFFFFu;
}

FST_FN uint32_t fst_root_size(float x)
{
    return fst_bits_of_f32(x);
}

FST_FN uint16_t fst_rounded_up(uint32_t size)
{
    const uint32_t up = (size + 0xFFFFu - FST_SLACK) >> 16;
    return (uint16_t)(up < 0x80u ? 0u : up);
}

FST_FN uint16_t fst_signed_scale(uint32_t largest)
{
    return largest > FST_MOST ? FST_SCALE_NAN : fst_rounded_up(largest);
}

FST_FN uint16_t fst_root_scale(uint32_t largest)
{
    const float root = sqrtf(fst_f32_of_bits(largest));
    return largest > FST_MOST ? FST_SCALE_NAN : fst_rounded_up(fst_bits_of_f32(root));
}

/* What the formulas below take in place of the scale: from codes, and to codes. */
FST_FN float fst_signed_factor(float scale)
{
    return scale * (1.0f / 127.0f);
}

FST_FN float fst_root_factor(float scale)
{
    return scale * (1.0f / 255.0f);
}

FST_FN float fst_signed_divisor(float scale)
{
    return scale > 0.0f ? 1.0f / scale : 0.0f;
}

FST_FN float fst_root_divisor(float scale)
{
    return scale > 0.0f ? 255.0f / scale : 0.0f;
}

/* 1 / x for an x of 1 to 2, to one part in 9801: less than a hundredth of what separates two codes.
 * The polynomial is the best of its degree: x times it differs from 1 by T(3 - 2 x) / T(3),
 * Chebyshev's third, of which T(3) is 99. Newton's step squares that. */
FST_FN float fst_inverse(float x)
{
    const float line = (float)(32.0 / 99.0) * x - (float)(144.0 / 99.0);
    const float near = line * x + (float)(210.0 / 99.0);
    return near * (2.0f - x * near);
}

FST_FN float fst_of_signed(uint8_t code, float factor)
{
    const float q = (float)(int8_t)code;
    return factor * (q * fst_inverse(2.0f - fabsf(q) * (1.0f / 127.0f)));
}

FST_FN float fst_of_root(uint8_t code, float factor)
{
    const float root = (float)code * factor;
    return root * root;
}

/* The low bits of 1.5 * 2^23 + x are x rounded to the nearest even. */
FST_FN uint8_t fst_nearest(float x)
{
    return (uint8_t)fst_bits_of_f32(x + 12582912.0f);
}

FST_FN uint8_t fst_to_signed(float x, float divisor)
{
    const float part = x * divisor;
    return fst_nearest(part * fst_inverse(1.0f + fabsf(part)) * 254.0f);
}

FST_FN uint8_t fst_to_root(float x, float divisor)
{
    const float code = sqrtf(x) * divisor, least = x > 0.0f ? 1.0f : 0.0f;
    return fst_nearest(code > least ? code : least);
}
