/* kernels.h - the CPU's loops, compiled once per instruction set and chosen at run time. */
#pragma once

#include "base/image_sample.h"
#include "base/widen.h"
#include "base/work.h"
#include "cpu/factored.h"
#include "cpu/loss_rows.h"
#include "rules/rules.h"
#include "rules/tree.h"

/* How terms are added to a sum. */
typedef enum {
    FST_SUM_ADD,
    FST_SUM_START,  /* the sum is overwritten, not read */
    FST_SUM_STREAM, /* the same with non-temporal stores: for a large sum, which the caches would
                       not hold until it is read again */
} fst_sum_kind;

/* The loops over elements [begin, begin + count) of a span, whose first operand is `op`. Factors
 * are rounded to float for dtypes narrower than fp64. */
typedef struct {
    const char *name;
    /* One optimizer update of op[FST_OP_COUNT]; the gradient is multiplied by inv_scale and then by
     * args->clip_coefficient, and written back if asked. */
    void (*update)(const fst_operand *op, int64_t begin, size_t count, const fst_update_args *args,
                   double inv_scale, int write_grad);
    /* Reduces factor * x over the fixed tree of tree.h; in double, so squares do not overflow. */
    double (*reduce)(const fst_operand *op, int64_t begin, size_t count, fst_norm_kind norm,
                     double power, double factor);
    /* Reduces values that are themselves results of `reduce`. */
    double (*combine)(const double *values, size_t count, fst_norm_kind norm);
    /* Nonzero if any element is infinite or NaN. */
    int (*nonfinite)(const fst_operand *op, int64_t begin, size_t count);
    /* x = factor * x; returns the sum of squares of the products, as they are before they are
     * rounded to the operand's type. Sets *nonfinite to 1 if an old value was infinite or NaN. */
    double (*unscale)(const fst_operand *op, int64_t begin, size_t count, double factor,
                      int *nonfinite);
    void (*scale)(const fst_operand *op, int64_t begin, size_t count, double factor);
    /* x = min(max(x, -limit), limit); NaN stays. */
    void (*clamp)(const fst_operand *op, int64_t begin, size_t count, double limit);
    /* op[0] += factor * op[k] for each of the terms, op[1] and if there are two op[2], in this
     * order; in double if any operand is fp64, else in float; or as `how` says. */
    void (*accumulate)(const fst_operand *op, unsigned terms, int64_t begin, size_t count,
                       double factor, fst_sum_kind how);
    const fst_factored_loops *factored; /* Adafactor, computed in float and, behind it, in double */
    /* Rows [begin, end) of the output of a batch of images, counted over all samples; `scratch` has
     * the size that fst_image_scratch_of() finds. */
    void (*image)(const fst_image_batch *batch, int64_t begin, int64_t end, void *scratch);
    /* `count` pixels of three bytes each, to three planes one after another. */
    void (*split)(size_t count, uint8_t *planes, const uint8_t *pixels);
    const fst_widen_loops *widen;
    fst_loss_fn *loss;
} fst_cpu_kernels;

extern const fst_cpu_kernels fst_cpu_kernels_base;
#ifdef FST_HAVE_AVX2
extern const fst_cpu_kernels fst_cpu_kernels_avx2;
#endif
#ifdef FST_HAVE_AVX512
extern const fst_cpu_kernels fst_cpu_kernels_avx512;
#endif

/* Those in use, chosen once, at start-up. */
extern const fst_cpu_kernels *fst_cpu;

/* The best kernels for this CPU, or those called `name`; NULL if it has none of that name. */
const fst_cpu_kernels *fst_cpu_select(const char *name);

/* The i-th compiled level, best last, and whether this CPU runs it; NULL past the end. */
const char *fst_cpu_level(size_t index, int *supported);
