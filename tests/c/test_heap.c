/* The heap of large blocks: what it hands out, keeps and gives back; and control groups. */
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory/cgroup.h"
#include "memory/heap.h"

enum { PAGE = FST_HEAP_PAGE, MEGABYTE = 1 << 20, RANGE = 512 << 20, SLOTS = 64, ROUNDS = 20000 };

/* How many bytes have this value. What the system took back reads as zeros. mincore cannot tell:
 * the system may put fresh pages there at any time, as khugepaged makes huge pages of small ones.
 */
static int64_t bytes_with(char value, const char *at, size_t bytes)
{
    int64_t found = 0;
    for (size_t i = 0; i < bytes; i++)
        found += at[i] == value;
    return found;
}

static void test_before_open(void)
{
    int other = 0;
    CHECK(!fst_heap_take(MEGABYTE));
    CHECK(!fst_heap_owns(&other));
    CHECK_INT((int64_t)fst_heap_give(&other), 0);
    CHECK_INT((int64_t)fst_heap_trim(0), 0);
    CHECK_INT(fst_heap_open(1), EINVAL);
    CHECK_INT(fst_heap_open(SIZE_MAX / 2), EINVAL);
    CHECK_INT(fst_heap_open(RANGE), 0);
    CHECK_INT(fst_heap_open(RANGE), 0);
}

static void test_kept_and_used_again(void)
{
    char *block = fst_heap_take(10 * MEGABYTE);
    CHECK(block && (uintptr_t)block % PAGE == 0 && fst_heap_owns(block));
    memset(block, 1, 10 * MEGABYTE);
    CHECK_INT((int64_t)fst_heap_give(block + 1), 0);
    CHECK_INT((int64_t)fst_heap_give(block + PAGE), 0);
    CHECK_INT((int64_t)fst_heap_give(block), 10 * MEGABYTE);
    CHECK_INT((int64_t)fst_heap_give(block), 0);
    CHECK_INT((int64_t)fst_heap_count().kept, 10 * MEGABYTE);
    const size_t fresh = fst_heap_count().fresh;
    char *again = fst_heap_take(6 * MEGABYTE), *rest = fst_heap_take(4 * MEGABYTE);
    CHECK(again == block && rest == block + 6 * MEGABYTE);
    CHECK_INT((int64_t)fst_heap_count().kept, 0);
    CHECK_INT((int64_t)(fst_heap_count().fresh - fresh), 0);
    fst_heap_give(again);
    fst_heap_give(rest);
    CHECK_INT((int64_t)fst_heap_trim(4 * MEGABYTE), 6 * MEGABYTE);
    CHECK_INT(bytes_with(1, block, 4 * MEGABYTE), 4 * MEGABYTE);
    CHECK(fst_heap_take(10 * MEGABYTE) == block);
    CHECK_INT(bytes_with(0, block + 4 * MEGABYTE, 6 * MEGABYTE), 6 * MEGABYTE);
    fst_heap_give(block);
    CHECK_INT((int64_t)fst_heap_trim(0), 10 * MEGABYTE);
    CHECK(fst_heap_take(10 * MEGABYTE) == block);
    CHECK_INT(bytes_with(0, block, 10 * MEGABYTE), 10 * MEGABYTE);
    fst_heap_give(block);
    fst_heap_trim(0);
}

static void test_limit(void)
{
    fst_heap_limit(3 * MEGABYTE);
    char *a = fst_heap_take(4 * MEGABYTE), *b = fst_heap_take(4 * MEGABYTE);
    CHECK(a && b);
    fst_heap_give(a);
    CHECK_INT((int64_t)fst_heap_count().kept, 3 * MEGABYTE);
    fst_heap_limit(0);
    fst_heap_give(b);
    CHECK_INT((int64_t)fst_heap_count().kept, 0);
    fst_heap_limit(SIZE_MAX);
}

/* What never fits again does not pile up: blocks and what is kept stay near the peak of blocks. */
static void test_bound(void)
{
    char *wall[SLOTS];
    fst_heap_trim(0);
    for (size_t i = 0; i < SLOTS; i++) { /* larger each time, with a block between */
        char *block = fst_heap_take((i + 1) * MEGABYTE / 2);
        wall[i] = fst_heap_take(PAGE);
        CHECK(block && wall[i]);
        fst_heap_give(block);
        const fst_heap_counts counts = fst_heap_count();
        CHECK(counts.used + counts.kept <= counts.peak + counts.peak / 16 + (17u << 20));
    }
    for (size_t i = 0; i < SLOTS; i++)
        fst_heap_give(wall[i]);
    CHECK_INT((int64_t)fst_heap_count().used, 0);
}

