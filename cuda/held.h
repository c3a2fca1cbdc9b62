/* held.h - load and store between operands of any dtype and layout and the HELD elements that a
 * thread works on at a time; included once for float and once for double. Loading words and
 * converting them to numbers are separate, so that a thread issues all its loads before it waits
 * for the first. */

enum {
    FST_T(SELF) = sizeof(REAL) == 4 ? FST_F32 : FST_F64,
    FST_T(SIZE_LOG2) = sizeof(REAL) == 4 ? 2 : 3,
    FST_T(HELD_LOG2) = sizeof(REAL) == 4 ? 3 : 2,
    FST_T(HELD) = 1 << FST_T(HELD_LOG2), /* two words of 16 bytes */
};
#define HELD FST_T(HELD)

/* Takes an operand into account: a chunk is loaded by words only if all its operands can be; see
 * tile.h. 16-bit types in double cannot, as a thread holds too few elements. A `loose` operand need
 * not be aligned, as fetch_items loads it. */
FST_DEVICE void FST_T(share_with)(fst_share *share, const fst_device_operand *op, const int loose)
{
    const unsigned size = fst_size_log2(op->dtype);
    const uint64_t address = op->data + ((uint64_t)share->begin << size);
    if (!op->data)
        return;
    if (op->layout >= 0 || (!loose && (address & 15u)) || size > FST_T(SIZE_LOG2) ||
        size + FST_T(HELD_LOG2) < 4)
        share->whole = 0;
    else if (share->shift < 4u - size)
        share->shift = 4u - size;
}

FST_DEVICE fst_tile FST_T(tile_of)(const fst_share *share, uint32_t base)
{
    fst_tile tile;
    tile.first = fst_share_element(share, base, 0);
    tile.second = fst_share_element(share, base, HELD / 2);
    tile.has_first = tile.first < share->whole;
    tile.has_second = tile.second < share->whole;
    return tile;
}

/* A thread has two words of REAL in a tile, and one of a narrower type, which has half the size. */
FST_DEVICE fst_words *FST_T(first_of)(const fst_tile *tile, const fst_place *place)
{
    const unsigned size = FST_T(SIZE_LOG2) - (place->dtype != FST_T(SELF));
    return (fst_words *)fst_global(place->at + (tile->first << size));
}

FST_DEVICE fst_words *FST_T(second_of)(const fst_tile *tile, const fst_place *place)
{
    return (fst_words *)fst_global(place->at + (tile->second << FST_T(SIZE_LOG2)));
}

FST_DEVICE void FST_T(fetch)(const fst_tile *tile, const fst_place *place, fst_words *words)
{
    words[0] = words[1] = fst_words_zero();
    if (tile->has_first && place->dtype >= 0)
        words[0] = *FST_T(first_of)(tile, place);
    if (tile->has_second && place->dtype == FST_T(SELF))
        words[1] = *FST_T(second_of)(tile, place);
}

/* Whether an operand moves by elements: in float, one that is not aligned. */
FST_DEVICE int FST_T(is_loose)(const fst_place *place)
{
    return sizeof(REAL) == sizeof(float) && place->dtype >= 0 && (place->at & 15u);
}

/* As fetch, of an operand that may be loose. Elements of 16 bits then take a place of 32 bits each,
 * until pack is called. */
FST_DEVICE void FST_T(fetch_items)(const fst_tile *tile, const fst_place *place, fst_words *words)
{
    if (!FST_T(is_loose)(place)) {
        FST_T(fetch)(tile, place, words);
        return;
    }
    words[0] = words[1] = fst_words_zero();
    FST_UNROLL
    for (unsigned q = 0; q < 8 && place->dtype == FST_F32; q++)
        if (q < 4 ? tile->has_first : tile->has_second)
            words[q / 4].word[q % 4] =
                ((fst_item_4 *)(q < 4 ? FST_T(first_of)(tile, place)
                                      : FST_T(second_of)(tile, place)))[q % 4];
    FST_UNROLL
    for (unsigned q = 0; q < 8 && place->dtype != FST_F32; q++)
        if (tile->has_first)
            words[q / 4].word[q % 4] = ((fst_item_8 *)FST_T(first_of)(tile, place))[q];
}

FST_DEVICE void FST_T(pack)(const fst_place *place, fst_words *words)
{
    if (FST_T(is_loose)(place) && place->dtype != FST_F32)
        words[0] = fst_pack(words);
}

/* From words to numbers. */
FST_DEVICE void FST_T(widen)(const fst_words *words, int32_t dtype, REAL *x)
{
    const unsigned held = HELD;
    switch (fst_hidden(dtype)) {
#define TYPE(dtype, name, items)                        \
    case dtype:                                         \
        widen_word_##name(&words[0], x);                \
        if (items < held)                               \
            widen_word_##name(&words[1], x + held / 2); \
        break;
        FST_T(FST_TYPES)
#undef TYPE
    default:
        FST_UNROLL
        for (unsigned q = 0; q < HELD; q++)
            x[q] = 0;
    }
}

