/* loss_words.h - logits and their gradients in words of 16 bytes: `items` of them, 4 or 8. */
#pragma once

#include "rules/cross_entropy.h"
#include "words.h"

FST_DEVICE uint32_t fst_left_of(int64_t left, uint32_t most)
{
    return left < 0 ? 0 : left < (int64_t)most ? (uint32_t)left : most;
}

FST_DEVICE const char *fst_logit_at(const fst_cross_entropy_launch *launch, int64_t at)
{
    return (const char *)fst_global(launch->logits) + at * (launch->dtype == FST_F32 ? 4 : 2);
}

FST_DEVICE int fst_is_aligned(const void *at)
{
    return fst_hidden((int32_t)((uintptr_t)at % sizeof(fst_words))) == 0;
}

/* One logit, as its bits. */
FST_DEVICE uint32_t fst_logit_bits(const char *row, int64_t at, unsigned items)
{
    return items == 4 ? ((const fst_item_4 *)row)[at] : ((const fst_item_8 *)row)[at];
}

FST_DEVICE float fst_logit_of_bits(uint32_t bits, int32_t dtype)
{
    return dtype == FST_F32    ? fst_f32_of_bits(bits)
           : dtype == FST_BF16 ? fst_f32_of_bits(bits << 16)
                               : fst_widen_f16((uint16_t)bits);
}

FST_DEVICE float fst_logit(const fst_cross_entropy_launch *launch, int64_t at)
{
    const unsigned items = launch->dtype == FST_F32 ? 4 : 8;
    return fst_logit_of_bits(fst_logit_bits(fst_logit_at(launch, at), 0, items), launch->dtype);
}

/* Loads words of logits that are FST_LOSS_LANES apart; `left` logits of the strip begin at the
 * first one, and behind them it is -inf. */
FST_DEVICE void fst_loss_load(const char *from, uint32_t left, int32_t dtype, unsigned items,
                              fst_words *words, uint32_t loads)
{
    const uint32_t apart = FST_LOSS_LANES / items;
    const uint32_t nothing = dtype == FST_F32 ? 0xFF800000u : dtype == FST_BF16 ? 0xFF80u : 0xFC00u;
    if (left >= (loads - 1) * FST_LOSS_LANES + items && fst_is_aligned(from)) {
        FST_UNROLL
        for (uint32_t k = 0; k < loads; k++)
            words[k] = ((const fst_words *)from)[k * apart];
        return;
    }
    FST_UNROLL
    for (uint32_t k = 0; k < loads; k++) {
        words[k] = fst_words_zero();
        FST_UNROLL
        for (uint32_t q = 0; q < items; q++) {
            const uint32_t at = k * FST_LOSS_LANES + q;
            const uint32_t bits = at < left ? fst_logit_bits(from, at, items) : nothing;
            words[k].word[items == 4 ? q : q / 2] |= items == 4 ? bits : bits << q % 2 * 16;
        }
    }
}

/* The logits of a word. */
FST_DEVICE void fst_loss_widen(const fst_words *word, int32_t dtype, unsigned items, float *x)
{
    if (items == 8 && fst_hidden(dtype) != FST_BF16) {
        FST_UNROLL
        for (unsigned q = 0; q < items; q++)
            x[q] = fst_widen_f16((uint16_t)fst_item_of(word, q, items));
        return;
    }
    FST_UNROLL
    for (unsigned q = 0; q < items; q++)
        x[q] = fst_f32_of_bits(fst_item_of(word, q, items) << (items == 4 ? 0 : 16));
}

/* The word of these numbers. */
FST_DEVICE fst_words fst_loss_narrow(const float *x, int32_t dtype, unsigned items)
{
    fst_words word;
    FST_UNROLL
    for (unsigned n = 0; n < 4; n++)
        word.word[n] = items == 4          ? fst_bits_of_f32(x[n])
                       : dtype == FST_BF16 ? fst_narrow_two_bf16(x[2 * n], x[2 * n + 1])
                                           : fst_narrow_two_f16(x[2 * n], x[2 * n + 1]);
    return word;
}

FST_DEVICE void fst_slope_write(const fst_cross_entropy_launch *launch, int64_t at, float value)
{
    void *slope = (void *)fst_global(launch->slope);
    if (launch->dtype == FST_F32)
        ((float *)slope)[at] = value;
    else
        ((uint16_t *)slope)[at] =
            (uint16_t)(launch->dtype == FST_BF16 ? fst_narrow_two_bf16(value, 0.0f)
                                                 : fst_narrow_two_f16(value, 0.0f));
}
