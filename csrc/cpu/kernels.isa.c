/* The CPU's kernels, compiled once per instruction set (-DFST_ISA=avx2 -mavx2 and so on). The
 * compiler vectorises; only non-temporal stores use intrinsics. A test checks that every loop
 * named fst_loop_* has packed instructions. */
#include "base/stream.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/strided.h"

#define ALIGNED __attribute__((aligned(64)))
enum {
    STRIP = FST_LANES, /* a strip: elements that are worked on at a time; scratch strips stay in the
                          first-level cache, and a reduction takes one element per lane */
    PREFETCH = 2048,   /* elements ahead */
};

/* How many elements on a prefetch may reach. A whole chunk is usually followed by the next of
 * its tensor. */
static size_t reach(size_t count, size_t done)
{
    return count == FST_CHUNK ? SIZE_MAX : count - done;
}

/* Prefetches the strip after next. The hardware's prefetchers stop at the end of a page, and up
 * to seven streams run here. */
static void prefetch(const fst_operand *op, int64_t at, size_t left)
{
    if (!op->data || op->layout || left < PREFETCH + STRIP)
        return;
    const size_t size = fst_dtype_size(op->dtype);
    const char *from = (const char *)op->data + ((size_t)at + PREFETCH) * size;
    for (size_t line = 0; line < STRIP * size; line += 64)
        __builtin_prefetch(from + line);
}

/* The 16-bit elements as they are: in place, or in `raw`, to which they are copied if asked. */
static uint16_t *halves_of(const fst_operand *op, char *raw, int64_t at, size_t n, int copied)
{
    if (!op->layout)
        return (uint16_t *)op->data + at;
    if (copied)
        fst_strided_copy(op, raw, at, n, 0);
    return (uint16_t *)(void *)raw;
}

/* Noise for a strip, and for what shares its words. State k's begins at k * NOISE_ROOM. */
enum { NOISE_ROOM = STRIP + 16 };
typedef uint16_t noise_room[FST_MAX_STATES * NOISE_ROOM] ALIGNED;
typedef uint32_t __attribute__((may_alias)) noise_word;

__attribute__((noinline)) static void fst_loop_noise(size_t eights, noise_word *restrict to,
                                                     uint32_t lower, uint32_t upper,
                                                     const fst_noise *noise)
{
    const fst_noise key = *noise;
    for (size_t i = 0; i < eights; i++, lower++) {
        uint32_t words[4];
        fst_noise_of_eight(&key, lower, upper, words);
        for (size_t k = 0; k < 4; k++)
            to[4 * i + k] = words[k];
    }
}

/* The noise for a strip. */
static const uint16_t *noise_for(uint16_t *room, const fst_update_args *args, unsigned states,
                                 int64_t begin, size_t n)
{
    const uint64_t at = (uint64_t)begin, first = at / 8, last = (at + n - 1) / 8;
    for (uint32_t k = 0; k < states; k++)
        fst_loop_noise((size_t)(last - first) + 1, (noise_word *)&room[k * NOISE_ROOM],
                       (uint32_t)first, fst_noise_place(k, first), &args->noise);
    return room + at % 8;
}

#include "cpu/code_strips.h"

#define REAL float
#define OTHER double
#define FST_T(name) name##_f32
#define NARROW_OPERANDS
#include "cpu/kinds.h"
#include "cpu/strip.h"
#include "cpu/value.h"
#include "cpu/update.h"
#undef NARROW_OPERANDS
#include "cpu/reduce.h"
#include "cpu/accumulate.h"
#undef REAL
#undef OTHER
#undef FST_T

#define REAL double
#define OTHER float
#define FST_T(name) name##_f64
#include "cpu/strip.h"
#include "cpu/value.h"
#include "cpu/update.h"
#include "cpu/reduce.h"
#include "cpu/accumulate.h"
#undef REAL
#undef OTHER
#undef FST_T

static void update(const fst_operand *op, int64_t begin, size_t count, const fst_update_args *args,
                   double inv_scale, int write_grad)
{
    (args->wide ? update_f64 : update_f32)(op, begin, count, args, inv_scale, write_grad);
}

static double reduce(const fst_operand *op, int64_t begin, size_t count, fst_norm_kind norm,
                     double power, double factor)
{
    return (op->dtype == FST_F64 ? reduce_f64 : reduce_f32)(op, begin, count, norm, power, factor);
}

static double combine(const double *values, size_t count, fst_norm_kind norm)
{
    const int additive = norm != FST_NORM_MAX && norm != FST_NORM_MIN;
    double lanes[FST_LANES] ALIGNED;
    fill_lanes(lanes, count, norm);
    for (size_t done = 0; done < count; done += FST_LANES) {
        const size_t row = count - done < FST_LANES ? count - done : FST_LANES;
        for (size_t i = 0; i < row; i++)
            lanes[i] = additive               ? lanes[i] + values[done + i]
                       : norm == FST_NORM_MAX ? fst_tree_max(lanes[i], values[done + i])
                                              : fst_tree_min(lanes[i], values[done + i]);
    }
    return fold_lanes(lanes, count, norm);
}

static int nonfinite(const fst_operand *op, int64_t begin, size_t count)
{
    return (op->dtype == FST_F64 ? nonfinite_f64 : nonfinite_f32)(op, begin, count);
}

static double unscale(const fst_operand *op, int64_t begin, size_t count, double factor, int *bad)
{
    return (op->dtype == FST_F64 ? unscale_f64 : unscale_f32)(op, begin, count, factor, bad);
}

static void scale(const fst_operand *op, int64_t begin, size_t count, double factor)
{
    (op->dtype == FST_F64 ? scale_f64 : scale_f32)(op, begin, count, factor);
}

static void clamp(const fst_operand *op, int64_t begin, size_t count, double limit)
{
    (op->dtype == FST_F64 ? clamp_f64 : clamp_f32)(op, begin, count, limit);
}

static void accumulate(const fst_operand *op, unsigned terms, int64_t begin, size_t count,
                       double factor, fst_sum_kind how)
{
    int wide = 0;
    for (unsigned k = 0; k <= terms; k++)
        wide |= op[k].dtype == FST_F64;
    (wide ? accumulate_f64 : accumulate_f32)(op, terms, begin, count, factor, how);
}

#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)

const fst_cpu_kernels FST_OF_ISA(fst_cpu_kernels) = {
    .name = NAME(FST_ISA),
    .update = update,
    .reduce = reduce,
    .combine = combine,
    .nonfinite = nonfinite,
    .unscale = unscale,
    .scale = scale,
    .clamp = clamp,
    .accumulate = accumulate,
    .factored = FST_OF_ISA(fst_factored_loops),
    .image = FST_OF_ISA(fst_image_rows),
    .split = FST_OF_ISA(fst_image_split),
    .widen = &FST_OF_ISA(fst_widen_loops),
    .loss = FST_OF_ISA(fst_loss_rows),
};
