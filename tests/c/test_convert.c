/* bf16 and fp16: every half, and floats around every place where rounding changes, against exact
 * arithmetic in double; by the functions and by the loops of every level; in flush-to-zero mode. */
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "common.h"
#include "core/rule_args.h"

typedef struct {
    fst_dtype dtype;
    int mantissa, smallest, largest; /* bits of the fraction; exponents of normal numbers */
    uint16_t infinity, nan;
    float (*widen)(uint16_t half);
    uint16_t (*narrow)(float value);
} format;

static float widen_bf16(uint16_t half)
{
    return fst_bf16_to_f32(half);
}

static float widen_f16(uint16_t half)
{
    return fst_f16_to_f32(half);
}

static uint16_t narrow_bf16(float value)
{
    return fst_f32_to_bf16(value);
}

static uint16_t narrow_f16(float value)
{
    return fst_f32_to_f16(value);
}

static const format formats[] = {
    {FST_BF16, 7, -126, 127, 0x7F80, 0x7FC0, widen_bf16, narrow_bf16},
    {FST_F16, 10, -14, 15, 0x7C00, 0x7E00, widen_f16, narrow_f16},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

/* The value of a half, from its fields. */
static double decoded(const format *f, uint16_t half)
{
    const int exponent = (half & 0x7FFF) >> f->mantissa;
    const int fraction = half & ((1 << f->mantissa) - 1);
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if ((half & 0x7FFF) >= f->infinity)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, f->smallest - f->mantissa);
    return sign * ldexp(fraction + (1 << f->mantissa), exponent - 1 + f->smallest - f->mantissa);
}

/* The half next to a finite or infinite value; of two equally near ones the even one. The place of
 * the last digit is a power of two, so the quotient, its floor and the rest are exact. */
static uint16_t encoded(const format *f, double value)
{
    int exponent;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    if (isinf(value))
        return (uint16_t)(sign | f->infinity);
    frexp(size, &exponent); /* size = fraction in [1/2, 1) * 2^exponent */
    if (size == 0.0 || exponent - 1 < f->smallest)
        exponent = f->smallest + 1;
    const double quotient = ldexp(size, f->mantissa + 1 - exponent);
    const double whole = floor(quotient), rest = quotient - whole;
    const int up = rest > 0.5 || (rest == 0.5 && fmod(whole, 2.0) == 1.0);
    const int steps = (int)whole + up;
    /* consecutive halves are consecutive numbers, also across powers of two */
    const int half = ((exponent - 1 - f->smallest) << f->mantissa) + steps;
    return (uint16_t)(sign | (half > f->infinity ? f->infinity : half));
}

/* Counted as one check per format: a message for each of millions would help nobody. */
static int narrows_right(const format *f, uint32_t bits)
{
    const float value = fst_f32_of_bits(bits);
    const uint16_t got = f->narrow(value);
    const uint16_t want = isnan(value) ? f->nan : encoded(f, (double)value);
    if (got == want || (isnan(value) && f->dtype == FST_F16 && (got & 0x7FFF) == f->nan))
        return 1;
    fprintf(stderr, "%s of 0x%08x: got 0x%04x, expected 0x%04x\n", dtype_names[f->dtype], bits, got,
            want);
    return 0;
}

static void every_half_survives(const format *f)
{
    int wrong = 0;
    for (uint32_t half = 0; half < 0x10000; half++) {
        const float wide = f->widen((uint16_t)half);
        const double want = decoded(f, (uint16_t)half);
        if (isnan(want)) {
            wrong += !isnan(wide) || (f->narrow(wide) & 0x7FFF) != f->nan;
            continue;
        }
        wrong += fst_bits_of_f32(wide) != fst_bits_of_f32((float)want);
        wrong += f->narrow(wide) != half;
    }
    CHECK_INT(wrong, 0);
}

/* The bits of floats around each half and around each middle between two of them. */
static uint32_t around(const format *f, uint32_t half, int middle, int distance)
{
    const double low = decoded(f, (uint16_t)half);
    const uint32_t next = half + (uint32_t)middle;
    const double high = (next & 0x7FFF) == f->infinity ? copysign(ldexp(1.0, f->largest + 1), low)
                                                       : decoded(f, (uint16_t)next);
    return fst_bits_of_f32((float)((low + high) / 2.0)) + (uint32_t)distance;
}

