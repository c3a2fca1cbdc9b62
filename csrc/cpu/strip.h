/* strip.h - load and store between an operand of any dtype and layout and a strip of REAL;
 * included once for float and once for double. A contiguous operand of REAL is worked on in
 * place; any other goes through a scratch strip that stays in the first-level cache. M dtypes
 * and N loops therefore cost M + N pieces of code, not M * N. */

enum { FST_T(SELF) = sizeof(REAL) == 4 ? FST_F32 : FST_F64 };

#define WIDEN(suffix, type, expression)                                   \
    __attribute__((noinline)) static void FST_T(fst_loop_widen_##suffix)( \
        size_t n, REAL *restrict to, const type *restrict from)           \
    {                                                                     \
        for (size_t i = 0; i < n; i++)                                    \
            to[i] = (REAL)(expression);                                   \
    }
WIDEN(bf16, uint16_t, fst_bf16_to_f32(from[i]))
WIDEN(f16, uint16_t, fst_f16_to_f32(from[i]))
WIDEN(other, OTHER, from[i])
#undef WIDEN

#define NARROW(suffix, type, expression)                                   \
    __attribute__((noinline)) static void FST_T(fst_loop_narrow_##suffix)( \
        size_t n, type *restrict to, const REAL *restrict from)            \
    {                                                                      \
        for (size_t i = 0; i < n; i++)                                     \
            to[i] = (expression);                                          \
    }
NARROW(bf16, uint16_t, fst_f32_to_bf16((float)from[i]))
NARROW(f16, uint16_t, fst_f32_to_f16((float)from[i]))
NARROW(other, OTHER, (OTHER)from[i])
#undef NARROW

static int FST_T(in_place)(const fst_operand *op)
{
    return !op->layout && op->dtype == (fst_dtype)FST_T(SELF);
}

/* The elements as REAL: in place where possible, else in `scratch`. */
static REAL *FST_T(load)(const fst_operand *op, REAL *scratch, int64_t at, size_t n)
{
    char raw[STRIP * sizeof(double)] ALIGNED;
    const void *from = (const char *)op->data + at * (int64_t)fst_dtype_size(op->dtype);
    if (FST_T(in_place)(op))
        return (REAL *)from;
    if (op->layout) {
        fst_strided_copy(op, raw, at, n, 0);
        from = raw;
    }
    if (op->dtype == (fst_dtype)FST_T(SELF))
        memcpy(scratch, from, n * sizeof *scratch);
    else if (op->dtype == FST_BF16)
        FST_T(fst_loop_widen_bf16)(n, scratch, from);
    else if (op->dtype == FST_F16)
        FST_T(fst_loop_widen_f16)(n, scratch, from);
    else
        FST_T(fst_loop_widen_other)(n, scratch, from);
    return scratch;
}

/* Writes back what `load` gave, or any other strip, rounded to the operand's type. */
static void FST_T(store)(const fst_operand *op, const REAL *strip, int64_t at, size_t n)
{
    char raw[STRIP * sizeof(double)] ALIGNED;
    void *to = (char *)op->data + at * (int64_t)fst_dtype_size(op->dtype);
    if (to == strip && !op->layout)
        return;
    if (op->layout)
        to = raw;
    if (op->dtype == (fst_dtype)FST_T(SELF))
        memcpy(to, strip, n * sizeof *strip);
    else if (op->dtype == FST_BF16)
        FST_T(fst_loop_narrow_bf16)(n, to, strip);
    else if (op->dtype == FST_F16)
        FST_T(fst_loop_narrow_f16)(n, to, strip);
    else
        FST_T(fst_loop_narrow_other)(n, to, strip);
    if (op->layout)
        fst_strided_copy(op, raw, at, n, 1);
}
