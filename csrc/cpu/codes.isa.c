/* Blocks of float from and to states in 8 bits (rules/codes.h). Compiled once per instruction set,
 * as kernels.isa.c. The loops take whole blocks; a shorter one is made whole by zeros. */
#include <string.h>

#include "cpu/isa.h"
#include "rules/codes.h"

#define CODES(kind)                                                                               \
    __attribute__((noinline)) static void fst_loop_of_##kind(size_t blocks, float *restrict to,   \
                                                             const uint8_t *restrict codes,       \
                                                             const float *restrict factors)       \
    {                                                                                             \
        for (size_t b = 0; b < blocks; b++, to += FST_BLOCK, codes += FST_BLOCK)                  \
            for (size_t i = 0; i < FST_BLOCK; i++)                                                \
                to[i] = fst_of_##kind(codes[i], factors[b]);                                      \
    }                                                                                             \
    __attribute__((noinline)) static void fst_loop_##kind##_terms(                                \
        size_t blocks, uint32_t *restrict largest, float *restrict x)                             \
    {                                                                                             \
        for (size_t b = 0; b < blocks; b++, x += FST_BLOCK) {                                     \
            uint32_t most = 0;                                                                    \
            for (size_t i = 0; i < FST_BLOCK; i++) {                                              \
                x[i] = fst_##kind##_term(x[i]);                                                   \
                const uint32_t size = fst_##kind##_size(x[i]);                                    \
                most = size > most ? size : most;                                                 \
            }                                                                                     \
            largest[b] = most;                                                                    \
        }                                                                                         \
    }                                                                                             \
    __attribute__((noinline)) static void fst_loop_to_##kind(                                     \
        size_t blocks, uint8_t *restrict codes, const float *restrict terms,                      \
        const float *restrict divisors)                                                           \
    {                                                                                             \
        for (size_t b = 0; b < blocks; b++, terms += FST_BLOCK, codes += FST_BLOCK)               \
            for (size_t i = 0; i < FST_BLOCK; i++)                                                \
                codes[i] = fst_to_##kind(terms[i], divisors[b]);                                  \
    }                                                                                             \
    static void of_##kind(size_t blocks, float *to, const uint8_t *codes, const uint16_t *scales) \
    {                                                                                             \
        float factors[FST_STRIP_BLOCKS] = {0};                                                    \
        for (size_t b = 0; b < blocks; b++)                                                       \
            factors[b] = fst_##kind##_factor(fst_bf16_to_f32(scales[b]));                         \
        fst_loop_of_##kind(blocks, to, codes, factors);                                           \
    }                                                                                             \
    static void to_##kind(size_t blocks, uint8_t *codes, uint16_t *scales, const float *terms,    \
                          const uint32_t *largest)                                                \
    {                                                                                             \
        float divisors[FST_STRIP_BLOCKS] = {0};                                                   \
        for (size_t b = 0; b < blocks; b++) {                                                     \
            scales[b] = fst_##kind##_scale(largest[b]);                                           \
            divisors[b] = fst_##kind##_divisor(fst_bf16_to_f32(scales[b]));                       \
        }                                                                                         \
        fst_loop_to_##kind(blocks, codes, terms, divisors);                                       \
        for (size_t b = 0; b < blocks; b++)                                                       \
            if (scales[b] == FST_SCALE_NAN)                                                       \
                memset(codes + b * FST_BLOCK, 0, FST_BLOCK);                                      \
    }
CODES(signed)
CODES(root)
#undef CODES

void FST_OF_ISA(fst_of_codes)(int is_signed, size_t blocks, float *to, const uint8_t *codes,
                              const uint16_t *scales)
{
    (is_signed ? of_signed : of_root)(blocks, to, codes, scales);
}

void FST_OF_ISA(fst_to_codes)(int is_signed, size_t blocks, uint8_t *codes, uint16_t *scales,
                              const float *terms, const uint32_t *largest)
{
    (is_signed ? to_signed : to_root)(blocks, codes, scales, terms, largest);
}

/* Converts whole blocks in one of the directions; on the way to codes `strip` becomes terms. */
static void convert(int is_signed, int into, size_t blocks, float *strip, uint8_t *codes,
                    uint16_t *scales)
{
    uint32_t largest[FST_STRIP_BLOCKS];
    if (!into) {
        FST_OF_ISA(fst_of_codes)(is_signed, blocks, strip, codes, scales);
        return;
    }
    (is_signed ? fst_loop_signed_terms : fst_loop_root_terms)(blocks, largest, strip);
    FST_OF_ISA(fst_to_codes)(is_signed, blocks, codes, scales, strip, largest);
}

void FST_OF_ISA(fst_convert_codes)(const fst_operand *op, float *strip, int64_t at, size_t n,
                                   int into)
{
    const int is_signed = op->dtype == FST_I8;
    uint8_t *codes = (uint8_t *)op->data + at;
    for (size_t done = 0; done < n;) {
        const fst_segment segment = fst_segment_at(at + (int64_t)done, op->row);
        const int64_t from = at + (int64_t)done - segment.begin;
        const size_t left = (size_t)(segment.end - segment.begin - from);
        const size_t size = left < n - done ? left : n - done, rest = size % FST_BLOCK;
        uint16_t *scales = op->scales + segment.scale + from / FST_BLOCK;
        convert(is_signed, into, size / FST_BLOCK, strip + done, codes + done, scales);
        done += size;
        if (rest) {
            float numbers[FST_BLOCK] = {0};
            uint8_t block[FST_BLOCK] = {0};
            memcpy(numbers, strip + done - rest, rest * sizeof *numbers);
            memcpy(block, codes + done - rest, rest);
            convert(is_signed, into, 1, numbers, block, scales + size / FST_BLOCK);
            memcpy(into ? (void *)(codes + done - rest) : (void *)(strip + done - rest),
                   into ? (void *)block : (void *)numbers, into ? rest : rest * sizeof *numbers);
        }
    }
}