static void boundaries_round_to_even(const format *f)
{
    int right = 1;
    for (uint32_t half = 0; half < 0x10000; half++)
        for (int distance = -3; distance <= 3 && (half & 0x7FFF) < f->infinity; distance++)
            right = narrows_right(f, around(f, half, 0, distance)) &&
                    narrows_right(f, around(f, half, 1, distance)) && right;
    CHECK(right);
}

static void floats_round_to_nearest(const format *f)
{
    static const uint32_t limits[] = {0,          1,          0x007FFFFF, 0x00800000, 0x7F7FFFFF,
                                      0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF};
    int right = 1;
    for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 1021)
        right = narrows_right(f, (uint32_t)bits) && right;
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        right = narrows_right(f, limits[i]) && narrows_right(f, limits[i] | 0x80000000u) && right;
    CHECK(right);
}

/* Through the loops: plain descent at rate 0 leaves the master as it is, and rounds it to the
 * parameter. Where it were not the parameter that is there, the master would become that. */
static void loops_narrow_alike(const fst_cpu_kernels *kernels)
{
    enum { DISTANCES = 5, COUNT = FORMATS * 0x10000 * 2 * DISTANCES };
    const double hyper[FST_MAX_HYPER] = {0.0};
    fst_update_args args = {.clip_coefficient = 1.0, .sign = 1.0, .rule = FST_RULE_sgd};
    array *whole = array_new(FST_F32, FLAT, COUNT), *grad = array_new(FST_F32, FLAT, COUNT);
    array *before;
    array *narrow[FORMATS];
    fst_operand op[FST_OP_COUNT] = {{.data = NULL}};
    int64_t at = 0;
    int wrong = 0;
    fst_rule_fill_args(&args, hyper, 1.0);
    for (size_t k = 0; k < FORMATS; k++) {
        narrow[k] = array_new(formats[k].dtype, FLAT, COUNT);
        for (uint32_t half = 0; half < 0x10000; half++)
            for (int middle = 0; middle < 2; middle++)
                for (int d = 0; d < DISTANCES; d++) {
                    const uint32_t bits = around(&formats[k], half, middle, d - 2);
                    memcpy(element_at(&whole->op, at++), &bits, sizeof bits);
                }
    }
    CHECK_INT(at, COUNT);
    before = array_clone(whole);
    op[FST_OP_MASTER] = whole->op;
    op[FST_OP_GRAD] = grad->op;
    for (size_t k = 0; k < FORMATS; k++) {
        op[FST_OP_PARAM] = narrow[k]->op;
        for (at = 0; at < COUNT; at++) {
            const uint16_t want = formats[k].narrow((float)get(&before->op, at));
            memcpy(element_at(&narrow[k]->op, at), &want, sizeof want);
        }
        kernels->update(op, 0, COUNT, &args, 1.0, 0);
        for (at = 0; at < COUNT; at++) {
            const float value = (float)get(&before->op, at);
            uint16_t got, want = formats[k].narrow(value);
            memcpy(&got, element_at(&narrow[k]->op, at), sizeof got);
            wrong += isnan(value) ? (got & 0x7FFF) != formats[k].nan
                                  : got != want || get(&whole->op, at) != value;
        }
    }
    array_free(before);
    CHECK_INT(wrong, 0);
    for (size_t k = 0; k < FORMATS; k++)
        array_free(narrow[k]);
    array_free(whole);
    array_free(grad);
}

/* Every float whose lower half is one of some, in halves and back, by the functions and by plain
 * descent at rate 0. Zeros, infinities and NaNs beside a remainder that none of them has are
 * themselves, and any other written half is what its number rounds to. */
