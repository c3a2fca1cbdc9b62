/* numbers.h - what a tensor has beside its step count: see numbers.def. */
#pragma once

#include "base/dtype.h"
#include "base/portable.h"

enum { FST_MAX_NUMBERS = 2 };

/* The index of number k among the hyper-parameters of a rule, behind its own. */
#define FST_NUMBER(k) (7 - (k))

/* The numbers of one tensor, and how they are held. */
typedef struct {
    double value[FST_MAX_NUMBERS];
    int32_t dtype[FST_MAX_NUMBERS]; /* fst_dtype */
    int32_t wide_step;              /* the step count is held in fp64 */
    int32_t reserved;               /* so that two can be compared as memory */
} fst_numbers;

FST_FN double fst_number_rounded(double value, int32_t dtype)
{
    const double narrow = fst_rounded_to_f32(value);
    return dtype == FST_F64    ? value
           : dtype == FST_F32  ? narrow
           : dtype == FST_BF16 ? (double)fst_bf16_to_f32(fst_f32_to_bf16((float)narrow))
                               : (double)fst_f16_to_f32(fst_f32_to_f16((float)narrow));
}
