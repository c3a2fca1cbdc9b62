/* code_blocks.h - states in 8 bits, block by block. */
#pragma once

#include "rules/codes.h"

/* A block's elements, its place among the scales, and the end of its segment. It may be none, of 0
 * elements. */
typedef struct {
    int64_t at, scale, segment_end;
    size_t n;
} code_block;

/* The block after another, before an element `end`. After one of 0 elements, whose segment ends
 * where it is, it is the first. */
FST_FN code_block block_after(const fst_operand *op, code_block block, int64_t end)
{
    block.at += (int64_t)block.n;
    block.scale++;
    if (block.at >= block.segment_end) {
        const fst_segment segment = fst_segment_at(block.at, op->row);
        block.scale = segment.scale + (block.at - segment.begin) / FST_BLOCK;
        block.segment_end = segment.end < end ? segment.end : end;
    }
    const int64_t left = block.segment_end - block.at;
    block.n = left < FST_BLOCK ? (size_t)left : FST_BLOCK;
    return block;
}

/* What a state's loop works on: three blocks, one after another. Together one is decoded, that
 * before it updated, and that before both encoded. So a processor has other work while it divides,
 * finds a root, or the largest of a block. Words have new codes in their low 8 bits. */
typedef struct ALIGNED {
    int32_t codes[FST_BLOCK];
    float numbers[FST_BLOCK], terms[FST_BLOCK]; /* the latter of the block before */
    int32_t new_codes[FST_BLOCK];               /* of the block before that */
    float factor, divisor;                      /* of codes and terms */
    uint32_t largest;                           /* size of the terms */
    uint16_t scale;                             /* of the new codes */
} code_stages;

/* Moves an element on by a stage. Returns the size of its new term. */
FST_FN uint32_t fst_next_stage(code_stages *s, int is_signed, size_t i, float number)
{
    const float term = is_signed ? fst_signed_term(number) : fst_root_term(number);
    s->new_codes[i] =
        is_signed ? fst_to_signed(s->terms[i], s->divisor) : fst_to_root(s->terms[i], s->divisor);
    s->terms[i] = term;
    s->numbers[i] =
        is_signed ? fst_of_signed(s->codes[i], s->factor) : fst_of_root(s->codes[i], s->factor);
    return is_signed ? fst_signed_size(term) : fst_root_size(term);
}

/* Between codes and words, one after another or, for loops of pairs, first those of even elements.
 */
typedef uint16_t __attribute__((aligned(1), may_alias)) code_pair;
enum { HALF_BLOCK = FST_BLOCK / 2 };

FST_FN void take_codes(int32_t *restrict to, const uint8_t *restrict codes, int is_signed,
                       int pairs)
{
    const code_pair *pair = (const code_pair *)codes;
    if (pairs && is_signed)
        for (size_t i = 0; i < HALF_BLOCK; i++) {
            to[i] = (int32_t)((uint32_t)pair[i] << 24) >> 24;
            to[HALF_BLOCK + i] = (int32_t)((uint32_t)pair[i] << 16) >> 24;
        }
    else if (pairs)
        for (size_t i = 0; i < HALF_BLOCK; i++) {
            to[i] = pair[i] & 0xFF;
            to[HALF_BLOCK + i] = pair[i] >> 8;
        }
    else if (is_signed)
        for (size_t i = 0; i < FST_BLOCK; i++)
            to[i] = (int8_t)codes[i];
    else
        for (size_t i = 0; i < FST_BLOCK; i++)
            to[i] = codes[i];
}

FST_FN void put_codes(uint8_t *restrict codes, const int32_t *restrict from, int pairs)
{
    code_pair *pair = (code_pair *)codes;
    if (pairs)
        for (size_t i = 0; i < HALF_BLOCK; i++)
            pair[i] = (uint16_t)((from[i] & 0xFF) | (from[HALF_BLOCK + i] & 0xFF) << 8);
    else
        for (size_t i = 0; i < FST_BLOCK; i++)
            codes[i] = (uint8_t)from[i];
}

/* Takes a block's codes. */
FST_FN void take_block(code_stages *s, const uint8_t *codes, uint16_t scale, int is_signed,
                       int pairs)
{
    take_codes(s->codes, codes, is_signed, pairs);
    const float wide = fst_bf16_to_f32(scale);
    s->factor = is_signed ? fst_signed_factor(wide) : fst_root_factor(wide);
}

/* Finds the scale of the terms. */
FST_FN void scale_block(code_stages *s, int is_signed)
{
    s->scale = is_signed ? fst_signed_scale(s->largest) : fst_root_scale(s->largest);
    const float wide = fst_bf16_to_f32(s->scale);
    s->divisor = is_signed ? fst_signed_divisor(wide) : fst_root_divisor(wide);
}

/* Writes a block's new codes, and its scale. */
FST_FN void put_block(const code_stages *s, uint8_t *codes, uint16_t *scale, int pairs)
{
    put_codes(codes, s->new_codes, pairs);
    if (s->scale == FST_SCALE_NAN)
        memset(codes, 0, FST_BLOCK);
    *scale = s->scale;
}
