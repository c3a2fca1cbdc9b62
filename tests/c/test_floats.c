/* Rows of numbers that become floats, or wider integers, while they are gathered: at every level
 * the bits of plain C, from any address, and not a byte more. */
#include <stdlib.h>

#include "common.h"
#include "io/table.h"

MALLOC_MAY_FAIL

enum { ROWS = 2, GUARD = 64 };

/* Any bits; but half of the doubles are such as a float holds. */
static unsigned char *new_numbers(size_t bytes, fst_number number)
{
    unsigned char *memory = malloc(bytes + 1); /* the numbers begin at an odd address */
    for (size_t i = 0; memory && i < bytes + 1; i++)
        memory[i] = (unsigned char)random_bits();
    for (size_t at = 1; memory && number == FST_OF_F64 && at < bytes; at += 16) {
        const double value = random_value() * 100.0;
        memcpy(memory + at, &value, sizeof value);
    }
    return memory;
}

/* The integer at `from`, the slow way. */
static int64_t integer_at(const unsigned char *from, size_t size, int is_signed)
{
    uint64_t bits = 0;
    for (size_t i = 0; i < size; i++)
        bits |= (uint64_t)from[i] << 8 * i;
    if (is_signed && bits >> (8 * size - 1))
        bits |= ~UINT64_C(0) << (8 * size - 1);
    return (int64_t)bits;
}

static float number_at(const unsigned char *row, fst_number number, size_t i)
{
    const size_t size = fst_number_size(number);
    const unsigned char *from = row + i * size;
    uint16_t half;
    float single;
    double wide;
    memcpy(&half, from, size < sizeof half ? size : sizeof half);
    memcpy(&single, from, size < sizeof single ? size : sizeof single);
    memcpy(&wide, from, size < sizeof wide ? size : sizeof wide);
    return number == FST_OF_F16    ? fst_f16_to_f32(half)
           : number == FST_OF_BF16 ? fst_bf16_to_f32(half)
           : number == FST_OF_F32  ? single
           : number == FST_OF_F64  ? (float)wide
                                   : (float)integer_at(from, size, number != FST_OF_U8);
}

/* NaN may be any NaN. */
static int is_wrong(const char *got, float want, fst_dtype dtype)
{
    uint16_t half;
    float single;
    memcpy(&half, got, sizeof half);
    if (dtype == FST_F32) {
        memcpy(&single, got, sizeof single);
        return isnan(want) ? !isnan(single) : fst_bits_of_f32(single) != fst_bits_of_f32(want);
    }
    if (isnan(want))
        return !isnan(dtype == FST_F16 ? fst_f16_to_f32(half) : fst_bf16_to_f32(half));
    return half != (dtype == FST_F16 ? fst_f32_to_f16(want) : fst_f32_to_bf16(want));
}

/* The rows of a table with one field, the second first, between bytes that must not change. */
static char *gathered(const fst_field *field, const unsigned char *numbers, size_t row, int stream)
{
    const size_t size = fst_field_row_bytes(field) * ROWS;
    fst_column column = {(const char *)numbers, (int64_t)row};
    fst_node node = {.kind = FST_ROWS, .length = ROWS, .columns = &column};
    const fst_table table = {(fst_field *)field, 1, &node, 1};
    const fst_place places[ROWS] = {{&node, 1}, {&node, 0}};
    char *memory = malloc(size + (size_t)2 * GUARD), *outputs[] = {memory + GUARD};
    memset(memory, 0x5A, size + (size_t)2 * GUARD);
    fst_table_copy(&table, places, 0, ROWS, outputs, stream);
    int wrong = 0;
    for (size_t i = 0; i < GUARD; i++)
        wrong += memory[i] != 0x5A || memory[GUARD + size + i] != 0x5A;
    CHECK_INT(wrong, 0);
    return memory;
}

/* `parts` 0: as they are; 1: one mean for all; else one for each of so many equal parts. */
static void numbers_become_floats(fst_number from, fst_dtype to, size_t items, size_t parts,
                                  int stream)
{
    float *means = parts ? malloc(parts * sizeof *means) : NULL;
    float *stds = parts ? malloc(parts * sizeof *stds) : NULL;
    const fst_field field = {
        .items = items,
        .conversion = FST_TO_FLOATS,
        .floats = {from, to, 1.0f / 255, means, stds, parts ? items / parts : 0}};
    const size_t row = items * fst_number_size(from);
    for (size_t i = 0; i < parts; i++) {
        means[i] = (float)random_unit();
        stds[i] = (float)random_unit() + 2.0f;
    }
    unsigned char *numbers = new_numbers(row * ROWS, from);
    char *memory = gathered(&field, numbers + 1, row, stream);
    int wrong = 0;
    for (size_t r = 0; r < ROWS; r++)
        for (size_t i = 0; i < items; i++) {
            float want = number_at(numbers + 1 + (ROWS - 1 - r) * row, from, i);
            if (parts) {
                const size_t part = i / field.floats.run;
                want = (want * field.floats.scale - means[part]) / stds[part];
            }
            wrong += is_wrong(memory + GUARD + (r * items + i) * fst_dtype_size(to), want, to);
        }
    CHECK_INT(wrong, 0);
    free(memory);
    free(numbers);
    free(means);
    free(stds);
}

static void all_numbers_become_floats(void)
{
    static const size_t sizes[][2] = {{1, 0},   {1, 1},     {7, 7},      {700, 0},    {700, 1},
                                      {700, 7}, {700, 700}, {1536, 512}, {1545, 515}, {3000, 3}};
    static const fst_dtype types[] = {FST_F32, FST_BF16, FST_F16};
    for (int from = 0; from < FST_NUMBER_COUNT; from++)
        for (size_t t = 0; t < 3; t++)
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
                for (int stream = 0; stream < 2; stream++)
                    numbers_become_floats((fst_number)from, types[t], sizes[s][0], sizes[s][1],
                                          stream);
}

static void integers_keep_their_sign(void)
{
    static const struct {
        fst_conversion conversion;
        size_t size;
        int is_signed;
    } kinds[] = {{FST_U8_TO_I64, 1, 0},
                 {FST_I8_TO_I64, 1, 1},
                 {FST_I16_TO_I64, 2, 1},
                 {FST_I32_TO_I64, 4, 1}};
    enum { ITEMS = 37 };
    for (size_t k = 0; k < 4; k++)
        for (int stream = 0; stream < 2; stream++) {
            const fst_field field = {.items = ITEMS, .conversion = kinds[k].conversion};
            const size_t row = ITEMS * kinds[k].size;
            unsigned char *numbers = new_numbers(row * ROWS, FST_OF_U8);
            char *memory = gathered(&field, numbers + 1, row, stream);
            for (size_t i = 0; i < (size_t)ROWS * ITEMS; i++) {
                const size_t at = (i + ITEMS) % ((size_t)ROWS * ITEMS);
                int64_t got;
                memcpy(&got, memory + GUARD + i * sizeof got, sizeof got);
                CHECK_INT(got, integer_at(numbers + 1 + at * kinds[k].size, kinds[k].size,
                                          kinds[k].is_signed));
            }
            free(memory);
            free(numbers);
        }
}

int main(void)
{
    const fst_cpu_kernels *levels[MAX_LEVELS];
    for (size_t i = supported_levels(levels); i-- > 0;) {
        fst_table_use(levels[i]->widen);
        all_numbers_become_floats();
        integers_keep_their_sign();
    }
    return check_report();
}
