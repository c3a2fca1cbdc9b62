/* Strips of float from and to states in 8 bits (rules/codes.h). Compiled once per instruction set,
 * as kernels.isa.c. The loops take whole blocks; a shorter one is made whole by zeros. */
#include <string.h>

#include "cpu/isa.h"

#define ALIGNED __attribute__((aligned(64)))
#include "cpu/code_blocks.h"

#define CODES(kind)                                                                         \
    __attribute__((noinline)) static void fst_loop_of_##kind(float *restrict to,            \
                                                             const code_stages *restrict s) \
    {                                                                                       \
        for (size_t i = 0; i < FST_BLOCK; i++)                                              \
            to[i] = fst_of_##kind(s->codes[i], s->factor);                                  \
    }                                                                                       \
    __attribute__((noinline)) static void fst_loop_##kind##_terms(code_stages *restrict s)  \
    {                                                                                       \
        uint32_t most = 0;                                                                  \
        for (size_t i = 0; i < FST_BLOCK; i++) {                                            \
            s->terms[i] = fst_##kind##_term(s->numbers[i]);                                 \
            const uint32_t size = fst_##kind##_size(s->terms[i]);                           \
            most = size > most ? size : most;                                               \
        }                                                                                   \
        s->largest = most;                                                                  \
    }                                                                                       \
    __attribute__((noinline)) static void fst_loop_to_##kind(code_stages *restrict s)       \
    {                                                                                       \
        for (size_t i = 0; i < FST_BLOCK; i++)                                              \
            s->new_codes[i] = fst_to_##kind(s->terms[i], s->divisor);                       \
    }
CODES(signed)
CODES(root)
#undef CODES

void FST_OF_ISA(fst_convert_codes)(const fst_operand *op, float *strip, int64_t at, size_t n,
                                   int into)
{
    const int is_signed = op->dtype == FST_I8;
    const int64_t end = at + (int64_t)n;
    code_stages s;
    code_block block = block_after(op, (code_block){.at = at, .segment_end = at}, end);
    for (; block.n; strip += block.n, block = block_after(op, block, end)) {
        uint8_t codes[FST_BLOCK] = {0}, *own = (uint8_t *)op->data + block.at;
        uint16_t *scale = &op->scales[block.scale];
        if (!into) {
            take_block(&s, memcpy(codes, own, block.n), *scale, is_signed, 0);
            (is_signed ? fst_loop_of_signed : fst_loop_of_root)(s.numbers, &s);
            memcpy(strip, s.numbers, block.n * sizeof *strip);
            continue;
        }
        memset(s.numbers, 0, sizeof s.numbers);
        memcpy(s.numbers, strip, block.n * sizeof *strip);
        (is_signed ? fst_loop_signed_terms : fst_loop_root_terms)(&s);
        scale_block(&s, is_signed);
        (is_signed ? fst_loop_to_signed : fst_loop_to_root)(&s);
        put_block(&s, codes, scale, 0);
        memcpy(own, codes, block.n);
    }
}
