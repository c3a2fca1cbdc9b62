/* From shapes and strides to an order of memory: against offsets written out index by index. */
#include "common.h"
#include "core/layout.h"

enum { DIMS = 5 };

typedef struct {
    int ndim;
    int64_t shape[DIMS], strides[DIMS];
    int flat;     /* elements lie one after another */
    int overlaps; /* two indices name one element, or the check cannot rule it out */
} geometry;

static const geometry cases[] = {
    {1, {10}, {1}, 1, 0},
    {2, {40, 50}, {50, 1}, 1, 0},
    {2, {40, 50}, {1, 40}, 1, 0},                    /* transposed */
    {4, {2, 3, 4, 5}, {60, 1, 15, 3}, 1, 0},         /* channels_last */
    {5, {2, 3, 4, 5, 6}, {360, 1, 90, 18, 3}, 1, 0}, /* channels_last_3d */
    {4, {2, 3, 4, 5}, {60, 20, 5, 1}, 1, 0},         /* contiguous */
    {3, {1, 7, 1}, {999, 1, 0}, 1, 0},               /* strides of size-1 dimensions do not count */
    {4, {2, 1, 4, 5}, {20, 20, 5, 1}, 1, 0},         /* nor for one channel */
    {3, {1, 1, 1}, {5, 5, 5}, 1, 0},
    {2, {4, 5}, {10, 2}, 0, 0}, /* every other element, in one step */
    {2, {4, 5}, {9, 1}, 0, 0},  /* a slice of wider rows */
    {2, {4, 5}, {1, 9}, 0, 0},  /* a slice of wider columns */
    {1, {6}, {3}, 0, 0},
    {2, {4, 5}, {0, 1}, 0, 1}, /* expanded rows */
    {2, {4, 5}, {1, 0}, 0, 1}, /* expanded columns */
    {3, {4, 5, 6}, {0, 0, 0}, 0, 1},
    {2, {4, 5}, {1, 1}, 0, 1}, /* a sliding window */
    {2, {4, 3}, {2, 1}, 0, 1}, /* overlapping windows */
    {3, {3, 2, 4}, {16, 4, 1}, 0, 0},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static int64_t offset(const geometry *g, const int64_t *index)
{
    int64_t sum = 0;
    for (int d = 0; d < g->ndim; d++)
        sum += index[d] * g->strides[d];
    return sum;
}

/* The next index where dimension order[count - 1] runs fastest. */
static void advance(const geometry *g, const int *order, int count, int64_t *index)
{
    for (int k = count; k-- > 0;) {
        if (++index[order[k]] < g->shape[order[k]])
            return;
        index[order[k]] = 0;
    }
}

/* Walking the layout visits the elements of the tensor, in the order asked for. */
static void walks_every_element(const geometry *g, const int *order, int kept,
                                const fst_layout *layout)
{
    const int64_t count = fst_layout_count(g->ndim, g->shape);
    const fst_operand op = {.layout = layout, .dtype = FST_F32};
    int64_t index[DIMS] = {0};
    int64_t wrong = 0, product = 1;
    for (int d = 0; d < layout->ndim; d++)
        product *= layout->shape[d];
    CHECK_INT(product, count);
    for (int64_t i = 0; i < count; i++) {
        wrong += offset_of(&op, i) != offset(g, index);
        advance(g, order, kept, index);
    }
    CHECK_INT(wrong, 0);
}

static void describes(const geometry *g)
{
    int order[DIMS];
    fst_layout layout = {.ndim = 0};
    const int kept = fst_layout_order(g->ndim, g->shape, g->strides, order);
    int sizes = 0, seen[DIMS] = {0};
    for (int d = 0; d < g->ndim; d++)
        sizes += g->shape[d] != 1;
    CHECK_INT(kept, sizes);
    for (int k = 0; k < kept; k++) {
        CHECK(g->shape[order[k]] != 1 && !seen[order[k]]++);
        CHECK(k == 0 || g->strides[order[k - 1]] >= g->strides[order[k]]);
        CHECK(k == 0 || g->strides[order[k - 1]] > g->strides[order[k]] || order[k - 1] < order[k]);
    }
    CHECK_INT(fst_layout_describe(kept, order, g->shape, g->strides, &layout), g->flat);
    CHECK_INT(fst_layout_overlaps(&layout) != 0, g->overlaps);
    walks_every_element(g, order, kept, &layout);
}

/* Another tensor, a gradient say, in the order of the parameter. */
static void describes_in_the_order_of(const geometry *leader, const geometry *g)
{
    int order[DIMS];
    fst_layout layout = {.ndim = 0};
    if (leader->ndim != g->ndim || memcmp(leader->shape, g->shape, sizeof g->shape))
        return;
    const int kept = fst_layout_order(leader->ndim, leader->shape, leader->strides, order);
    const int flat = fst_layout_describe(kept, order, g->shape, g->strides, &layout);
    walks_every_element(g, order, kept, &layout);
    CHECK(!flat || g->flat);
}

/* Where the check says that no two indices meet, none do. */
static void never_misses_an_overlap(void)
{
    int missed = 0, cried = 0;
    for (int round = 0; round < 20000; round++) {
        geometry g = {.ndim = 1 + (int)random_below(4)};
        int order[DIMS];
        int64_t index[DIMS] = {0}, distinct = 0;
        unsigned char hit[512] = {0};
        fst_layout layout = {.ndim = 0};
        for (int d = 0; d < g.ndim; d++) {
            g.shape[d] = 1 + (int64_t)random_below(4);
            g.strides[d] = (int64_t)random_below(40);
        }
        const int kept = fst_layout_order(g.ndim, g.shape, g.strides, order);
        fst_layout_describe(kept, order, g.shape, g.strides, &layout);
        const int64_t count = fst_layout_count(g.ndim, g.shape);
        for (int64_t i = 0; i < count; i++) {
            distinct += !hit[offset(&g, index)]++;
            advance(&g, order, kept, index);
        }
        missed += distinct < count && !fst_layout_overlaps(&layout);
        cried += distinct == count && fst_layout_overlaps(&layout);
    }
    CHECK_INT(missed, 0);
    CHECK(cried < 5000); /* interleaved strides that happen not to meet are refused too */
}

int main(void)
{
    const int64_t shape[] = {3, 0, 5};
    CHECK_INT(fst_layout_count(0, NULL), 1);
    CHECK_INT(fst_layout_count(3, shape), 0);
    CHECK_INT(fst_layout_count(2, (int64_t[]){1 << 20, INT64_C(1) << 40}), INT64_C(1) << 60);
    for (size_t i = 0; i < CASES; i++)
        describes(&cases[i]);
    for (size_t i = 0; i < CASES; i++)
        for (size_t k = 0; k < CASES; k++)
            describes_in_the_order_of(&cases[i], &cases[k]);
    never_misses_an_overlap();
    return check_report();
}
