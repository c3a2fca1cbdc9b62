/* Tables of rows, slots and the shuffle: csrc/io but for its threads. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"
#include "io/shuffle.h"
#include "io/slots.h"
#include "io/table.h"

MALLOC_MAY_FAIL

/* Every number of a short range occurs once; both keys matter. */
static void shuffles_are_permutations(void)
{
    static unsigned char seen[5000];
    for (uint64_t length = 1; length <= 5000; length += length < 300 ? 1 : 397) {
        size_t once = 0;
        fst_shuffle shuffle;
        fst_shuffle_init(&shuffle, length, 7, length);
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < length; i++) {
            const uint64_t at = fst_shuffle_at(&shuffle, i);
            once += at < length && !seen[at]++;
        }
        CHECK_INT((int64_t)once, (int64_t)length);
    }
}

static void keys_matter(void)
{
    static const uint64_t keys[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {UINT64_MAX, 0}};
    for (size_t a = 0; a < 5; a++)
        for (size_t b = 0; b < a; b++) {
            fst_shuffle one, other;
            size_t same = 0;
            fst_shuffle_init(&one, 1000, keys[a][0], keys[a][1]);
            fst_shuffle_init(&other, 1000, keys[b][0], keys[b][1]);
            for (uint64_t i = 0; i < 1000; i++)
                same += fst_shuffle_at(&one, i) == fst_shuffle_at(&other, i);
            CHECK(same < 12); /* one is expected */
        }
}

/* Over many epochs each of five numbers comes to each place equally often, and all 120 orders
 * occur. */
static void all_orders_occur(void)
{
    enum { EPOCHS = 12000 };
    static int orders[3125];
    int counts[5][5] = {{0}}, different = 0;
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        fst_shuffle shuffle;
        size_t order = 0;
        fst_shuffle_init(&shuffle, 5, 1, epoch);
        for (uint64_t i = 0; i < 5; i++) {
            const uint64_t at = fst_shuffle_at(&shuffle, i);
            counts[i][at]++;
            order = order * 5 + at;
        }
        different += !orders[order]++;
    }
    CHECK_INT(different, 120);
    for (size_t i = 0; i < 5; i++)
        for (size_t j = 0; j < 5; j++)
            CHECK_NEAR(counts[i][j], EPOCHS / 5, 5 * sqrt(EPOCHS * 0.16));
}

/* Neighbours in a long shuffle are as far apart as random numbers: a third of the length. */
static void long_shuffles_mix(void)
{
    const uint64_t length = UINT64_C(1000000007);
    fst_shuffle shuffle;
    double distance = 0.0;
    fst_shuffle_init(&shuffle, length, 3, 4);
    for (uint64_t i = 0; i < 20000; i++) {
        const double a = (double)fst_shuffle_at(&shuffle, i);
        const double b = (double)fst_shuffle_at(&shuffle, i + 1);
        CHECK(a < (double)length);
        distance += fabs(a - b) / (double)length;
    }
    CHECK_NEAR(distance / 20000, 1.0 / 3.0, 0.01);
    fst_shuffle_init(&shuffle, UINT64_C(1) << 62, 3, 4);
    CHECK(fst_shuffle_at(&shuffle, (UINT64_C(1) << 62) - 1) < UINT64_C(1) << 62);
}

/* Two leaves, one of them read backwards, a choice of the first, and all of it joined. */
static void samples_are_found(void)
{
    static const char letters[] = "abcdefghij";
    static const int64_t chosen[] = {3, -1, 0};
    fst_field field = {.items = 1, .conversion = FST_AS_IS};
    fst_column first = {letters, 1}, second = {letters + 9, -2};
    size_t children[] = {2, 1, 3};
    int64_t ends[] = {3, 8, 10};
    fst_node nodes[] = {
        {.kind = FST_ROWS, .length = 4, .columns = &first},
        {.kind = FST_ROWS, .length = 5, .columns = &second},
        {.kind = FST_CHOSEN, .length = 3, .child = 0, .chosen = chosen},
        {.kind = FST_CHOSEN, .length = 2, .child = 1, .start = 4, .step = -3},
        {.kind = FST_JOINED, .length = 10, .children = children, .ends = ends, .child_count = 3},
    };
    const fst_table table = {&field, 1, nodes, 5};
    fst_place places[20];
    char got[21] = "", *outputs[] = {got};
    for (int64_t i = -10; i < 10; i++)
        CHECK_INT(fst_table_find(&table, i, &places[i + 10]), 0);
    CHECK_INT(fst_table_find(&table, 10, &places[0]), -1);
    CHECK_INT(fst_table_find(&table, -11, &places[0]), -1);
    CHECK_INT(fst_table_find(&table, INT64_MAX, &places[0]), -1);
    CHECK_INT(fst_table_find(&table, INT64_MIN, &places[0]), -1);
    fst_table_copy(&table, places, 0, 7, outputs, 0);
    fst_table_copy(&table, places, 7, 20, outputs, 1);
    CHECK(!strcmp(got, "ddajhfdbbhddajhfdbbh"));
}

