/* image_view.h - what the columns of a sample read: found once for all its rows. */

/* A sample, its columns if it is resized, and the part of a window's row that these read. */
typedef struct {
    const fst_image_sample *at;
    int resized;
    int32_t lowest, highest;
    fst_image_columns columns;
} view;

static void widen(view *v, int32_t first, int32_t last)
{
    v->lowest = first < v->lowest ? first : v->lowest;
    v->highest = last > v->highest ? last : v->highest;
}

/* The columns' weights; `even`: as many for each, which the CPU foresees, with zeros around its
 * own. They change no sum of bytes, but one of numbers, which may be infinite. */
static void look_at_spans(const fst_image_batch *batch, view *v, int even)
{
    int32_t used = 0, most = 0;
    for (int32_t x = 0; even && x < batch->width; x++) {
        const int32_t count = fst_image_column_span(v->at, batch->width, x).count;
        most = count > most ? count : most;
    }
    for (int32_t x = 0; x < batch->width; x++) {
        const fst_image_span span = fst_image_column_span(v->at, batch->width, x);
        const int32_t begin = span.first - v->at->left, count = even ? most : span.count;
        const int32_t room = v->at->width - count, first = begin < room ? begin : room;
        v->columns.first[x] = span.count ? first : 0;
        v->columns.count[x] = span.count ? count : 0;
        v->columns.place[x] = used;
        if (!span.count)
            continue;
        for (int32_t i = first - begin; i < first - begin + count; i++)
            v->columns.weights[used++] =
                i < 0 || i >= span.count ? 0.0f : fst_image_weight(&span, i);
        widen(v, first, first + count - 1);
    }
}

/* Columns outside of the grid read the zero behind the window's row. */
static void look_at_taps(const fst_image_batch *batch, view *v)
{
    for (int32_t x = 0; x < batch->width; x++) {
        const fst_image_tap tap = fst_image_column_tap(v->at, batch->width, x);
        const int none = tap.first < 0;
        v->columns.first[x] = none ? v->at->width : tap.first - v->at->left;
        v->columns.second[x] = none ? v->at->width : tap.second - v->at->left;
        v->columns.w0[x] = tap.w0;
        v->columns.w1[x] = tap.w1;
        if (!none)
            widen(v, v->columns.first[x], v->columns.second[x]);
    }
}

static void look_at(const fst_image_batch *batch, const fst_image_sample *at, view *v)
{
    v->at = at;
    v->resized = fst_image_is_resized(at);
    v->lowest = at->width;
    v->highest = -1;
    if (v->resized)
        batch->antialias ? look_at_spans(batch, v, !batch->source_is_float)
                         : look_at_taps(batch, v);
}
