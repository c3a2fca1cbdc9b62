/* Strips of float from and to states in 8 bits (rules/codes.h). Compiled once per instruction set,
 * as kernels.isa.c. The loops take whole blocks; a shorter one is made whole by zeros. */
#include <string.h>

#include "cpu/isa.h"
#include "rules/codes.h"

enum { STRIP_BLOCKS = FST_CODES_STRIP / FST_BLOCK };

#define CODES(kind)                                                                             \
    __attribute__((noinline)) static void fst_loop_of_##kind(size_t blocks, float *restrict to, \
                                                             const uint8_t *restrict codes,     \
                                                             const float *restrict factors)     \
    {                                                                                           \
        for (size_t b = 0; b < blocks; b++, to += FST_BLOCK, codes += FST_BLOCK)                \
            for (size_t i = 0; i < FST_BLOCK; i++)                                              \
                to[i] = fst_of_##kind(codes[i], factors[b]);                                    \
    }                                                                                           \
    __attribute__((noinline)) static void fst_loop_##kind##_terms(                              \
        size_t blocks, uint32_t *restrict largest, float *restrict x)                           \
    {                                                                                           \
        for (size_t b = 0; b < blocks; b++, x += FST_BLOCK) {                                   \
            uint32_t most = 0;                                                                  \
            for (size_t i = 0; i < FST_BLOCK; i++) {                                            \
                x[i] = fst_##kind##_term(x[i]);                                                 \
                const uint32_t size = fst_##kind##_size(x[i]);                                  \
                most = size > most ? size : most;                                               \
            }                                                                                   \
            largest[b] = most;                                                                  \
        }                                                                                       \
    }                                                                                           \
    __attribute__((noinline)) static void fst_loop_to_##kind(                                   \
        size_t blocks, uint8_t *restrict codes, const float *restrict from,                     \
        const float *restrict divisors)                                                         \
    {                                                                                           \
        for (size_t b = 0; b < blocks; b++, from += FST_BLOCK, codes += FST_BLOCK)              \
            for (size_t i = 0; i < FST_BLOCK; i++)                                              \
                codes[i] = fst_to_##kind(from[i], divisors[b]);                                 \
    }                                                                                           \
    static void of_##kind(size_t blocks, float *to, uint8_t *codes, uint16_t *scales)           \
    {                                                                                           \
        float factors[STRIP_BLOCKS] = {0};                                                      \
        for (size_t b = 0; b < blocks; b++)                                                     \
            factors[b] = fst_##kind##_factor(fst_bf16_to_f32(scales[b]));                       \
        fst_loop_of_##kind(blocks, to, codes, factors);                                         \
    }                                                                                           \
    static void to_##kind(size_t blocks, float *from, uint8_t *codes, uint16_t *scales)         \
    {                                                                                           \
        uint32_t largest[STRIP_BLOCKS];                                                         \
        float divisors[STRIP_BLOCKS] = {0};                                                     \
        fst_loop_##kind##_terms(blocks, largest, from);                                         \
        for (size_t b = 0; b < blocks; b++) {                                                   \
            scales[b] = fst_##kind##_scale(largest[b]);                                         \
            divisors[b] = fst_##kind##_divisor(fst_bf16_to_f32(scales[b]));                     \
        }                                                                                       \
        fst_loop_to_##kind(blocks, codes, from, divisors);                                      \
        for (size_t b = 0; b < blocks; b++)                                                     \
            if (scales[b] == FST_SCALE_NAN)                                                     \
                memset(codes + b * FST_BLOCK, 0, FST_BLOCK);                                    \
    }
CODES(signed)
CODES(root)
#undef CODES

void FST_OF_ISA(fst_convert_codes)(const fst_operand *op, float *strip, int64_t at, size_t n,
                                   int into)
{
    void (*convert)(size_t, float *, uint8_t *, uint16_t *) =
        op->dtype == FST_I8 ? (into ? to_signed : of_signed) : (into ? to_root : of_root);
    uint8_t *codes = (uint8_t *)op->data + at;
    for (size_t done = 0; done < n;) {
        const fst_segment segment = fst_segment_at(at + (int64_t)done, op->row);
        const int64_t from = at + (int64_t)done - segment.begin;
        const size_t left = (size_t)(segment.end - segment.begin - from);
        const size_t size = left < n - done ? left : n - done, rest = size % FST_BLOCK;
        uint16_t *scales = op->scales + segment.scale + from / FST_BLOCK;
        convert(size / FST_BLOCK, strip + done, codes + done, scales);
        done += size;
        if (rest) {
            float numbers[FST_BLOCK] = {0};
            uint8_t block[FST_BLOCK] = {0};
            memcpy(numbers, strip + done - rest, rest * sizeof *numbers);
            memcpy(block, codes + done - rest, rest);
            convert(1, numbers, block, scales + size / FST_BLOCK);
            memcpy(into ? (void *)(codes + done - rest) : (void *)(strip + done - rest),
                   into ? (void *)block : (void *)numbers, into ? rest : rest * sizeof *numbers);
        }
    }
}