/* Rows of any length, from any address to any other, and not a byte more. */
static void rows_are_streamed(void)
{
    enum { MOST = 700 };
    static char from[2 * MOST], to[2 * MOST];
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (char)random_bits();
    for (int i = 0; i < 2000; i++) {
        const size_t source = random_below(64), target = 64 + random_below(64);
        const size_t size = random_below(MOST);
        fst_field field = {.items = size, .conversion = FST_AS_IS};
        fst_column column = {from + source, 0};
        fst_node node = {.kind = FST_ROWS, .length = 1, .columns = &column};
        const fst_table table = {&field, 1, &node, 1};
        const fst_place place = {&node, 0};
        char *outputs[] = {to + target};
        memset(to, 0x5A, sizeof to);
        fst_table_copy(&table, &place, 0, 1, outputs, 1);
        int wrong = memcmp(to + target, from + source, size) != 0;
        for (size_t at = 0; at < sizeof to; at++)
            wrong += (at < target || at >= target + size) && to[at] != 0x5A;
        CHECK_INT(wrong, 0);
    }
}

/* Instead of a row its number in the leaf, whose memory is not read. */
static void rows_are_numbered(void)
{
    static const int64_t chosen[] = {3, -1, 0};
    fst_field fields[] = {{.items = 1, .conversion = FST_ROW_NUMBERS},
                          {.items = 1, .conversion = FST_AS_IS}};
    fst_column columns[] = {{NULL, 0}, {"abcde", 1}};
    fst_node nodes[] = {{.kind = FST_ROWS, .length = 5, .columns = columns},
                        {.kind = FST_CHOSEN, .length = 3, .child = 0, .chosen = chosen}};
    const fst_table table = {fields, 2, nodes, 2};
    fst_place places[4];
    int64_t rows[5] = {0, 0, 0, 0, -7};
    char letters[5] = "";
    char *outputs[] = {(char *)rows, letters};
    CHECK_INT((int64_t)fst_table_row_bytes(&table), 9);
    for (int64_t i = 0; i < 4; i++)
        CHECK_INT(fst_table_find(&table, i - 1, &places[i]), 0);
    fst_table_copy(&table, places, 0, 1, outputs, 0);
    fst_table_copy(&table, places, 1, 4, outputs, 1);
    CHECK(!memcmp(rows, (const int64_t[]){0, 3, 4, 0, -7}, sizeof rows));
    CHECK(!strcmp(letters, "adea"));
}

/* A child that is chosen with an index it does not have. */
static void missing_samples_are_not_found(void)
{
    static const char data[4];
    static const int64_t chosen[] = {4};
    fst_field field = {.items = 1, .conversion = FST_AS_IS};
    fst_column column = {data, 1};
    fst_node nodes[] = {{.kind = FST_ROWS, .length = 4, .columns = &column},
                        {.kind = FST_CHOSEN, .length = 1, .child = 0, .chosen = chosen}};
    const fst_table table = {&field, 1, nodes, 2};
    fst_place place;
    CHECK_INT(fst_table_find(&table, 0, &place), -1);
}

/* Unaligned tokens become wider ones, without a sign. */
static void tokens_are_widened(void)
{
    enum { ITEMS = 19 };
    unsigned char bytes[4 * ITEMS + 1];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)random_bits();
    fst_field fields[] = {{.items = ITEMS, .conversion = FST_U16_TO_I32},
                          {.items = ITEMS, .conversion = FST_U16_TO_I64},
                          {.items = ITEMS, .conversion = FST_U32_TO_I64},
                          {.items = 0, .conversion = FST_AS_IS}};
    fst_column columns[] = {
        {(char *)bytes + 1, 0}, {(char *)bytes + 1, 0}, {(char *)bytes + 1, 0}, {NULL, 0}};
    fst_node node = {.kind = FST_ROWS, .length = 1, .columns = columns};
    const fst_table table = {fields, 4, &node, 1};
    int32_t first[ITEMS];
    int64_t second[ITEMS], third[ITEMS];
    char *outputs[] = {(char *)first, (char *)second, (char *)third, NULL};
    const fst_place place = {&node, 0};
    CHECK_INT((int64_t)fst_table_row_bytes(&table), ITEMS * 20);
    fst_table_copy(&table, &place, 0, 1, outputs, 0);
    for (size_t i = 0; i < ITEMS; i++) {
        uint16_t narrow;
        uint32_t wide;
        memcpy(&narrow, bytes + 1 + 2 * i, 2);
        memcpy(&wide, bytes + 1 + 4 * i, 4);
        CHECK_INT(first[i], narrow);
        CHECK_INT(second[i], narrow);
        CHECK_INT(third[i], wide);
    }
}

