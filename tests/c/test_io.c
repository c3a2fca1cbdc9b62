/* Rows of tables, and slots: csrc/io but for its threads, orders and conversions. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"
#include "io/slots.h"
#include "io/table.h"

MALLOC_MAY_FAIL

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

int main(void)
{
    rows_are_streamed();
    missing_samples_are_not_found();
    slots_are_used_again();
    forks_are_counted();
    return check_report();
}