static void halves_lose_nothing(const fst_cpu_kernels *kernels)
{
    static const uint16_t lower[] = {0,      1,      2,      0x00FF, 0x5A5A, 0x7FFE, 0x7FFF,
                                     0x8000, 0x8001, 0x8002, 0xA5A5, 0xFF00, 0xFFFE, 0xFFFF};
    enum { LOWER = sizeof lower / sizeof lower[0], COUNT = 0x10000 };
    const double hyper[FST_MAX_HYPER] = {0.0};
    fst_update_args args = {.clip_coefficient = 1.0, .sign = 1.0, .rule = FST_RULE_sgd};
    uint16_t *upper = must_alloc(COUNT * sizeof *upper), *rest = must_alloc(COUNT * sizeof *rest);
    float *grad = must_alloc(COUNT * sizeof *grad);
    const fst_operand op[FST_OP_COUNT] = {[FST_OP_PARAM] = {upper, NULL, FST_BF16},
                                          [FST_OP_GRAD] = {grad, NULL, FST_F32},
                                          [FST_OP_MASTER] = {rest, NULL, (fst_dtype)FST_I16}};
    int wrong = 0;
    fst_rule_fill_args(&args, hyper, 1.0);
    memset(grad, 0, COUNT * sizeof *grad);
    for (size_t k = 0; k < LOWER; k++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            const float value = fst_f32_of_bits(i << 16 | lower[k]);
            upper[i] = fst_f32_to_upper(value);
            rest[i] = fst_f32_to_remainder(value);
            const float back = fst_joined_f32(upper[i], rest[i]);
            wrong += isnan(value) ? !isnan(back) || upper[i] != 0x7FC0 || rest[i]
                                  : fst_bits_of_f32(back) != fst_bits_of_f32(value);
            /* as torch rounds, but for ties */
            wrong += !isnan(value) && lower[k] != 0x8000 && upper[i] != fst_f32_to_bf16(value);
        }
        kernels->update(op, 0, COUNT, &args, 1.0, 0);
        for (uint32_t i = 0; i < COUNT; i++) {
            const float value = fst_f32_of_bits(i << 16 | lower[k]);
            const float back = fst_joined_f32(upper[i], rest[i]);
            wrong += isnan(value) ? !isnan(back) : back != value;
            const float written = fst_joined_f32((uint16_t)i, lower[k]);
            wrong += isnan(fst_bf16_to_f32((uint16_t)i)) ? !isnan(written)
                                                         : fst_f32_to_upper(written) != i;
        }
    }
    CHECK_INT(wrong, 0);
    free(upper);
    free(rest);
    free(grad);
}

/* Sixteen copies of a half fill whole registers: their sum is 16 |x|, exactly. */
static void loops_widen_alike(const fst_cpu_kernels *kernels, const format *f)
{
    uint16_t copies[16];
    int wrong = 0;
    for (uint32_t half = 0; half < f->infinity; half++) {
        const fst_operand op = {.data = copies, .dtype = f->dtype};
        for (size_t i = 0; i < 16; i++)
            copies[i] = (uint16_t)(half | (i % 2 ? 0x8000 : 0));
        wrong += kernels->reduce(&op, 0, 16, FST_NORM_ABS, 1.0, 1.0) !=
                 16.0 * fabs(decoded(f, (uint16_t)half));
    }
    CHECK_INT(wrong, 0);
}

/* fp16's subnormals are normal floats: no mode of the thread may lose them. bf16's are subnormal
 * floats, which are only moved, not computed with, on the way. */
static void flush_to_zero_changes_nothing(const fst_cpu_kernels *const *levels, size_t count)
{
#if defined(__x86_64__)
    enum { FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040 };
    volatile float tiny = 0x1p-140f;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_RESULTS | FLUSH_OPERANDS);
    CHECK(tiny * 1.0f == 0.0f);
    int wrong = 0;
    for (size_t k = 0; k < FORMATS; k++)
        for (uint32_t half = 0; half < 0x10000; half++) {
            const format *f = &formats[k];
            const uint32_t bits = fst_bits_of_f32(f->widen((uint16_t)half));
            _mm_setcsr(before);
            const double want = decoded(f, (uint16_t)half);
            wrong += isnan(want) ? (bits & 0x7FFFFFFF) <= 0x7F800000
                                 : bits != fst_bits_of_f32((float)want);
            _mm_setcsr(before | FLUSH_RESULTS | FLUSH_OPERANDS);
            if (!isnan(want))
                wrong += f->narrow(fst_f32_of_bits(bits)) != half;
        }
    CHECK_INT(wrong, 0);
    for (size_t i = 0; i < count; i++)
        loops_widen_alike(levels[i], &formats[1]);
    _mm_setcsr(before);
#else
    (void)levels, (void)count;
    fprintf(stderr, "flush-to-zero mode: known on x86-64 only, left out\n");
#endif
}

int main(void)
{
    const fst_cpu_kernels *levels[MAX_LEVELS];
    const size_t count = supported_levels(levels);
    for (size_t k = 0; k < FORMATS; k++) {
        every_half_survives(&formats[k]);
        boundaries_round_to_even(&formats[k]);
        floats_round_to_nearest(&formats[k]);
        for (size_t i = 0; i < count; i++)
            loops_widen_alike(levels[i], &formats[k]);
    }
    for (size_t i = 0; i < count; i++) {
        loops_narrow_alike(levels[i]);
        halves_lose_nothing(levels[i]);
    }
    flush_to_zero_changes_nothing(levels, count);
    return check_report();
}