static void test_sizes(void)
{
    const size_t sizes[] = {1, PAGE - 1, PAGE, PAGE + 1, 8 * PAGE, 9 * PAGE, 2 * MEGABYTE + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *block = fst_heap_take(sizes[i]);
        CHECK(block != NULL);
        block[0] = block[sizes[i] - 1] = 1;
        const size_t size = fst_heap_give(block);
        CHECK(size >= sizes[i] && size < sizes[i] + PAGE);
    }
    CHECK(!fst_heap_take(0));
    CHECK(!fst_heap_take(RANGE));
    CHECK(!fst_heap_take(SIZE_MAX));
    CHECK(!fst_heap_take((size_t)UINT32_MAX * PAGE + MEGABYTE));
}

/* Blocks never overlap, whatever the order in which they come and go. */
static void test_random(void)
{
    struct {
        char *at;
        size_t size;
        char mark;
    } slots[SLOTS] = {0};
    unsigned seed = 1;
    for (int round = 0; round < ROUNDS; round++) {
        seed = seed * 1103515245u + 12345u;
        const size_t i = (seed >> 8) % SLOTS, size = ((seed >> 14) % 300 + 1) * 7000;
        if (slots[i].at) {
            CHECK(slots[i].at[0] == slots[i].mark &&
                  slots[i].at[slots[i].size - 1] == slots[i].mark);
            fst_heap_give(slots[i].at);
            slots[i].at = NULL;
        } else if ((slots[i].at = fst_heap_take(size))) {
            slots[i].size = size;
            slots[i].mark = (char)round;
            slots[i].at[0] = slots[i].at[size - 1] = (char)round;
        }
        if (round % 1000 == 0)
            fst_heap_trim(MEGABYTE);
    }
    for (size_t i = 0; i < SLOTS; i++)
        if (slots[i].at)
            fst_heap_give(slots[i].at);
    const fst_heap_counts counts = fst_heap_count();
    CHECK_INT((int64_t)counts.used, 0);
    CHECK_INT((int64_t)counts.blocks, 0);
    CHECK_INT((int64_t)fst_heap_trim(0), (int64_t)counts.kept);
    char *all = fst_heap_take(400u << 20); /* everything has been put together again */
    CHECK(all != NULL);
    fst_heap_give(all);
    fst_heap_trim(0);
}

static void test_fork(void)
{
    char *used = fst_heap_take(MEGABYTE), *kept = fst_heap_take(4 * MEGABYTE);
    memset(used, 7, MEGABYTE);
    memset(kept, 7, 4 * MEGABYTE);
    fst_heap_give(kept);
    fst_heap_before_fork();
    const pid_t child = fork();
    fst_heap_after_fork(child == 0);
    if (child == 0) {
        char *block = fst_heap_take(MEGABYTE);
        const int good = used[5] == 7 && block && fst_heap_count().kept == 0;
        fst_heap_give(used);
        _exit(good ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK_INT(status, 0);
    CHECK_INT(used[5], 7);
    CHECK_INT(kept[5], 7);
    fst_heap_give(used);
    fst_heap_trim(0);
}

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void test_groups(void)
{
    char folder[] = "/tmp/faststep-group-XXXXXX", longer[600];
    fst_cgroup group;
    CHECK(mkdtemp(folder) != NULL);
    CHECK_INT(fst_cgroup_at(&group, folder, 2), 0);
    CHECK(fst_cgroup_read(&group).left == SIZE_MAX); /* no files */
    write_file(folder, "memory.max", "max\n");
    write_file(folder, "memory.current", "900\n");
    CHECK(fst_cgroup_read(&group).left == SIZE_MAX);
    write_file(folder, "memory.max", "8000\n");
    CHECK_INT((int64_t)fst_cgroup_read(&group).left, 7100);
    write_file(folder, "memory.current", "7900\n");
    CHECK_INT((int64_t)fst_cgroup_read(&group).left, 100);
    write_file(folder, "memory.stat", "anon 5\ninactive_file 1000\nactive_file 500\n");
    CHECK_INT((int64_t)fst_cgroup_read(&group).left, 1600);
    write_file(folder, "memory.current", "9000\n");
    write_file(folder, "memory.stat", "anon 5\n");
    CHECK_INT((int64_t)fst_cgroup_read(&group).left, 0);
    CHECK_INT(fst_cgroup_at(&group, folder, 1), 0);
    write_file(folder, "memory.limit_in_bytes", "1000\n");
    write_file(folder, "memory.usage_in_bytes", "990\n");
    write_file(folder, "memory.stat", "inactive_file 1\ntotal_inactive_file 40\n");
    CHECK_INT((int64_t)fst_cgroup_read(&group).left, 50);
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = 0;
    CHECK_INT(fst_cgroup_at(&group, longer, 2), -1);
}

int main(void)
{
    test_before_open();
    test_kept_and_used_again();
    test_limit();
    test_bound();
    test_sizes();
    test_random();
    test_fork();
    test_groups();
    return check_report();
}
