/* reduce.h - reductions and in-place changes of one operand, included once for float and once for
 * double. The shape of the tree is that of rules/tree.h. */

/* Accumulates into lanes[i % FST_LANES] the `expression` of x, the element times the factor. */
#define REDUCE(name, expression)                                                  \
    __attribute__((noinline)) static void FST_T(fst_loop_##name)(                 \
        size_t n, double *restrict lanes, const REAL *restrict from, REAL factor) \
    {                                                                             \
        for (size_t i = 0; i < n; i++) {                                          \
            const double x = (double)(from[i] * factor), lane = lanes[i];         \
            lanes[i] = (expression);                                              \
        }                                                                         \
    }
REDUCE(squares, lane + x * x)
REDUCE(abs, lane + fabs(x))
REDUCE(max, fst_tree_max(lane, fabs(x)))
REDUCE(min, fst_tree_min(lane, fabs(x)))
REDUCE(nonzero, lane + (x != 0.0 ? 1.0 : 0.0))
#undef REDUCE

/* The squares of the products from = factor * from. */
__attribute__((noinline)) static void FST_T(fst_loop_unscale)(size_t n, double *restrict lanes,
                                                              REAL *restrict from, REAL factor)
{
    for (size_t i = 0; i < n; i++) {
        const REAL product = from[i] * factor;
        const double x = (double)product;
        from[i] = product;
        lanes[i] += x * x;
    }
}

/* No library has a vector pow() that gives the same bits everywhere: this one is a plain loop. */
static void FST_T(accumulate_power)(size_t n, double *lanes, const REAL *from, REAL factor,
                                    double power)
{
    for (size_t i = 0; i < n; i++)
        lanes[i] += pow(fabs((double)(from[i] * factor)), power);
}

static double FST_T(reduce)(const fst_operand *op, int64_t begin, size_t count, fst_norm_kind norm,
                            double power, double factor)
{
    double lanes[FST_LANES] ALIGNED;
    REAL scratch[STRIP] ALIGNED;
    fill_lanes(lanes, count, norm);
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        prefetch(op, at, reach(count, done));
        const REAL *x = FST_T(load)(op, scratch, at, n);
        switch (norm) {
        case FST_NORM_SQUARES:
            FST_T(fst_loop_squares)(n, lanes, x, (REAL)factor);
            break;
        case FST_NORM_ABS:
            FST_T(fst_loop_abs)(n, lanes, x, (REAL)factor);
            break;
        case FST_NORM_MAX:
            FST_T(fst_loop_max)(n, lanes, x, (REAL)factor);
            break;
        case FST_NORM_MIN:
            FST_T(fst_loop_min)(n, lanes, x, (REAL)factor);
            break;
        case FST_NORM_NONZERO:
            FST_T(fst_loop_nonzero)(n, lanes, x, (REAL)factor);
            break;
        case FST_NORM_POWER:
            FST_T(accumulate_power)(n, lanes, x, (REAL)factor, power);
            break;
        }
    }
    return fold_lanes(lanes, count, norm);
}

/* Whether any exponent is all ones: x - x is 0 for a finite x and NaN otherwise. */
__attribute__((noinline)) static REAL FST_T(fst_loop_nonfinite)(size_t n, REAL *restrict lanes,
                                                                const REAL *restrict x)
{
    REAL seen = 0;
    for (size_t i = 0; i < n; i++)
        lanes[i] = x[i] - x[i];
    for (size_t i = 0; i < n; i++)
        seen = lanes[i] != (REAL)0 ? (REAL)1 : seen;
    return seen;
}

static int FST_T(nonfinite)(const fst_operand *op, int64_t begin, size_t count)
{
    REAL scratch[STRIP] ALIGNED, lanes[STRIP] ALIGNED;
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        if (FST_T(fst_loop_nonfinite)(n, lanes, FST_T(load)(op, scratch, at, n)) != (REAL)0)
            return 1;
    }
    return 0;
}

/* Multiplies and measures. With a factor of at most 1 finite floats stay finite, and their sum
 * of squares is finite in double, so the sum tells whether all were finite. Otherwise the old
 * values are checked before they are overwritten. */
static double FST_T(unscale)(const fst_operand *op, int64_t begin, size_t count, double factor,
                             int *nonfinite)
{
    double lanes[FST_LANES] ALIGNED;
    REAL scratch[STRIP] ALIGNED, zeros[STRIP] ALIGNED;
    const int look = sizeof(REAL) > sizeof(float) || !(fabs(factor) <= 1.0);
    fill_lanes(lanes, count, FST_NORM_SQUARES);
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        prefetch(op, at, reach(count, done));
        REAL *x = FST_T(load)(op, scratch, at, n);
        if (look && FST_T(fst_loop_nonfinite)(n, zeros, x) != (REAL)0)
            *nonfinite = 1;
        FST_T(fst_loop_unscale)(n, lanes, x, (REAL)factor);
        FST_T(store)(op, x, at, n);
    }
    const double sum = fold_lanes(lanes, count, FST_NORM_SQUARES);
    if (!look && !isfinite(sum))
        *nonfinite = 1;
    return sum;
}

static void FST_T(scale)(const fst_operand *op, int64_t begin, size_t count, double factor)
{
    REAL scratch[STRIP] ALIGNED;
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        prefetch(op, at, reach(count, done));
        REAL *x = FST_T(load)(op, scratch, at, n);
        FST_T(fst_loop_scale)(n, x, (REAL)factor);
        FST_T(store)(op, x, at, n);
    }
}

__attribute__((noinline)) static void FST_T(fst_loop_clamp)(size_t n, REAL *restrict x, REAL limit)
{
    for (size_t i = 0; i < n; i++) {
        const REAL above = x[i] < -limit ? -limit : x[i];
        x[i] = above > limit ? limit : above;
    }
}

static void FST_T(clamp)(const fst_operand *op, int64_t begin, size_t count, double limit)
{
    REAL scratch[STRIP] ALIGNED;
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        REAL *x = FST_T(load)(op, scratch, at, n);
        FST_T(fst_loop_clamp)(n, x, (REAL)limit);
        FST_T(store)(op, x, at, n);
    }
}
