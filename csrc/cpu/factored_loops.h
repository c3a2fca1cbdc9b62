/* factored_loops.h - the functions of factored.h, included once for float and once for double.
 *
 * An element's second moment is q * c: q is the row's moment over the mean of the matrix's rows,
 * and c the column's. The update is g / sqrt(max(q * c, floor^2)). Strips are expanded to arrays
 * of q and c, so that one loop does for matrices of any size. */

enum { FST_T(NARROW) = 64 }; /* columns of matrices whose strips hold several rows */

/* What a new value and its weight mean to torch's lerp: mean + weight * (value - mean), or from the
 * other end where that is nearer. */
typedef struct {
    int from_mean;
    REAL factor;
} FST_T(lerp);

static FST_T(lerp) FST_T(lerp_of)(double weight)
{
    const REAL w = (REAL)weight;
    const int from_mean = w < (REAL)0.5;
    return (FST_T(lerp)){from_mean, from_mean ? w : w - (REAL)1};
}

static REAL FST_T(lerped)(REAL mean, REAL value, FST_T(lerp) lerp)
{
    return (lerp.from_mean ? mean : value) + lerp.factor * (value - mean);
}

__attribute__((noinline)) static void FST_T(fst_loop_lerp_squares)(size_t n, REAL *restrict mean,
                                                                   const REAL *restrict g,
                                                                   FST_T(lerp) lerp)
{
    for (size_t i = 0; i < n; i++)
        mean[i] = FST_T(lerped)(mean[i], g[i] * g[i], lerp);
}

__attribute__((noinline)) static void FST_T(fst_loop_lerp_sums)(size_t n, REAL *restrict mean,
                                                                const double *restrict sums,
                                                                double terms, FST_T(lerp) lerp)
{
    for (size_t i = 0; i < n; i++)
        mean[i] = FST_T(lerped)(mean[i], (REAL)(sums[i] / terms), lerp);
}

/* Squares, added to lanes. */
__attribute__((noinline)) static void FST_T(fst_loop_square_lanes)(size_t n, double *restrict lanes,
                                                                   const REAL *restrict x)
{
    for (size_t i = 0; i < n; i++)
        lanes[i] += (double)x[i] * (double)x[i];
}

/* Squares, added to the sums of the columns and to the lanes of the row's. */
__attribute__((noinline)) static void FST_T(fst_loop_add_squares)(size_t n, double *restrict lanes,
                                                                  double *restrict cols,
                                                                  const REAL *restrict g)
{
    for (size_t i = 0; i < n; i++) {
        const double x = (double)g[i], square = x * x;
        lanes[i] += square;
        cols[i] += square;
    }
}

/* q of matrices of one element, whose row is its own mean. */
__attribute__((noinline)) static void FST_T(fst_loop_own_mean)(size_t n, REAL *restrict q,
                                                               const REAL *restrict row, REAL floor)
{
    for (size_t i = 0; i < n; i++)
        q[i] = row[i] / (row[i] < floor ? floor : row[i]);
}

#define UPDATE(q, c, g, least) ((g) / FST_SQRT((q) * (c) < (least) ? (least) : (q) * (c)))

__attribute__((noinline)) static void FST_T(fst_loop_update_squares)(
    size_t n, double *restrict lanes, const REAL *restrict g, const REAL *restrict q,
    const REAL *restrict c, REAL least)
{
    for (size_t i = 0; i < n; i++) {
        const double u = (double)UPDATE(q[i], c[i], g[i], least);
        lanes[i] += u * u;
    }
}

__attribute__((noinline)) static void FST_T(fst_loop_factored)(size_t n, REAL *restrict p,
                                                               const REAL *restrict g,
                                                               const REAL *restrict q,
                                                               const REAL *restrict c, REAL least,
                                                               REAL decay, REAL size)
{
    for (size_t i = 0; i < n; i++)
        p[i] = p[i] * decay + size * UPDATE(q[i], c[i], g[i], least);
}
#undef UPDATE

/* A run of elements that a function works on: its strips, and the sum of the update's squares, or
 * none where the parameter is written. */
typedef struct {
    const fst_factored *f;
    double *lanes; /* NULL: write */
    REAL least, decay, size;
} FST_T(strips);

static FST_T(strips) FST_T(strips_of)(const fst_factored *f, double *lanes)
{
    return (FST_T(strips)){f, lanes, (REAL)(f->floor * f->floor), (REAL)f->decay, (REAL)f->size};
}

static void FST_T(strip)(const FST_T(strips) *s, int64_t at, size_t n, const REAL *q, const REAL *c)
{
    REAL grads[STRIP] ALIGNED, params[STRIP] ALIGNED;
    const REAL *g = FST_T(load)(&s->f->grad, grads, at, n);
    if (s->lanes) {
        FST_T(fst_loop_update_squares)(n, s->lanes, g, q, c, s->least);
        return;
    }
    REAL *p = FST_T(load)(&s->f->param, params, at, n);
    FST_T(fst_loop_factored)(n, p, g, q, c, s->least, s->decay, s->size);
    FST_T(store)(&s->f->param, p, at, n);
}

static double FST_T(squares)(const fst_operand *op, int64_t begin, int64_t rows, int64_t stride,
                             size_t cols)
{
    double lanes[FST_LANES] ALIGNED;
    REAL scratch[STRIP] ALIGNED;
    fill_lanes(lanes, cols, FST_NORM_SQUARES);
    for (int64_t r = 0; r < rows; r++)
        for (size_t done = 0; done < cols; done += STRIP) {
            const size_t n = cols - done < STRIP ? cols - done : STRIP;
            const REAL *x = FST_T(load)(op, scratch, begin + r * stride + (int64_t)done, n);
            FST_T(fst_loop_square_lanes)(n, lanes, x);
        }
    return fold_lanes(lanes, cols, FST_NORM_SQUARES);
}

/* The mean of a matrix's rows. */
static REAL FST_T(mean_of)(const fst_factored *f, const REAL *rows)
{
    double sum = 0.0;
    for (int64_t r = 0; r < f->rows; r++)
        sum += (double)rows[r];
    const REAL mean = (REAL)(sum / (double)f->rows), floor = (REAL)f->floor;
    return mean < floor ? floor : mean;
}

/* Reads a part of a state into its copy, or writes the copy back and rounds it as the state is. */
static void FST_T(read_state)(const fst_operand *op, REAL *copy, int64_t at, int64_t count)
{
    if (FST_T(in_place)(op))
        return;
    for (int64_t done = 0; done < count; done += STRIP)
        FST_T(load)(op, copy + at + done, at + done,
                    (size_t)(count - done < STRIP ? count - done : STRIP));
}

static void FST_T(write_state)(const fst_operand *op, REAL *copy, int64_t at, int64_t count)
{
    if (FST_T(in_place)(op))
        return;
    for (int64_t done = 0; done < count; done += STRIP)
        FST_T(store)(op, copy + at + done, at + done,
                     (size_t)(count - done < STRIP ? count - done : STRIP));
    FST_T(read_state)(op, copy, at, count);
}
