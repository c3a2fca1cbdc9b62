/* code_words.h - states in codes of 8 bits (rules/codes.h): which are, where they lie, and their
 * formulas without branches.
 *
 * The formulas take quotients and roots as quick_math.h does, and give the same codes and numbers.
 * Of a quotient x / y the last bits are sure where |x| is at least 2^-100. The others are below
 * 2^-38 here, and so have the code 0. */
#pragma once

#include "rules/codes.h"
#include "quick_math.h"
#include "tile.h"

/* A tile has eight neighbours of each thread of a warp. */
enum {
    FST_CODE_LANES = FST_BLOCK / 8, /* that have a block */
    FST_TILE_BLOCKS = FST_WARP / FST_CODE_LANES,
};

/* Eight codes. */
typedef struct __attribute__((aligned(8), may_alias)) {
    uint32_t word[2];
} fst_eight;

/* Whether a state is in codes, and whether these have signs. Hidden from nvcc; see there. */
FST_DEVICE int fst_is_coded(const fst_device_operand *op)
{
    const int32_t dtype = fst_hidden(op->dtype);
    return dtype == FST_I8 || dtype == FST_U8;
}

FST_DEVICE int fst_has_signs(const fst_device_operand *op)
{
    return fst_hidden(op->dtype) == FST_I8;
}

FST_DEVICE uint8_t *fst_code_at(const fst_share *share, const fst_device_operand *op,
                                uint32_t element)
{
    return (uint8_t *)fst_global(op->data) + share->begin + element;
}

/* The number that a code stands for. Not inlined, as divisions are long. */
FST_DEVICE_CALL float fst_of_code(uint32_t code, uint32_t scale, int has_signs)
{
    const float s = fst_bf16_to_f32((uint16_t)scale);
    return has_signs ? fst_of_signed((int8_t)code, fst_signed_factor(s))
                     : fst_of_root((uint8_t)code, fst_root_factor(s));
}

/* The codes of two numbers of each thread, whose warp has a block, in the lower bytes, and its
 * scale in the upper half. Likewise. */
FST_DEVICE_CALL uint32_t fst_to_codes(float x, float y, int has_signs)
{
    const float first = has_signs ? fst_signed_term(x) : fst_root_term(x);
    const float second = has_signs ? fst_signed_term(y) : fst_root_term(y);
    const uint32_t a = has_signs ? fst_signed_size(first) : fst_root_size(first);
    const uint32_t b = has_signs ? fst_signed_size(second) : fst_root_size(second);
    const uint32_t largest = fst_largest(a > b ? a : b, FST_WARP);
    const uint16_t scale = has_signs ? fst_signed_scale(largest) : fst_root_scale(largest);
    const float s = fst_bf16_to_f32(scale);
    const float divisor = has_signs ? fst_signed_divisor(s) : fst_root_divisor(s);
    uint32_t codes = 0;
    FST_ROLLED
    for (unsigned n = 0; n < 2 && scale != FST_SCALE_NAN; n++) {
        const float term = n ? first : second;
        const int32_t word = has_signs ? fst_to_signed(term, divisor) : fst_to_root(term, divisor);
        codes = codes << 8 | (uint8_t)word;
    }
    return (uint32_t)scale << 16 | codes;
}

/* The number of the scale of an element at which a block begins, and in the lower 16 bits the
 * elements from there to the end of its segment. Not inlined, as 64-bit divisions are long. */
FST_DEVICE_CALL uint64_t fst_segment_from(int64_t begin, uint32_t row)
{
    const fst_segment segment = fst_segment_at(begin, row);
    const int64_t scale = segment.scale + (begin - segment.begin) / FST_BLOCK;
    return (uint64_t)scale << 16 | (uint64_t)(segment.end - begin);
}

/* The scale of state k of a block of the chunk. */
FST_DEVICE uint16_t *fst_scale_at(const fst_share *share, const fst_device_span *span,
                                  uint32_t block, unsigned k)
{
    const uint64_t first = fst_segment_from(share->begin, span->row) >> 16;
    return (uint16_t *)fst_global(span->scales) + k * (uint64_t)span->scale_count + first + block;
}

FST_DEVICE float fst_quick_quotient(float x, float y)
{
    return fst_refined_quotient(x, y, fst_inverse(y));
}

/* One correction is enough for the quotients of these 256 codes. */
FST_DEVICE float fst_quick_of_signed(uint8_t code, float factor)
{
    const float q = (float)(int8_t)code, y = 254.0f - fabsf(q), inverse = fst_inverse(y);
    const float quotient = q * inverse;
    return factor * fmaf(fmaf(-y, quotient, q), inverse, quotient);
}

/* What brings scales near to 1, so that no quotient by one has to be looked at. */
FST_DEVICE float fst_quick_unit(float scale)
{
    return scale < 1.0f ? 0x1p64f : 0x1p-8f;
}

/* For fst_quick_to_signed. With a scale of 0 all terms are below 2^-126. */
FST_DEVICE float fst_quick_signed_divisor(float scale, float unit)
{
    return scale > 0.0f ? scale * unit : 1.0f;
}

FST_DEVICE uint8_t fst_quick_to_signed(float term, float divisor, float unit)
{
    const float x = term * unit;
    return (uint8_t)fst_nearest(fst_quick_quotient(x, divisor + fabsf(x)) * 254.0f);
}

/* The terms of roots are those of fst_large_root here, and that of 0 is below this. */
#define FST_QUICK_ROOT_MIN 0x1p-56f

FST_DEVICE uint16_t fst_quick_root_scale(uint32_t largest)
{
    const float root = fst_f32_of_bits(largest) * 0x1p-24f;
    return fst_root_scale(largest < fst_bits_of_f32(FST_QUICK_ROOT_MIN) ? 0
                                                                        : fst_bits_of_f32(root));
}

FST_DEVICE float fst_quick_root_divisor(float scale)
{
    return scale > 0.0f ? fst_quick_quotient(255.0f, scale) * 0x1p-24f : 0.0f;
}

FST_DEVICE uint8_t fst_quick_to_root(float term, float divisor)
{
    return (uint8_t)fst_nearest(fmaxf(term * divisor, term > FST_QUICK_ROOT_MIN ? 1.0f : 0.0f));
}
