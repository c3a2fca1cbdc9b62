/* Converts rows of numbers to floats. Compiled once per instruction set, as kernels.isa.c. */
#include "base/portable.h"
#include "cpu/isa.h"

#define LOOP __attribute__((noinline)) static void
enum { STRIP = 512 }; /* floats that stay in the first-level cache between two loops */

/* M source types and N loops cost M + N pieces of code, as in strip.h. */
#define LOAD(suffix, type, expression)                                                        \
    LOOP fst_loop_floats_of_##suffix(size_t n, float *restrict to, const char *restrict from) \
    {                                                                                         \
        for (size_t i = 0; i < n; i++) {                                                      \
            type item;                                                                        \
            memcpy(&item, from + i * sizeof item, sizeof item);                               \
            to[i] = expression;                                                               \
        }                                                                                     \
    }
LOAD(u8, uint8_t, (float)item)
LOAD(i8, int8_t, (float)item)
LOAD(i16, int16_t, (float)item)
LOAD(i32, int32_t, (float)item)
LOAD(f16, uint16_t, fst_f16_to_f32(item))
LOAD(bf16, uint16_t, fst_bf16_to_f32(item))
LOAD(f64, double, (float)item)
#undef LOAD

/* FST_OF_F32: a copy. */
typedef void load_fn(size_t n, float *restrict to, const char *restrict from);
static load_fn *const loads[FST_NUMBER_COUNT] = {
    [FST_OF_U8] = fst_loop_floats_of_u8,   [FST_OF_I8] = fst_loop_floats_of_i8,
    [FST_OF_I16] = fst_loop_floats_of_i16, [FST_OF_I32] = fst_loop_floats_of_i32,
    [FST_OF_F16] = fst_loop_floats_of_f16, [FST_OF_BF16] = fst_loop_floats_of_bf16,
    [FST_OF_F64] = fst_loop_floats_of_f64,
};

LOOP fst_loop_normalize(size_t n, float *restrict x, float scale, float mean, float std)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (x[i] * scale - mean) / std;
}

LOOP fst_loop_normalize_columns(size_t n, float *restrict x, float scale,
                                const float *restrict mean, const float *restrict std)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (x[i] * scale - mean[i]) / std[i];
}

/* Items of a row from `first`. */
static void normalize(const fst_float_form *form, float *x, size_t first, size_t count)
{
    if (form->run == 1) {
        fst_loop_normalize_columns(count, x, form->scale, form->mean + first, form->std + first);
        return;
    }
    for (size_t done = 0; done < count;) {
        const size_t part = (first + done) / form->run;
        const size_t run = (part + 1) * form->run - (first + done), left = count - done;
        const size_t n = run < left ? run : left;
        fst_loop_normalize(n, x + done, form->scale, form->mean[part], form->std[part]);
        done += n;
    }
}

#define STORE(suffix)                                                                         \
    LOOP fst_loop_floats_to_##suffix(size_t n, char *restrict to, const float *restrict from) \
    {                                                                                         \
        for (size_t i = 0; i < n; i++) {                                                      \
            const uint16_t item = fst_f32_to_##suffix(from[i]);                               \
            memcpy(to + i * sizeof item, &item, sizeof item);                                 \
        }                                                                                     \
    }
STORE(bf16)
STORE(f16)
#undef STORE

void FST_OF_ISA(fst_floats)(const fst_float_form *form, char *restrict to,
                            const char *restrict from, size_t first, size_t count)
{
    float scratch[STRIP] __attribute__((aligned(64)));
    const size_t from_size = fst_number_size(form->from), to_size = fst_dtype_size(form->to);
    for (size_t done = 0; done < count; done += STRIP) {
        const size_t n = count - done < STRIP ? count - done : STRIP;
        char *const out = to + done * to_size;
        float *const x = form->to == FST_F32 ? (float *)(void *)out : scratch;
        if (loads[form->from])
            loads[form->from](n, x, from + done * from_size);
        else
            memcpy(x, from + done * from_size, n * sizeof *x);
        if (form->mean)
            normalize(form, x, first + done, n);
        if (form->to == FST_BF16)
            fst_loop_floats_to_bf16(n, out, x);
        else if (form->to == FST_F16)
            fst_loop_floats_to_f16(n, out, x);
    }
}
