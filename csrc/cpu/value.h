/* value.h - load and store of what a rule updates: a parameter, its master, or the number of both
 * halves; included once for float and once for double. */

/* Between numbers and their halves (portable.h). */
__attribute__((noinline)) static void FST_T(fst_loop_join)(size_t n, REAL *restrict to,
                                                           const uint16_t *restrict upper,
                                                           const uint16_t *restrict remainder)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (REAL)fst_joined_f32(upper[i], remainder[i]);
}

__attribute__((noinline)) static void FST_T(fst_loop_split)(size_t n, uint16_t *restrict upper,
                                                            uint16_t *restrict remainder,
                                                            const REAL *restrict from)
{
    for (size_t i = 0; i < n; i++) {
        upper[i] = fst_f32_to_upper((float)from[i]);
        remainder[i] = fst_f32_to_remainder((float)from[i]);
    }
}

/* p = round(p) == now ? p : now */
__attribute__((noinline)) static void FST_T(fst_loop_follow)(size_t n, REAL *restrict p,
                                                             const REAL *restrict rounded,
                                                             const REAL *restrict now)
{
    for (size_t i = 0; i < n; i++)
        p[i] = rounded[i] == now[i] ? p[i] : now[i];
}

/* Takes over the elements of a parameter that are not the master's rounded. */
static void FST_T(follow)(const fst_operand *param, REAL *p, int64_t at, size_t n)
{
    char raw[STRIP * sizeof(double)] ALIGNED;
    REAL scratch[2][STRIP] ALIGNED;
    const fst_operand narrow = {.data = raw, .dtype = param->dtype};
    FST_T(store)(&narrow, p, 0, n);
    FST_T(fst_loop_follow)(n, p, FST_T(load)(&narrow, scratch[0], 0, n),
                           FST_T(load)(param, scratch[1], at, n));
}

/* What the rule begins with: the parameter, its master, or the number of both halves. */
static REAL *FST_T(load_value)(const fst_operand *op, REAL *scratch, int64_t at, size_t n)
{
    const fst_operand *param = &op[FST_OP_PARAM], *master = &op[FST_OP_MASTER];
    char raw[2][STRIP * sizeof(uint16_t)] ALIGNED;
    if (!master->data)
        return FST_T(load)(param, scratch, at, n);
    if (fst_is_remainder(master)) {
        FST_T(fst_loop_join)(n, scratch, halves_of(param, raw[0], at, n, 1),
                             halves_of(master, raw[1], at, n, 1));
        return scratch;
    }
    REAL *p = FST_T(load)(master, scratch, at, n);
    FST_T(follow)(param, p, at, n);
    return p;
}

static void FST_T(store_value)(const fst_operand *op, const REAL *p, int64_t at, size_t n)
{
    const fst_operand *param = &op[FST_OP_PARAM], *master = &op[FST_OP_MASTER];
    char raw[2][STRIP * sizeof(uint16_t)] ALIGNED;
    if (!fst_is_remainder(master)) {
        if (master->data)
            FST_T(store)(master, p, at, n);
        FST_T(store)(param, p, at, n);
        return;
    }
    FST_T(fst_loop_split)(n, halves_of(param, raw[0], at, n, 0),
                          halves_of(master, raw[1], at, n, 0), p);
    if (param->layout)
        fst_strided_copy(param, raw[0], at, n, 1);
    if (master->layout)
        fst_strided_copy(master, raw[1], at, n, 1);
}
