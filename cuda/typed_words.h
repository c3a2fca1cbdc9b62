/* typed_words.h - words of 16 bytes of one type, known when the kernels are compiled: DTYPE, of
 * which a word holds ITEMS, computed in REAL. Included once for each type; with FST_WORDS_ONLY for
 * one that is not reduced. */

FST_DEVICE void FST_K(widen_word)(const fst_words *word, REAL *x)
{
    FST_UNROLL
    for (unsigned q = 0; q < ITEMS; q++)
#if ITEMS == 2
        memcpy(&x[q], &word->word[q * 2], sizeof x[q]);
#elif ITEMS == 4
        x[q] = (REAL)fst_f32_of_bits(word->word[q]);
#else
        x[q] = FST_WIDEN_16((uint16_t)(word->word[q / 2] >> q % 2 * 16));
#endif
}

#if ITEMS != 2
FST_DEVICE REAL FST_K(widen_item)(uint32_t item)
{
#if ITEMS == 4
    return (REAL)fst_f32_of_bits(item);
#else
    return FST_WIDEN_16((uint16_t)item);
#endif
}
#endif

/* Rounds numbers that are not NaN. */
FST_DEVICE fst_words FST_K(narrow_numbers)(const REAL *x)
{
    fst_words word;
    FST_UNROLL
    for (unsigned q = 0; q < 4; q++)
#if ITEMS == 2
        memcpy(&word.word[q], (const char *)x + q * sizeof word.word[q], sizeof word.word[q]);
#elif ITEMS == 4
        word.word[q] = fst_bits_of_f32((float)x[q]);
#else
        word.word[q] = FST_NARROW_TWO(x[2 * q], x[2 * q + 1]);
#endif
    return word;
}

/* Rounds any numbers. */
FST_DEVICE fst_words FST_K(narrow_word)(const REAL *x)
{
    fst_words word = FST_K(narrow_numbers)(x);
#if defined(FST_NAN_16) /* what a NaN becomes, where narrow_numbers makes it another one */
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        if (x[q] != x[q])
            word.word[q / 2] = (word.word[q / 2] & 0xFFFF0000u >> q % 2 * 16) |
                               (uint32_t)FST_NAN_16(x[q]) << q % 2 * 16;
#endif
    return word;
}

#ifndef FST_WORDS_ONLY
/* Adds the square of a product to a lane. The square of a float is exact in double, so a fused
 * multiply-add rounds once, as an addition does. Where the products replace the elements, the lane
 * must be right even if it is not finite. */
FST_DEVICE double FST_K(join_square)(double lane, REAL product, const int write)
{
#if ITEMS == 2
    (void)write;
    return lane + product * product;
#else
    return write ? fma((double)product, (double)product, lane) : fst_join_square(lane, product);
#endif
}

/* The sum of the squares in a lane that join_square has filled. */
FST_DEVICE double FST_K(lane_of)(double lane, const int write)
{
    return ITEMS == 2 || write ? lane : lane * (1.0 / FST_LANE_SCALE);
}

/* Adds the squares of the elements of half of FST_AT_ONCE words to the lanes. A warp's words lie
 * one after another: one of each thread, then the next of each. With `write` the products with the
 * factor replace the elements. */
FST_DEVICE void FST_K(square_words)(const fst_words *words, fst_words *from, REAL factor,
                                    const int write, double *lanes, int *seen)
{
    FST_UNROLL
    for (unsigned n = 0; n < FST_AT_ONCE / 2; n += 8 / ITEMS) {
        REAL x[8];
        FST_UNROLL
        for (unsigned k = 0; k < 8 / ITEMS; k++)
            FST_K(widen_word)(&words[n + k], &x[k * ITEMS]);
        FST_UNROLL
        for (unsigned q = 0; q < 8; q++) {
            if (write)
                *seen = x[q] - x[q] != (REAL)0 ? 1 : *seen;
            x[q] = x[q] * factor;
            lanes[q] = FST_K(join_square)(lanes[q], x[q], write);
        }
        FST_UNROLL
        for (unsigned k = 0; k < 8 / ITEMS; k++)
            if (write)
                from[(n + k) * FST_WARP] = FST_K(narrow_word)(&x[k * ITEMS]);
    }
}

/* Squares elements that fill the words that every thread of a warp loads at once, as often as there
 * are so many; returns their number. Where a lane is then not finite, and without `write`, the
 * lanes are of no use: see fst_join_square. */
