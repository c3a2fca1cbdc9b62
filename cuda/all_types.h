/* all_types.h - operands of every type, in float and in double. */
#pragma once

#include "fold_sums.h"
#include "tile.h"

/* The types that a kernel reduces in float, or in double, and those that it loads by words there:
 * dtype, name in typed_words.h, items of a word. */
#define FST_REDUCED_f32 TYPE(FST_F32, of_f32, 4) TYPE(FST_BF16, of_bf16, 8) TYPE(FST_F16, of_f16, 8)
#define FST_REDUCED_f64 TYPE(FST_F64, of_f64, 2)
#define FST_TYPES_f32 FST_REDUCED_f32
#define FST_TYPES_f64 FST_REDUCED_f64 TYPE(FST_F32, of_f32_in_f64, 4)

#define REAL float
#define FST_T(name) name##_f32
#define FST_K(name) name##_of_f32
#define ITEMS 4
#include "typed_words.h"
#undef FST_K
#undef ITEMS
#define FST_K(name) name##_of_bf16
#define ITEMS 8
#define FST_WIDEN_16 fst_bf16_to_f32
#define FST_NARROW_16 fst_f32_to_bf16
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* else the hardware does not round to bf16 */
#define FST_NAN_16(x) 0x7FC0u
#endif
#define FST_NARROW_TWO fst_narrow_two_bf16
#include "typed_words.h"
#undef FST_K
#undef FST_WIDEN_16
#undef FST_NARROW_16
#undef FST_NAN_16
#undef FST_NARROW_TWO
#define FST_K(name) name##_of_f16
#define FST_WIDEN_16 fst_widen_f16
#define FST_NARROW_16 fst_f32_to_f16
#define FST_NAN_16(x) ((fst_bits_of_f32(x) >> 16 & 0x8000u) | 0x7E00u)
#define FST_NARROW_TWO fst_narrow_two_f16
#include "typed_words.h"
#undef FST_K
#undef ITEMS
#undef FST_WIDEN_16
#undef FST_NARROW_16
#undef FST_NAN_16
#undef FST_NARROW_TWO
#include "held.h"
#undef HELD
#undef REAL
#undef FST_T

#define REAL double
#define FST_T(name) name##_f64
#define FST_K(name) name##_of_f64
#define ITEMS 2
#include "typed_words.h"
#undef FST_K
#undef ITEMS
#define FST_K(name) name##_of_f32_in_f64
#define ITEMS 4
#define FST_WORDS_ONLY
#include "typed_words.h"
#undef FST_K
#undef ITEMS
#undef FST_WORDS_ONLY
#include "held.h"
#undef HELD
#undef REAL
#undef FST_T
