/* accumulate.h - adds one or two operands to another of any type, included once for float and once
 * for double. */

/* The product is rounded before it is added: with a factor of 1 these are torch's bits. */
__attribute__((noinline)) static void FST_T(fst_loop_accumulate)(size_t n, REAL *restrict sum,
                                                                 const REAL *restrict term,
                                                                 REAL factor)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += term[i] * factor;
}

/* The same with two terms at once, and the same bits as one term after the other. */
__attribute__((noinline)) static void FST_T(fst_loop_accumulate_two)(size_t n, REAL *restrict sum,
                                                                     const REAL *restrict term,
                                                                     const REAL *restrict more,
                                                                     REAL factor)
{
    for (size_t i = 0; i < n; i++)
        sum[i] = sum[i] + term[i] * factor + more[i] * factor;
}

__attribute__((noinline)) static void FST_T(fst_loop_product)(size_t n, REAL *restrict to,
                                                              const REAL *restrict term,
                                                              REAL factor)
{
    for (size_t i = 0; i < n; i++)
        to[i] = term[i] * factor;
}

/* to = factor * term, plus factor * more unless that is NULL. `to` is not read. `streamed`: past
 * the caches where possible. */
static void FST_T(start)(const fst_operand *to, const REAL *term, const REAL *more, int64_t at,
                         size_t n, REAL factor, int streamed)
{
    REAL scratch[STRIP] ALIGNED;
    REAL *place = FST_T(in_place)(to) ? (REAL *)to->data + at : scratch;
    const int past = streamed && place != scratch && (uintptr_t)place % 64 == 0;
    REAL *product = past ? scratch : place;
    FST_T(fst_loop_product)(n, product, term, factor);
    if (more)
        FST_T(fst_loop_accumulate)(n, product, more, factor);
    if (past)
        fst_stream_copy((char *)place, (const char *)product, n * sizeof *product);
    else
        FST_T(store)(to, product, at, n);
}

/* op[0] += factor * op[1], and then += factor * op[2] if there are two terms. `how` may start
 * the sum instead. */
static void FST_T(accumulate)(const fst_operand *op, unsigned terms, int64_t begin, size_t count,
                              double factor, fst_sum_kind how)
{
    REAL scratch[3][STRIP] ALIGNED;
    for (size_t done = 0; done < count; done += STRIP) {
        const int64_t at = begin + (int64_t)done;
        const size_t n = count - done < STRIP ? count - done : STRIP;
        prefetch(&op[1], at, reach(count, done));
        if (terms > 1)
            prefetch(&op[2], at, reach(count, done));
        const REAL *term = FST_T(load)(&op[1], scratch[1], at, n);
        const REAL *more = terms > 1 ? FST_T(load)(&op[2], scratch[2], at, n) : NULL;
        if (how != FST_SUM_ADD) {
            FST_T(start)(&op[0], term, more, at, n, (REAL)factor, how == FST_SUM_STREAM);
            continue;
        }
        prefetch(&op[0], at, reach(count, done));
        REAL *sum = FST_T(load)(&op[0], scratch[0], at, n);
        if (more)
            FST_T(fst_loop_accumulate_two)(n, sum, term, more, (REAL)factor);
        else
            FST_T(fst_loop_accumulate)(n, sum, term, (REAL)factor);
        FST_T(store)(&op[0], sum, at, n);
    }
    if (how == FST_SUM_STREAM)
        fst_stream_end();
}
