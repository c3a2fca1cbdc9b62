/* batcher_batches.h - a table of two fields, and batches of its rows. */
#pragma once

#include "common.h"
#include "io/batcher.h"

enum { ROWS = 4000, WIDTH = 300, FIELDS = 2 };

static int32_t numbers[ROWS][WIDTH], labels[ROWS];
static fst_field fields[] = {{.items = sizeof numbers[0]}, {.items = sizeof labels[0]}};
static fst_column columns[] = {{(char *)numbers, sizeof numbers[0]},
                               {(char *)labels, sizeof labels[0]}};
static fst_node node = {.kind = FST_ROWS, .length = ROWS, .columns = columns};
static const fst_table table = {fields, FIELDS, &node, 1};

static inline void fill_table(void)
{
    for (int32_t i = 0; i < ROWS; i++) {
        labels[i] = -i;
        for (int32_t j = 0; j < WIDTH; j++)
            numbers[i][j] = i * WIDTH + j;
    }
}

typedef struct {
    int64_t indices[1500];
    size_t count;
} request;

static inline void fill_request(request *r, size_t limit)
{
    r->count = 1 + random_below(limit);
    for (size_t i = 0; i < r->count; i++)
        r->indices[i] = (int64_t)random_below(ROWS);
}

static inline int is_right(const request *r, fst_slot *const *slots)
{
    const int32_t (*got)[WIDTH] = (const int32_t (*)[WIDTH])slots[0]->data;
    const int32_t *got_labels = slots[1]->data;
    int right = 1;
    for (size_t i = 0; i < r->count; i++)
        right = right && got_labels[i] == labels[r->indices[i]] &&
                !memcmp(got[i], numbers[r->indices[i]], sizeof got[i]);
    return right;
}

static inline void give_back(fst_slot *const *slots)
{
    for (size_t f = 0; f < FIELDS; f++)
        fst_slot_give_back(slots[f]);
}

static inline fst_batch *add(fst_batcher *batcher, const request *r, char *const *outputs)
{
    fst_status status = {0};
    fst_batch *batch = fst_batcher_add(batcher, r->indices, r->count, outputs, &status);
    CHECK(batch && !status.code);
    return batch;
}

static inline size_t take(fst_batcher *batcher, fst_batch *batch, fst_slot **slots)
{
    fst_status status = {0};
    int done = 0;
    while (!done)
        CHECK_INT(fst_batcher_wait(batcher, batch, 1, &done, &status), FST_OK);
    return fst_batcher_take(batcher, batch, slots);
}
