#include "io/shuffle.h"

/* The finalizer of SplitMix64 (Steele, Lea & Flood 2014). */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

void fst_shuffle_init(fst_shuffle *shuffle, uint64_t length, uint64_t seed, uint64_t epoch)
{
    unsigned bits = 1;
    while (bits < 63 && UINT64_C(1) << bits < length)
        bits++;
    shuffle->length = length;
    shuffle->bits[0] = (bits + 1) / 2;
    shuffle->bits[1] = bits / 2;
    uint64_t state = mix(mix(seed + UINT64_C(0x9E3779B97F4A7C15)) ^ epoch);
    for (unsigned r = 0; r < FST_SHUFFLE_ROUNDS; r++)
        shuffle->keys[r] = mix(state += UINT64_C(0x9E3779B97F4A7C15));
}

/* Sends a number through the network once. The halves may differ by a bit; after an even number
 * of rounds each has its own size again. */
static uint64_t permute(const fst_shuffle *shuffle, uint64_t i)
{
    uint64_t left = i >> shuffle->bits[1], right = i & ((UINT64_C(1) << shuffle->bits[1]) - 1);
    for (unsigned r = 0; r < FST_SHUFFLE_ROUNDS; r++) {
        const uint64_t mask = (UINT64_C(1) << shuffle->bits[r & 1u]) - 1;
        const uint64_t mixed = (left ^ mix(right ^ shuffle->keys[r])) & mask;
        left = right;
        right = mixed;
    }
    return left << shuffle->bits[1] | right;
}

uint64_t fst_shuffle_at(const fst_shuffle *shuffle, uint64_t i)
{
    do
        i = permute(shuffle, i);
    while (i >= shuffle->length);
    return i;
}
