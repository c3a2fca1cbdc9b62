/* accumulate.h - adds one operand to another of any type, included once for float and once for
 * double. */

/* The product is rounded before it is added: with a factor of 1 these are torch's bits. */
__attribute__((noinline)) static void FST_T(fst_loop_accumulate)(size_t n, REAL *restrict sum,
                                                                 const REAL *restrict term,
                                                                 REAL factor)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += term[i] * factor;
}

__attribute__((noinline)) static void FST_T(fst_loop_product)(size_t n, REAL *restrict to,
                                                              const REAL *restrict term,
                                                              REAL factor)
{
    for (size_t i = 0; i < n; i++)
        to[i] = term[i] * factor;
}

/* op[0] += factor * op[1]; with `start`, op[0] = factor * op[1], and what was there is not read. */
static void FST_T(accumulate)(const fst_operand *op, int64_t begin, size_t count, double factor,
                              int start)
{
    REAL scratch[2][BLOCK] ALIGNED;
    for (size_t done = 0; done < count; done += BLOCK) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < BLOCK ? count - done : BLOCK;
        FST_T(prefetch)(&op[0], at, reach(count, done));
        FST_T(prefetch)(&op[1], at, reach(count, done));
        const REAL *term = FST_T(load)(&op[1], scratch[1], at, n);
        if (start) {
            REAL *to = FST_T(in_place)(&op[0]) ? (REAL *)op[0].data + at : scratch[0];
            FST_T(fst_loop_product)(n, to, term, (REAL)factor);
            FST_T(store)(&op[0], to, at, n);
        } else {
            REAL *sum = FST_T(load)(&op[0], scratch[0], at, n);
            FST_T(fst_loop_accumulate)(n, sum, term, (REAL)factor);
            FST_T(store)(&op[0], sum, at, n);
        }
    }
}