FST_DEVICE uint32_t FST_K(square_known)(const fst_share *share, const fst_device_operand *op,
                                        REAL factor, const int write, double *lanes, int *seen)
{
    /* Registers suffice for half as many loads at once where the products are stored. */
    const uint32_t stride = FST_WARP * ITEMS * (write ? FST_AT_ONCE / 2 : FST_AT_ONCE);
    const uint64_t address = op->data + (uint64_t)share->begin * (16 / ITEMS);
    fst_words *from = (fst_words *)fst_global(address) + share->thread;
    uint32_t base = 0;
    for (; base + stride <= share->whole; base += stride) { /* nvcc 13.0 hangs if `from` moves */
        fst_words *first = &from[base / ITEMS], *second = first + FST_WARP * FST_AT_ONCE / 2;
        fst_words words[FST_AT_ONCE];
        FST_UNROLL
        for (unsigned n = 0; n < FST_AT_ONCE / 2; n++)
            words[n] = first[n * FST_WARP];
        if (!write) {
            FST_UNROLL
            for (unsigned n = 0; n < FST_AT_ONCE / 2; n++)
                words[FST_AT_ONCE / 2 + n] = second[n * FST_WARP];
        }
        __syncwarp(); /* nvcc moves no load past it, so that all are issued before the first wait */
        FST_K(square_words)(words, first, factor, write, lanes, seen);
        if (!write)
            FST_K(square_words)(&words[FST_AT_ONCE / 2], second, factor, 0, lanes, seen);
    }
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        lanes[q] = FST_K(lane_of)(lanes[q], write);
    return base;
}

#if ITEMS == 8
#define ELEMENT uint16_t
#define WIDEN FST_WIDEN_16
#define NARROW FST_NARROW_16
#else
#define ELEMENT REAL
#define WIDEN
#define NARROW
#endif
/* As square_known, of an operand without a layout that is not aligned to 16 bytes: by elements, of
 * which a thread's lie FST_WARP apart. */
FST_DEVICE uint32_t FST_K(square_loose)(const fst_share *share, const fst_device_operand *op,
                                        REAL factor, const int write, double *lanes, int *seen)
{
    const uint32_t at_once = FST_AT_ONCE * (write ? 2 : ITEMS), stride = FST_WARP * at_once;
    ELEMENT *from = (ELEMENT *)fst_global(op->data) + share->begin + share->thread;
    uint32_t base = 0;
    for (; base + stride <= share->count; base += stride) {
        ELEMENT held[FST_AT_ONCE * ITEMS];
        FST_UNROLL
        for (unsigned k = 0; k < at_once; k++)
            held[k] = from[base + k * FST_WARP];
        __syncwarp(); /* as in square_known */
        FST_UNROLL
        for (unsigned k = 0; k < at_once; k++) {
            const REAL x = WIDEN(held[k]), product = x * factor;
            lanes[k % 8] = FST_K(join_square)(lanes[k % 8], product, write);
            if (write) {
                *seen = x - x != (REAL)0 ? 1 : *seen;
                from[base + k * FST_WARP] = NARROW(product);
            }
        }
    }
    FST_UNROLL
    for (unsigned q = 0; q < 8; q++)
        lanes[q] = FST_K(lane_of)(lanes[q], write);
    return base;
}

/* The thread's lane of a chunk of an operand without a layout: the squares of every FST_LANES-th
 * element, one by one, with several loads at once. `write`, and lanes that are not finite, are as
 * in square_known. */
FST_DEVICE double FST_K(square_lane)(const fst_share *share, const fst_device_operand *op,
                                     REAL factor, const int write, int *seen)
{
    ELEMENT *from = (ELEMENT *)fst_global(op->data) + share->begin;
    ELEMENT held[FST_LANE_AT_ONCE];
    const uint32_t at_once = write ? FST_LANE_AT_ONCE / 2 : FST_LANE_AT_ONCE; /* as above */
    double lane = 0.0;
    for (uint32_t first = share->thread; first < share->count; first += FST_LANES * at_once) {
        FST_UNROLL
        for (uint32_t k = 0; k < at_once; k++) {
            const uint32_t i = first + k * FST_LANES;
            /* Some element of this thread in any case: nvcc waits for a load under a condition. */
            held[k] = from[i < share->count ? i : first];
        }
        FST_UNROLL
        for (uint32_t k = 0; k < at_once; k++) {
            const uint32_t i = first + k * FST_LANES;
            const REAL x = WIDEN(held[k]), product = x * factor;
            if (i >= share->count)
                continue;
            lane = FST_K(join_square)(lane, product, write);
            if (write) {
                *seen = x - x != (REAL)0 ? 1 : *seen;
                from[i] = NARROW(product);
            }
        }
    }
    return FST_K(lane_of)(lane, write);
}
#undef ELEMENT
#undef WIDEN
#undef NARROW
#endif
