/* reduce_chunk.h - reduces a chunk by a warp over the lanes of rules/tree.h; included once for
 * float and once for double. Each thread has 8 of a row's 256 elements. */

enum {
    FST_T(TILE) = FST_WARP * FST_T(HELD),
    FST_T(TILES_OF_ROW) = 8 / FST_T(HELD),
};

/* Adds an element times the factor to a lane and returns the product. Sets `seen` for an element
 * that is infinite or NaN: x - x is 0 only for a finite x. */
FST_DEVICE REAL FST_T(take)(REAL x, REAL factor, const fst_reduction *what, double *lane, int *seen)
{
    const REAL product = x * factor;
    *seen = x - x != (REAL)0 ? 1 : *seen;
    *lane = fst_tree_join(*lane, fst_term((double)product, what), what->kind);
    return product;
}

FST_DEVICE void FST_T(reduce_words)(const fst_share *share, uint32_t base,
                                    const fst_device_operand *op, const fst_reduction *what,
                                    double *lanes, int *seen)
{
    const fst_place place = fst_place_of(share, op);
    fst_words words[FST_T(TILES_OF_ROW)][2];
    fst_tile tiles[FST_T(TILES_OF_ROW)];
    FST_UNROLL
    for (unsigned n = 0; n < FST_T(TILES_OF_ROW); n++) {
        tiles[n] = FST_T(tile_of)(share, base + n * FST_T(TILE));
        FST_T(fetch)(&tiles[n], &place, words[n]);
    }
    FST_UNROLL
    for (unsigned n = 0; n < FST_T(TILES_OF_ROW); n++) {
        double *own = lanes + HELD * n;
        REAL x[HELD];
        FST_T(widen)(words[n], op->dtype, x);
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            if (q < HELD / 2 ? tiles[n].has_first : tiles[n].has_second)
                x[q] = FST_T(take)(x[q], (REAL)what->factor, what, &own[q], seen);
        if (what->write)
            FST_T(store)(&tiles[n], &place, x, 1);
    }
}

/* Reduces the elements that are not loaded by words, in the lanes that they would have had. */
FST_DEVICE void FST_T(reduce_rest)(const fst_share *share, uint32_t first,
                                   const fst_device_operand *op, const fst_reduction *what,
                                   double *lanes, int *seen)
{
    for (uint32_t row = first; row < share->count; row += FST_LANES) {
        FST_UNROLL
        for (unsigned q = 0; q < 8; q++) {
            const uint32_t i = fst_share_element(share, row, q);
            if (i < share->whole || i >= share->count)
                continue;
            const REAL x =
                FST_T(take)(FST_T(get)(share, op, i), (REAL)what->factor, what, &lanes[q], seen);
            if (what->write)
                FST_T(set)(share, op, i, x);
        }
    }
}

/* Squares most of a chunk by a loop that knows their type; returns how many elements. It is
 * 0 where a lane is not finite, and nothing is written: the loops that follow then take every
 * element again, and look for infinities and NaN, which large finite elements may make too. */
FST_DEVICE uint32_t FST_T(square_most)(const fst_share *share, const fst_device_operand *op,
                                       const fst_reduction *what, double *lanes, int *seen)
{
    const REAL factor = (REAL)what->factor;
    const int loose = sizeof(REAL) == sizeof(float) && !share->whole;
    uint32_t base = 0;
    double sum = 0.0;
    switch (op->layout < 0 ? op->dtype : -1) {
#define TYPE(dtype, name, items)                                                         \
    case dtype:                                                                          \
        base = loose ? square_loose_##name(share, op, factor, what->write, lanes, seen)  \
                     : square_known_##name(share, op, factor, what->write, lanes, seen); \
        break;
        FST_T(FST_REDUCED)
#undef TYPE
    default:
        break;
    }
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        sum += lanes[q];
    if (what->write || sum - sum == 0.0)
        return base;
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        lanes[q] = 0.0;
    return 0;
}

/* The reduction of a chunk, in thread 0 of the warp. */
FST_DEVICE double FST_T(reduce)(const fst_device_tables *tables, const fst_device_operand *op,
                                const fst_device_chunk *chunk, const fst_reduction *what, int *seen)
{
    double lanes[8];
    uint32_t base = 0;
    fst_share share = fst_share_of(tables, chunk, threadIdx.x % FST_WARP, FST_WARP);
    FST_T(share_with)(&share, op, 0);
    fst_share_close(&share);
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        lanes[q] = fst_tree_neutral(what->kind);
    if (what->deep)
        base = FST_T(square_most)(&share, op, what, lanes, seen);
    for (; base < share.whole; base += FST_T(TILES_OF_ROW) *FST_T(TILE))
        FST_T(reduce_words)(&share, base, op, what, lanes, seen);
    if (share.whole)
        base = share.whole - share.whole % FST_LANES;
    if (share.whole < share.count)
        FST_T(reduce_rest)(&share, base, op, what, lanes, seen);
    return fst_fold_warp(lanes, share.shift, what->kind);
}

/* This thread's lane of a chunk's squares, of which each thread of a block has one. */
FST_DEVICE double FST_T(square_one)(const fst_device_tables *tables, const fst_device_operand *op,
                                    const fst_device_chunk *chunk, const fst_reduction *what,
                                    int *seen)
{
    const fst_share share = fst_share_of(tables, chunk, threadIdx.x, FST_LANES);
    const REAL factor = (REAL)what->factor;
    double lane = 0.0;
    switch (op->layout < 0 ? op->dtype : -1) {
#define TYPE(dtype, name, items)                                          \
    case dtype:                                                           \
        lane = square_lane_##name(&share, op, factor, what->write, seen); \
        break;
        FST_T(FST_REDUCED)
#undef TYPE
    default:
        break;
    }
    if (op->layout < 0 && (what->write || lane - lane == 0.0))
        return lane;
    lane = 0.0;
    for (uint32_t i = share.thread; i < share.count; i += FST_LANES) {
        const REAL x = FST_T(take)(FST_T(get)(&share, op, i), factor, what, &lane, seen);
        if (what->write)
            FST_T(set)(&share, op, i, x);
    }
    return lane;
}