static void slots_are_used_again(void)
{
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_slots_keep(pool, 2);
    fst_slot *a = fst_slots_take(pool, 1000, &status), *b = fst_slots_take(pool, 1000, &status);
    fst_slot *c = fst_slots_take(pool, 0, &status);
    void *was = a->data;
    CHECK_INT((int64_t)(uintptr_t)was % 64, 0);
    memset(a->data, 1, 1000);
    fst_slot_give_back(a);
    a = fst_slots_take(pool, 300, &status); /* too large for so little */
    CHECK(a->data != was);
    fst_slot_give_back(a);
    a = fst_slots_take(pool, 600, &status);
    CHECK(a->data == was);
    CHECK_INT((int64_t)fst_slots_counted(pool).made, 4);
    CHECK_INT((int64_t)fst_slots_counted(pool).held, 3);
    fst_slot_give_back(a);
    fst_slot_give_back(b);
    CHECK_INT((int64_t)fst_slots_counted(pool).free, 2); /* the one of 300 went */
    CHECK_INT((int64_t)fst_slots_counted(pool).held, 1);
    CHECK(fst_slots_take(pool, SIZE_MAX / 2, &status) == NULL);
    CHECK_INT(status.code, FST_NO_MEMORY);
    CHECK_CONTAINS(status.message, "bytes of a batch");
    CHECK_INT((int64_t)fst_slots_counted(pool).held, 1);
    CHECK_INT((int64_t)fst_slots_counted(pool).free, 0); /* they might have been enough */
    fst_slots_close(pool);
    memset(c->data, 0, c->capacity);
    fst_slot_give_back(c); /* frees the pool too: AddressSanitizer looks */
}

static void forks_are_counted(void)
{
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_slot *slot = fst_slots_take(pool, 10, &status);
    const unsigned before = fst_forks();
    int outcome = 0;
    const pid_t child = fork();
    if (child == 0) {
        fst_slot_give_back(slot);
        _exit(fst_forks() == before + 1 && fst_slots_counted(pool).held == 0 ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &outcome, 0) == child);
    CHECK_INT(outcome, 0);
    CHECK_INT(fst_forks(), before);
    fst_slot_give_back(slot);
    fst_slots_close(pool);
}

/* What stands for a row of tokens, the slow way. */
static int64_t divided(const unsigned char *row, size_t width, const fst_field *field, size_t at)
{
    const int number = field->conversion >= FST_U16_TO_I32_DOCUMENTS;
    int64_t documents = 0, start = 0;
    for (size_t i = 1; i <= at; i++) {
        uint32_t token = 0;
        memcpy(&token, row + width * (field->begins ? i : i - 1), width);
        if (token == field->boundary)
            documents++, start = (int64_t)i;
    }
    return number ? documents : (int64_t)at - start;
}

/* All six conversions, with the token at the start of documents or their end; unaligned. */
static void documents_are_found(void)
{
    enum { ITEMS = 40 };
    static const uint32_t tokens[] = {0, 1, 0xFFFF, 0x10000, UINT32_MAX};
    for (int conversion = FST_U16_TO_I32_POSITIONS; conversion < FST_U8_TO_I64; conversion++)
        for (size_t pick = 0; pick < 10; pick++) {
            const fst_field field = {.items = ITEMS,
                                     .conversion = (fst_conversion)conversion,
                                     .boundary = tokens[pick / 2],
                                     .begins = pick % 2};
            const size_t width = (conversion - FST_U16_TO_I32_POSITIONS) % 3 == 2 ? 4 : 2;
            const size_t size = fst_field_row_bytes(&field) / ITEMS;
            unsigned char bytes[4 * ITEMS + 1];
            fst_column column = {(char *)bytes + 1, 0};
            fst_node node = {.kind = FST_ROWS, .length = 1, .columns = &column};
            const fst_table table = {(fst_field *)&field, 1, &node, 1};
            const fst_place place = {&node, 0};
            int64_t output[ITEMS];
            char *outputs[] = {(char *)output};
            for (size_t i = 0; i < ITEMS; i++)
                memcpy(bytes + 1 + width * i, &tokens[random_bits() % 5], width);
            fst_table_copy(&table, &place, 0, 1, outputs, 0);
            for (size_t i = 0; i < ITEMS; i++) {
                int64_t got = 0;
                memcpy(&got, (char *)output + size * i, size);
                CHECK_INT(got, divided(bytes + 1, width, &field, i));
            }
        }
}

int main(void)
{
    shuffles_are_permutations();
    keys_matter();
    all_orders_occur();
    long_shuffles_mix();
    samples_are_found();
    rows_are_streamed();
    rows_are_numbered();
    missing_samples_are_not_found();
    const fst_cpu_kernels *levels[MAX_LEVELS];
    for (size_t i = supported_levels(levels); i-- > 0;) {
        fst_table_use(levels[i]->widen);
        tokens_are_widened();
    }
    documents_are_found();
    slots_are_used_again();
    forks_are_counted();
    return check_report();
}
