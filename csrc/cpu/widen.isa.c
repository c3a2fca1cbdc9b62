/* Widens rows of integers. Compiled once per instruction set, as kernels.isa.c. */
#include "cpu/isa.h"

#include <stdint.h>
#include <string.h>

#define WIDEN(name, narrow_type, wide_type)                                      \
    static void name(char *restrict to, const char *restrict from, size_t items) \
    {                                                                            \
        for (size_t i = 0; i < items; i++) {                                     \
            narrow_type narrow;                                                  \
            memcpy(&narrow, from + i * sizeof narrow, sizeof narrow);            \
            const wide_type wide = (wide_type)narrow;                            \
            memcpy(to + i * sizeof wide, &wide, sizeof wide);                    \
        }                                                                        \
    }
WIDEN(fst_loop_u16_to_i32, uint16_t, int32_t)
WIDEN(fst_loop_u16_to_i64, uint16_t, int64_t)
WIDEN(fst_loop_u32_to_i64, uint32_t, int64_t)
WIDEN(fst_loop_u8_to_i64, uint8_t, int64_t)
WIDEN(fst_loop_i8_to_i64, int8_t, int64_t)
WIDEN(fst_loop_i16_to_i64, int16_t, int64_t)
WIDEN(fst_loop_i32_to_i64, int32_t, int64_t)

const fst_widen_loops FST_OF_ISA(fst_widen_loops) = {
    .integers =
        {
            [FST_U16_TO_I32] = fst_loop_u16_to_i32,
            [FST_U16_TO_I64] = fst_loop_u16_to_i64,
            [FST_U32_TO_I64] = fst_loop_u32_to_i64,
            [FST_U8_TO_I64] = fst_loop_u8_to_i64,
            [FST_I8_TO_I64] = fst_loop_i8_to_i64,
            [FST_I16_TO_I64] = fst_loop_i16_to_i64,
            [FST_I32_TO_I64] = fst_loop_i32_to_i64,
        },
    .to_floats = FST_OF_ISA(fst_floats),
};
