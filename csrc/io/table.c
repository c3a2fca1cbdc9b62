#include "io/table.h"

#include <string.h>

#include "base/stream.h"

/* Rows that are prefetched ahead, and bytes of the next one. */
enum { AHEAD = 8, NEXT_BYTES = 4096 };
enum {
    STRIP = 512
}; /* floats that are converted in the first-level cache at a time, and streamed from there */

static const fst_widen_loops *widen;

void fst_table_use(const fst_widen_loops *loops)
{
    widen = loops;
}

/* Items may be unaligned, as those of a file.
 *
 * For each token: how many tokens of its document come before it, or (`number`) how many
 * documents. The first token of a row counts as the start of a document. */
#define DIVIDE(name, from, to)                                                                \
    static void name(char *restrict output, const char *restrict row, const fst_field *field, \
                     int number)                                                              \
    {                                                                                         \
        to here = 0;                                                                          \
        int ended = 0;                                                                        \
        for (size_t i = 0; i < field->items; i++) {                                           \
            from token;                                                                       \
            memcpy(&token, row + i * sizeof token, sizeof token);                             \
            const int found = token == field->boundary;                                       \
            if (i && (field->begins ? found : ended))                                         \
                here = number ? here + 1 : 0;                                                 \
            else if (i && !number)                                                            \
                here++;                                                                       \
            memcpy(output + i * sizeof here, &here, sizeof here);                             \
            ended = found;                                                                    \
        }                                                                                     \
    }
DIVIDE(divide_u16_i32, uint16_t, int32_t)
DIVIDE(divide_u16_i64, uint16_t, int64_t)
DIVIDE(divide_u32_i64, uint32_t, int64_t)

/* Bytes of an item, and what fills tokens' positions, or with `number` their documents' numbers;
 * the other conversions are those of `widen`. */
static const struct {
    size_t from, to;
    void (*divide)(char *restrict output, const char *restrict row, const fst_field *field,
                   int number);
    int number;
} conversions[FST_CONVERSION_COUNT] = {
    [FST_AS_IS] = {1, 1, NULL, 0},
    [FST_U16_TO_I32] = {2, 4, NULL, 0},
    [FST_U16_TO_I64] = {2, 8, NULL, 0},
    [FST_U32_TO_I64] = {4, 8, NULL, 0},
    [FST_U16_TO_I32_POSITIONS] = {2, 4, divide_u16_i32, 0},
    [FST_U16_TO_I64_POSITIONS] = {2, 8, divide_u16_i64, 0},
    [FST_U32_TO_I64_POSITIONS] = {4, 8, divide_u32_i64, 0},
    [FST_U16_TO_I32_DOCUMENTS] = {2, 4, divide_u16_i32, 1},
    [FST_U16_TO_I64_DOCUMENTS] = {2, 8, divide_u16_i64, 1},
    [FST_U32_TO_I64_DOCUMENTS] = {4, 8, divide_u32_i64, 1},
    [FST_U8_TO_I64] = {1, 8, NULL, 0},
    [FST_I8_TO_I64] = {1, 8, NULL, 0},
    [FST_I16_TO_I64] = {2, 8, NULL, 0},
    [FST_I32_TO_I64] = {4, 8, NULL, 0},
    [FST_ROW_NUMBERS] = {0, 8, NULL, 0},
};

static size_t source_bytes(const fst_field *field)
{
    return field->items * (field->conversion == FST_TO_FLOATS
                               ? fst_number_size(field->floats.from)
                               : conversions[field->conversion].from);
}

size_t fst_field_row_bytes(const fst_field *field)
{
    return field->items * (field->conversion == FST_TO_FLOATS ? fst_dtype_size(field->floats.to)
                                                              : conversions[field->conversion].to);
}

size_t fst_table_row_bytes(const fst_table *table)
{
    size_t sum = 0;
    for (size_t f = 0; f < table->field_count; f++)
        sum += fst_field_row_bytes(&table->fields[f]);
    return sum;
}

/* The child that holds sample `index` of a joined node. */
static size_t child_of(const fst_node *node, int64_t index)
{
    size_t low = 0, high = node->child_count - 1;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (node->ends[middle] <= index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int fst_table_find(const fst_table *table, int64_t index, fst_place *place)
{
    const fst_node *node = &table->nodes[table->node_count - 1];
    for (;;) {
        if (index < 0)
            index += node->length;
        if (index < 0 || index >= node->length)
            return -1;
        if (node->kind == FST_ROWS) {
            *place = (fst_place){node, index};
            return 0;
        }
        if (node->kind == FST_CHOSEN) {
            index = node->chosen ? node->chosen[index] : node->start + index * node->step;
            node = &table->nodes[node->child];
        } else {
            const size_t child = child_of(node, index);
            index -= child ? node->ends[child - 1] : 0;
            node = &table->nodes[node->children[child]];
        }
    }
}

static void copy_row(const fst_field *field, char *output, const char *row)
{
    const fst_conversion how = field->conversion;
    if (how == FST_AS_IS)
        memcpy(output, row, field->items);
    else if (how == FST_TO_FLOATS)
        widen->to_floats(&field->floats, output, row, 0, field->items);
    else if (conversions[how].divide)
        conversions[how].divide(output, row, field, conversions[how].number);
    else
        widen->integers[how](output, row, field->items);
}

static void stream_row(const fst_field *field, char *output, const char *row, size_t size)
{
    if (field->conversion == FST_AS_IS) {
        fst_stream_copy(output, row, size);
        return;
    }
    if (field->conversion != FST_TO_FLOATS) {
        copy_row(field, output, row);
        return;
    }
    char strip[STRIP * sizeof(float)] __attribute__((aligned(64)));
    const size_t from = fst_number_size(field->floats.from), to = fst_dtype_size(field->floats.to);
    for (size_t first = 0; first < field->items; first += STRIP) {
        const size_t left = field->items - first, count = left < STRIP ? left : STRIP;
        widen->to_floats(&field->floats, strip, row + first * from, first, count);
        fst_stream_copy(output + first * to, strip, count * to);
    }
}

static const char *row_at(const fst_place *place, size_t field)
{
    const fst_column *column = &place->leaf->columns[field];
    return column->data + place->row * column->stride;
}

static void fetch(const char *row, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(row + at);
}

static void number_rows(const fst_place *places, size_t begin, size_t end, char *output)
{
    for (size_t i = begin; i < end; i++)
        memcpy(output + i * sizeof places[i].row, &places[i].row, sizeof places[i].row);
}

void fst_table_copy(const fst_table *table, const fst_place *places, size_t begin, size_t end,
                    char *const *outputs, int stream)
{
    for (size_t f = 0; f < table->field_count; f++) {
        const fst_field *field = &table->fields[f];
        const size_t size = fst_field_row_bytes(field);
        const size_t from = source_bytes(field);
        if (field->conversion == FST_ROW_NUMBERS) {
            number_rows(places, begin, end, outputs[f]);
            continue;
        }
        for (size_t i = begin; size && i < end; i++) {
            if (i + AHEAD < end)
                __builtin_prefetch(row_at(&places[i + AHEAD], f));
            if (i + 1 < end)
                fetch(row_at(&places[i + 1], f), from < NEXT_BYTES ? from : NEXT_BYTES);
            const char *row = row_at(&places[i], f);
            if (stream)
                stream_row(field, outputs[f] + i * size, row, size);
            else
                copy_row(field, outputs[f] + i * size, row);
        }
    }
    if (stream)
        fst_stream_end();
}
