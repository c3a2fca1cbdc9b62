/* image_reader.h - which source columns the columns of a sample read, found once for all its
 * rows. */

/* A sample, its columns if it is resized, and the range of the window's columns that these read. */
typedef struct {
    const fst_image_sample *at;
    int resized;
    int32_t lowest, highest;
    fst_image_columns columns;
} reader;

static void widen(reader *r, int32_t first, int32_t last)
{
    r->lowest = first < r->lowest ? first : r->lowest;
    r->highest = last > r->highest ? last : r->highest;
}

/* Finds the columns' weights. With `even` all columns get the same number of weights, padded
 * with zeros, so that the CPU predicts the loop's end. Zeros change no sum of bytes; of floats
 * they could, as these may be infinite. */
static void look_at_spans(const fst_image_batch *batch, reader *r, int even)
{
    int32_t used = 0, most = 0;
    for (int32_t x = 0; even && x < batch->width; x++) {
        const int32_t count = fst_image_column_span(r->at, batch->width, x).count;
        most = count > most ? count : most;
    }
    for (int32_t x = 0; x < batch->width; x++) {
        const fst_image_span span = fst_image_column_span(r->at, batch->width, x);
        const int32_t begin = span.first - r->at->left, count = even ? most : span.count;
        const int32_t room = r->at->width - count, first = begin < room ? begin : room;
        r->columns.first[x] = span.count ? first : 0;
        r->columns.count[x] = span.count ? count : 0;
        r->columns.place[x] = used;
        if (!span.count)
            continue;
        for (int32_t i = first - begin; i < first - begin + count; i++)
            r->columns.weights[used++] =
                i < 0 || i >= span.count ? 0.0f : fst_image_weight(&span, i);
        widen(r, first, first + count - 1);
    }
}

/* Finds the columns' taps. Columns outside of the grid read the zero after the window's row. */
static void look_at_taps(const fst_image_batch *batch, reader *r)
{
    for (int32_t x = 0; x < batch->width; x++) {
        const fst_image_tap tap = fst_image_column_tap(r->at, batch->width, x);
        const int none = tap.first < 0;
        r->columns.first[x] = none ? r->at->width : tap.first - r->at->left;
        r->columns.second[x] = none ? r->at->width : tap.second - r->at->left;
        r->columns.w0[x] = tap.w0;
        r->columns.w1[x] = tap.w1;
        if (!none)
            widen(r, r->columns.first[x], r->columns.second[x]);
    }
}

static void look_at(const fst_image_batch *batch, const fst_image_sample *at, reader *r)
{
    r->at = at;
    r->resized = fst_image_is_resized(at);
    r->lowest = at->width;
    r->highest = -1;
    if (r->resized)
        batch->antialias ? look_at_spans(batch, r, !batch->source_is_float)
                         : look_at_taps(batch, r);
}
