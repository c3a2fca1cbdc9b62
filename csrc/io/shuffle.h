/* shuffle.h - a permutation of any length that is computed, not stored.
 *
 * It is a Feistel network (Luby & Rackoff 1988) over the next power of two, with cycle walking
 * (Black & Rogaway 2002): a number beyond the length is permuted again until it is not. */
#pragma once

#include <stdint.h>

enum { FST_SHUFFLE_ROUNDS = 8 };

typedef struct {
    uint64_t length;
    unsigned bits[2]; /* of the two halves */
    uint64_t keys[FST_SHUFFLE_ROUNDS];
} fst_shuffle;

/* The permutation of 0 <= i < length that belongs to (seed, epoch); length < 2^63. */
void fst_shuffle_init(fst_shuffle *shuffle, uint64_t length, uint64_t seed, uint64_t epoch);

/* Item i < length of the permutation. */
uint64_t fst_shuffle_at(const fst_shuffle *shuffle, uint64_t i);
