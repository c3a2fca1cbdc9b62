/* kinds.h - how the loops of rule_loops.h load and store elements, by their kind: its type, its
 * conversions, and what only loops of such elements have. A loop takes EACH neighbours at a time,
 * one, or two in a word. Element `h` of those lies at x[i], or at x[each * i + h]. */

#define KIND_OF(what, kind) what##_##kind
#define KIND(what, kind) KIND_OF(what, kind)

/* The elements of an operand from one on, IN of which are in a word. */
#define FROM(kind, op, at)                            \
    ((KIND(TYPE, kind) *)(void *)((char *)(op).data + \
                                  (at) * (int64_t)(sizeof(KIND(TYPE, kind)) / KIND(IN, kind))))

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
#define NOISE_terms(...)
#define NOISE_noisy(...) __VA_ARGS__
#define NOISE_noisy_pair(...) __VA_ARGS__

/* Numbers of codes, which become the terms of the new ones (rules/codes.h), and how many have a
 * largest of their own. */
#define TYPE_terms REAL
#define LOAD_terms LOAD_real
#define STORE_terms(k, x, i)                                                     \
    do {                                                                         \
        const REAL term = k ? fst_root_term(s[0][k]) : fst_signed_term(s[0][k]); \
        const uint32_t size = k ? fst_root_size(term) : fst_signed_size(term);   \
        (x)[i] = term;                                                           \
        most[k] = size > most[k] ? size : most[k];                               \
    } while (0)
#define TERMS_real(...)
#define TERMS_bf16(...)
#define TERMS_pair(...)
#define TERMS_noisy(...)
#define TERMS_noisy_pair(...)
#define TERMS_terms(...) __VA_ARGS__
#define END_real(i, n) (n)
#define IS_LONG_real 0
#define END_bf16(i, n) (n)
#define IS_LONG_bf16 1
#define END_pair(i, n) (n)
#define IS_LONG_pair 1
#define END_noisy(i, n) (n)
#define IS_LONG_noisy 0
#define END_noisy_pair(i, n) (n)
#define IS_LONG_noisy_pair 0
#define END_terms(i, n) ((i) + FST_BLOCK)
#define IS_LONG_terms 1

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
