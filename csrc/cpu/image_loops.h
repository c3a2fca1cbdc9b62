/* image_loops.h - the loops over rows of pixels; `restrict` and constant steps let the compiler
 * vectorise them. */

#define LOOP __attribute__((noinline)) static void

/* Converts source elements to numbers, forwards, or backwards for flipped images. The backward
 * loops are not called fst_loop_*: base has no instruction that reverses bytes. */
#define AFFINE(name, type, index)                                                               \
    LOOP name(size_t n, float *restrict to, const type *restrict from, float scale, float bias) \
    {                                                                                           \
        for (size_t i = 0; i < n; i++)                                                          \
            to[i] = fst_image_affine((float)from[index], scale, bias);                          \
    }
AFFINE(fst_loop_affine_u8, uint8_t, i)
AFFINE(fst_loop_affine_f32, float, i)
AFFINE(affine_back_u8, uint8_t, n - 1 - i)
AFFINE(affine_back_f32, float, n - 1 - i)
#undef AFFINE

/* The weighted sum of two source rows. */
#define BLEND(suffix, type)                                                                  \
    LOOP fst_loop_blend_##suffix(size_t n, float *restrict to, const type *a, const type *b, \
                                 float w0, float w1)                                         \
    {                                                                                        \
        for (size_t i = 0; i < n; i++)                                                       \
            to[i] = fst_image_blend((float)a[i], (float)b[i], w0, w1);                       \
    }
BLEND(u8, uint8_t)
BLEND(f32, float)
#undef BLEND

/* Gathers two columns of a row for each output column. Not called fst_loop_*: base has no
 * instruction that gathers. */
LOOP gather_columns(size_t n, float *restrict to, const float *restrict row,
                    const fst_image_columns *columns, float scale, float bias)
{
    const int32_t *restrict first = columns->first, *restrict second = columns->second;
    const float *restrict w0 = columns->w0, *restrict w1 = columns->w1;
    for (size_t i = 0; i < n; i++) {
        const float value = fst_image_blend(row[first[i]], row[second[i]], w0[i], w1[i]);
        to[i] = fst_image_affine(value, scale, bias);
    }
}

/* Weighted sums of source rows: the first row, and each further one. */
#define SUM(suffix, type)                                                              \
    LOOP fst_loop_weigh_##suffix(size_t n, float *restrict to, const type *a, float w) \
    {                                                                                  \
        for (size_t i = 0; i < n; i++)                                                 \
            to[i] = w * (float)a[i];                                                   \
    }                                                                                  \
    LOOP fst_loop_add_##suffix(size_t n, float *restrict to, const type *a, float w)   \
    {                                                                                  \
        for (size_t i = 0; i < n; i++)                                                 \
            to[i] += w * (float)a[i];                                                  \
    }
SUM(u8, uint8_t)
SUM(f32, float)
#undef SUM

/* Sums the columns of a row that each output column covers. */
LOOP sum_columns(size_t n, float *restrict to, const float *restrict row,
                 const fst_image_columns *columns, float scale, float bias)
{
    for (size_t i = 0; i < n; i++) {
        const float *restrict from = row + columns->first[i];
        const float *restrict weights = columns->weights + columns->place[i];
        const int32_t count = columns->count[i];
        float sum = count ? weights[0] * from[0] : 0.0f;
        for (int32_t k = 1; k < count; k++)
            sum += weights[k] * from[k];
        to[i] = fst_image_affine(sum, scale, bias);
    }
}

LOOP fst_loop_mix(size_t n, float *restrict to, const float *restrict other, float own,
                  float others)
{
    for (size_t i = 0; i < n; i++)
        to[i] = fst_image_blend(to[i], other[i], own, others);
}

LOOP fst_loop_bf16(size_t n, uint16_t *restrict to, const float *restrict from)
{
    for (size_t i = 0; i < n; i++)
        to[i] = fst_f32_to_bf16(from[i]);
}

LOOP fst_loop_f16(size_t n, uint16_t *restrict to, const float *restrict from)
{
    for (size_t i = 0; i < n; i++)
        to[i] = fst_f32_to_f16(from[i]);
}

/* Collects elements that are a step apart; three is the step of RGB. */
#define COLLECT(suffix, type)                                                                   \
    LOOP collect_##suffix(size_t n, type *restrict to, const type *restrict from, int64_t step) \
    {                                                                                           \
        if (step == 3)                                                                          \
            for (size_t i = 0; i < n; i++)                                                      \
                to[i] = from[3 * i];                                                            \
        else                                                                                    \
            for (size_t i = 0; i < n; i++)                                                      \
                to[i] = from[(int64_t)i * step];                                                \
    }
COLLECT(u8, uint8_t)
COLLECT(f32, float)
#undef COLLECT

/* Splits RGB pixels into a plane per channel, all three in one loop: base has no instruction
 * that sorts bytes. */
LOOP split_rgb(size_t n, uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue,
               const uint8_t *restrict from)
{
    for (size_t i = 0; i < n; i++) {
        red[i] = from[3 * i];
        green[i] = from[3 * i + 1];
        blue[i] = from[3 * i + 2];
    }
}

/* Spreads one row per channel, `n` elements apart, over an output with other strides. */
#define SPREAD(suffix, type)                                                                  \
    LOOP spread_##suffix(size_t n, size_t rows, type *restrict to, const type *restrict from, \
                         int64_t row_step, int64_t step)                                      \
    {                                                                                         \
        if (rows == 3 && row_step == 1 && step == 3)                                          \
            for (size_t i = 0; i < n; i++) {                                                  \
                to[3 * i] = from[i];                                                          \
                to[3 * i + 1] = from[n + i];                                                  \
                to[3 * i + 2] = from[2 * n + i];                                              \
            }                                                                                 \
        else                                                                                  \
            for (size_t r = 0; r < rows; r++)                                                 \
                for (size_t i = 0; i < n; i++)                                                \
                    to[(int64_t)r * row_step + (int64_t)i * step] = from[r * n + i];          \
    }
SPREAD(u16, uint16_t)
SPREAD(f32, float)
#undef SPREAD