/* From numbers to words. With `any` a NaN becomes the one of the CPU, and else some NaN. */
FST_DEVICE void FST_T(narrow)(const REAL *x, int32_t dtype, const int any, fst_words *words)
{
    const unsigned held = HELD;
    words[1] = fst_words_zero();
    switch (fst_hidden(dtype)) {
#define TYPE(dtype, name, items)                                                              \
    case dtype:                                                                               \
        words[0] = any ? narrow_word_##name(x) : narrow_numbers_##name(x);                    \
        if (items < held)                                                                     \
            words[1] =                                                                        \
                any ? narrow_word_##name(x + held / 2) : narrow_numbers_##name(x + held / 2); \
        break;
        FST_T(FST_TYPES)
#undef TYPE
    default:
        words[0] = fst_words_zero();
        break;
    }
}

FST_DEVICE void FST_T(store)(const fst_tile *tile, const fst_place *place, const REAL *x,
                             const int any)
{
    fst_words words[2];
    FST_T(narrow)(x, place->dtype, any, words);
    if (tile->has_first)
        *FST_T(first_of)(tile, place) = words[0];
    if (tile->has_second && place->dtype == FST_T(SELF))
        *FST_T(second_of)(tile, place) = words[1];
}

/* As store, to an operand that may be loose. */
FST_DEVICE void FST_T(store_items)(const fst_tile *tile, const fst_place *place, const REAL *x,
                                   const int any)
{
    fst_words words[2];
    if (!FST_T(is_loose)(place)) {
        FST_T(store)(tile, place, x, any);
        return;
    }
    FST_T(narrow)(x, place->dtype, any, words);
    FST_UNROLL
    for (unsigned q = 0; q < 8 && place->dtype == FST_F32; q++)
        if (q < 4 ? tile->has_first : tile->has_second)
            ((fst_item_4 *)(q < 4 ? FST_T(first_of)(tile, place)
                                  : FST_T(second_of)(tile, place)))[q % 4] =
                words[q / 4].word[q % 4];
    FST_UNROLL
    for (unsigned q = 0; q < 8 && place->dtype != FST_F32; q++)
        if (tile->has_first)
            ((fst_item_8 *)FST_T(first_of)(tile, place))[q] =
                (fst_item_8)fst_item_of(&words[0], q, 8);
}

/* A number that is rounded to a type. */
FST_DEVICE REAL FST_T(rounded)(REAL x, int32_t dtype)
{
    return dtype == FST_F64    ? x
           : dtype == FST_F32  ? (REAL)(float)x
           : dtype == FST_BF16 ? (REAL)fst_bf16_to_f32(fst_f32_to_bf16((float)x))
                               : (REAL)fst_f16_to_f32(fst_f32_to_f16((float)x));
}

/* Reads one element of any operand. */
FST_DEVICE REAL FST_T(get)(const fst_share *share, const fst_device_operand *op, uint32_t element)
{
    const void *data = (const void *)fst_global(op->data);
    const int64_t at = fst_share_place(share, op, element);
    const REAL held = op->dtype == FST_F32    ? (REAL)((const float *)data)[at]
                      : op->dtype == FST_F64  ? (REAL)((const double *)data)[at]
                      : op->dtype == FST_BF16 ? (REAL)fst_bf16_to_f32(((const uint16_t *)data)[at])
                                              : (REAL)fst_f16_to_f32(((const uint16_t *)data)[at]);
    return fst_share_flips(share, op) ? -held : held;
}

FST_DEVICE void FST_T(set)(const fst_share *share, const fst_device_operand *op, uint32_t element,
                           REAL x)
{
    void *data = (void *)fst_global(op->data);
    const int64_t at = fst_share_place(share, op, element);
    const REAL held = fst_share_flips(share, op) ? -x : x;
    if (op->dtype == FST_F32)
        ((float *)data)[at] = (float)held;
    else if (op->dtype == FST_F64)
        ((double *)data)[at] = (double)held;
    else
        ((uint16_t *)data)[at] =
            op->dtype == FST_BF16 ? fst_f32_to_bf16((float)held) : fst_f32_to_f16((float)held);
}

/* Whether one of a thread's numbers is NaN. */
FST_DEVICE int FST_T(any_nan)(const REAL *x)
{
    int nan = 0;
    FST_UNROLL
    for (unsigned q = 0; q < HELD; q += 2)
        nan |= (x[q] != x[q]) | (x[q + 1] != x[q + 1]);
    return nan;
}
