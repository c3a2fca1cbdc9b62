/* noise.h - rounding by random bits, which every device and instruction set finds alike: those of
 * an element depend on a key and on the element's place, not on who asks, or in which order. They
 * come from Philox4x32-10 (Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as
 * 1, 2, 3"). */
#pragma once

#include "base/portable.h"

/* The key of a parameter's noise in a step. */
typedef struct {
    uint32_t seed[2], step, param;
} fst_noise;

/* A count of steps as the key has it. */
FST_FN uint32_t fst_noise_step(double count)
{
    return count > 0.0 && count < 0x1p53 ? (uint32_t)(uint64_t)count : 0u;
}

FST_FN void fst_philox_round(uint32_t *c, uint32_t key0, uint32_t key1)
{
    const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ key0;
    c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ key1;
    c[3] = (uint32_t)a;
}

/* Makes random bits of a counter. The rounds are written out, so that loops over it vectorise. */
FST_FN void fst_philox(uint32_t *c, uint32_t key0, uint32_t key1)
{
    const uint32_t add0 = 0x9E3779B9u, add1 = 0xBB67AE85u;
    fst_philox_round(c, key0, key1);
    fst_philox_round(c, key0 + add0, key1 + add1);
    fst_philox_round(c, key0 + 2u * add0, key1 + 2u * add1);
    fst_philox_round(c, key0 + 3u * add0, key1 + 3u * add1);
    fst_philox_round(c, key0 + 4u * add0, key1 + 4u * add1);
    fst_philox_round(c, key0 + 5u * add0, key1 + 5u * add1);
    fst_philox_round(c, key0 + 6u * add0, key1 + 6u * add1);
    fst_philox_round(c, key0 + 7u * add0, key1 + 7u * add1);
    fst_philox_round(c, key0 + 8u * add0, key1 + 8u * add1);
    fst_philox_round(c, key0 + 9u * add0, key1 + 9u * add1);
}

/* The upper word of the place of eight neighbouring elements of a state; the lower word is the
 * lower half of `eight`, which counts them. */
FST_FN uint32_t fst_noise_place(uint32_t state, uint64_t eight)
{
    return (uint32_t)(eight >> 32) | state << 30;
}

/* 16 bits for each of eight neighbours: the lower half of a word, then its upper half. */
FST_FN void fst_noise_of_eight(const fst_noise *noise, uint32_t lower, uint32_t upper,
                               uint32_t *words)
{
    words[0] = lower;
    words[1] = upper;
    words[2] = noise->step;
    words[3] = noise->param;
    fst_philox(words, noise->seed[0], noise->seed[1]);
}

/* To one of the two neighbours in bf16, the nearer one more often: the mean over all `noise` of 16
 * bits is the value. A bf16 number stays, and every NaN becomes the same. */
FST_FN uint32_t fst_f32_to_bf16_word_by(float value, uint32_t noise)
{
    return value != value ? 0x7FC00000u : fst_bits_of_f32(value) + noise;
}

FST_FN uint16_t fst_f32_to_bf16_by(float value, uint32_t noise)
{
    return (uint16_t)(fst_f32_to_bf16_word_by(value, noise) >> 16);
}
