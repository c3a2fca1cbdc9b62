/* codes.h - states in 8 bits: a code per element, and a scale in bf16 per block of them.
 *
 * A block ends after FST_BLOCK elements, at each multiple of FST_CHUNK elements of the tensor, and
 * with `row` at the end of each row of so many. Each chunk has room for as many scales as any
 * chunk of such rows has blocks. So a chunk finds its scales whoever works on the others.
 *
 * A scale is the largest magnitude of its block, rounded up but for FST_SLACK, by which a number
 * may come back larger. A block of zeros, or of numbers under 2^-126, has the scale 0. One with a
 * NaN, or with a number above 2^126, has the scale NaN and codes of 0: all of it becomes NaN.
 *
 * Signed codes are a soft sign: q = 254 x / (s + |x|), to the nearest even, and x = s q / (254 -
 * |q|). Codes of numbers that are not negative are those of the root: q = 255 sqrt(x) / s, at least
 * 1 where x > 0, and x = (s q / 255)^2, where s is the root of the largest, rounded up. */
#pragma once

#include "base/portable.h"
#include "base/work.h"

enum { FST_BLOCK = 64, FST_SCALE_NAN = 0x7FC0 };
#define FST_MOST 0x7E800000u      /* the bits of 2^126 */
#define FST_MOST_ROOT 0x5F000000u /* of its root */
#define FST_SLACK 16u             /* units in the last place of a float */

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

/* The scales before those of an element at which a block begins, or before those of its chunk. */
FST_FN int64_t fst_scales_before(int64_t element, uint32_t row)
{
    return row ? element / FST_CHUNK * fst_scale_room(row) : element / FST_BLOCK;
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

/* What the formulas below take of a number, its term: itself, or its root. */
FST_FN float fst_signed_term(float x)
{
    return x;
}

FST_FN float fst_root_term(float x)
{
    return sqrtf(x);
}

/* The bits of a term that are compared to find the largest: NaN is the largest of all, and so is
 * a negative number where there should be none. */
FST_FN uint32_t fst_signed_size(float term)
{
    return fst_bits_of_f32(term) & 0x7FFFFFFFu;
}

FST_FN uint32_t fst_root_size(float term)
{
    return fst_bits_of_f32(term);
}

FST_FN uint16_t fst_rounded_up(uint32_t size)
{
    const uint32_t up = (size + 0xFFFFu - FST_SLACK) >> 16;
    return (uint16_t)(up < 0x80u ? 0u : up);
}

FST_FN uint16_t fst_signed_scale(uint32_t largest)
{
    return (uint16_t)(largest > FST_MOST ? FST_SCALE_NAN : fst_rounded_up(largest));
}

FST_FN uint16_t fst_root_scale(uint32_t largest)
{
    return (uint16_t)(largest > FST_MOST_ROOT ? FST_SCALE_NAN : fst_rounded_up(largest));
}

/* What the formulas take in place of the scale: from codes, and to codes, which are 0 where it is
 * 0. */
FST_FN float fst_signed_factor(float scale)
{
    return scale;
}

FST_FN float fst_root_factor(float scale)
{
    return scale * (1.0f / 255.0f);
}

FST_FN float fst_signed_divisor(float scale)
{
    return scale > 0.0f ? scale : (float)INFINITY;
}

FST_FN float fst_root_divisor(float scale)
{
    return scale > 0.0f ? 255.0f / scale : 0.0f;
}

FST_FN float fst_of_signed(int32_t code, float factor)
{
    const float q = (float)code;
    return factor * (q / (254.0f - fabsf(q)));
}

FST_FN float fst_of_root(int32_t code, float factor)
{
    const float root = (float)code * factor;
    return root * root;
}

/* The bits of 1.5 * 2^23 + x, of which the low ones are x rounded to the nearest even. */
FST_FN int32_t fst_nearest(float x)
{
    return (int32_t)fst_bits_of_f32(x + 12582912.0f);
}

/* Words whose low 8 bits are the code. */
FST_FN int32_t fst_to_signed(float term, float divisor)
{
    return fst_nearest(term / (divisor + fabsf(term)) * 254.0f);
}

/* Compares integers: of numbers that are not negative they are in the same order. */
FST_FN int32_t fst_to_root(float term, float divisor)
{
    const int32_t bits = (int32_t)fst_bits_of_f32(term), code = fst_nearest(term * divisor);
    const int32_t least = fst_nearest(0.0f) + (bits < 1 ? bits : 1);
    return code > least ? code : least;
}
