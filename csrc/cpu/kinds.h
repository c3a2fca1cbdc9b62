/* kinds.h - how the loops of rule_loops.h load and store elements, by their kind: its type, its
 * conversions, and what only loops of such elements have. A loop takes EACH neighbours at a time,
 * one, or two in a word. Element `h` of those lies at x[i], or at x[each * i + h]. */

#define KIND_OF(what, kind) what##_##kind
#define KIND(what, kind) KIND_OF(what, kind)

/* The elements of an operand from one on, IN of which are in a word. */
#define FROM(kind, op, at) \
    ((KIND(TYPE, kind) *)(void *)((char *)(op).data + (at) * (int64_t)ELEMENT(kind)))

/* Bytes of an element. */
#define ELEMENT(kind) (sizeof(KIND(TYPE, kind)) / KIND(IN, kind))

/* Gradients and states. Of the latter s[h][k] is stored, where k is the state's number. */
#define TYPE_real REAL
#define IN_real 1
#define LOAD_real(x, i, h) (x)[each * (i) + (h)]
#define STORE_real(k, x, i) (x)[i] = s[0][k]

#define TYPE_bf16 uint16_t
#define IN_bf16 1
#define LOAD_bf16(x, i, h) fst_bf16_to_f32((x)[i])
#define STORE_bf16(k, x, i) (x)[i] = fst_f32_to_bf16(s[0][k])

/* Two neighbours in a word: its halves are made floats, and joined, without other instructions than
 * those of words. */
typedef uint32_t __attribute__((aligned(2), may_alias)) half_pair;
#define HALF_OF(x, i, h) ((h) ? (x)[i] & 0xFFFF0000u : (x)[i] << 16)
#define UPPER_HALVES(low, high) ((low) >> 16 | ((high) & 0xFFFF0000u))
#define LOWER_HALVES(low, high) (((low) & 0xFFFFu) | (high) << 16)
#define TYPE_pair half_pair
#define IN_pair 2
#define LOAD_pair(x, i, h) fst_f32_of_bits(HALF_OF(x, i, h))
#define STORE_pair(k, x, i) \
    (x)[i] = UPPER_HALVES(fst_f32_to_bf16_word(s[0][k]), fst_f32_to_bf16_word(s[1][k]))

/* bf16 that is rounded by noise, alone and in pairs. */
#define TYPE_noisy uint16_t
#define IN_noisy 1
#define LOAD_noisy LOAD_bf16
#define STORE_noisy(k, x, i) (x)[i] = fst_f32_to_bf16_by(s[0][k], noise[(k) * NOISE_ROOM + (i)])
#define TYPE_noisy_pair half_pair
#define IN_noisy_pair 2
#define LOAD_noisy_pair LOAD_pair
#define NOISE_HALF(k, i, h) (HALF_OF((const half_pair *)noise + (k) * NOISE_ROOM / 2, i, h) >> 16)
#define STORE_noisy_pair(k, x, i)                                                \
    (x)[i] = UPPER_HALVES(fst_f32_to_bf16_word_by(s[0][k], NOISE_HALF(k, i, 0)), \
                          fst_f32_to_bf16_word_by(s[1][k], NOISE_HALF(k, i, 1)))
#define NOISE_real(...)
#define NOISE_bf16(...)
#define NOISE_pair(...)
#define NOISE_codes(...)
#define NOISE_noisy(...) __VA_ARGS__
#define NOISE_noisy_pair(...) __VA_ARGS__

/* States in codes: a block, in stages (code_blocks.h). */
#define TYPE_codes code_stages
#define LOAD_codes(x, i, h) (x)->numbers[FST_BLOCK / each * (h) + (i)]
#define NEXT_STAGE(k, x, i, h)                                                          \
    do {                                                                                \
        const uint32_t size = fst_next_stage(x, !k, FST_BLOCK / each * h + i, s[h][k]); \
        most[k] = size > most[k] ? size : most[k];                                      \
    } while (0)
#define STAGES_codes(states, i, h) \
    if (states > 0)                \
        NEXT_STAGE(0, s0, i, h);   \
    if (states > 1)                \
        NEXT_STAGE(1, s1, i, h);   \
    if (states > 2)                \
        NEXT_STAGE(2, s2, i, h);
#define STORE_codes(k, x, i) (void)0

/* How many a loop takes, and what it finds beside; where a loop is long. */
#define END_real(n) (n)
#define MOST_real(...)
#define STAGES_real(...)
#define IS_LONG_real 0
#define END_bf16(n) (n)
#define MOST_bf16(...)
#define STAGES_bf16(...)
#define IS_LONG_bf16 1
#define END_pair(n) (n)
#define MOST_pair(...)
#define STAGES_pair(...)
#define IS_LONG_pair 1
#define END_noisy(n) (n)
#define MOST_noisy(...)
#define STAGES_noisy(...)
#define IS_LONG_noisy 0
#define END_noisy_pair(n) (n)
#define MOST_noisy_pair(...)
#define STAGES_noisy_pair(...)
#define IS_LONG_noisy_pair 0
#define END_codes(n) (FST_BLOCK / each)
#define MOST_codes(...) __VA_ARGS__
#define IS_LONG_codes 1

/* Parameters, alone or in halves (portable.h). now[h] is stored. */
#define EACH_real 1
#define LOAD_VALUE_real(p, rest, i, h) (p)[i]
#define STORE_VALUE_real(p, rest, i) (p)[i] = now[0]
#define REST_real(...)

#define EACH_halves 1
#define IS_LONG_halves 1
#define TYPE_halves uint16_t
#define IN_halves 1
#define LOAD_VALUE_halves(p, rest, i, h) fst_joined_f32((p)[i], (rest)[i])
#define STORE_VALUE_halves(p, rest, i) \
    (p)[i] = fst_f32_to_upper(now[0]), (rest)[i] = fst_f32_to_remainder(now[0])
#define REST_halves(...) __VA_ARGS__

#define EACH_halves_pair 2
#define IS_LONG_halves_pair 1
#define TYPE_halves_pair half_pair
#define IN_halves_pair 2
#define LOAD_VALUE_halves_pair(p, rest, i, h) \
    fst_joined_words(HALF_OF(p, i, h), HALF_OF(rest, i, h))
#define STORE_VALUE_halves_pair(p, rest, i)                                                       \
    do {                                                                                          \
        const uint32_t low = fst_f32_to_split_word(now[0]), high = fst_f32_to_split_word(now[1]); \
        (p)[i] = UPPER_HALVES(low + 0x8000u, high + 0x8000u);                                     \
        (rest)[i] = LOWER_HALVES(low, high);                                                      \
    } while (0)
#define REST_halves_pair(...) __VA_ARGS__
