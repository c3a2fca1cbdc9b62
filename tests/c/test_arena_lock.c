/* Blocks that are page-locked for a device: which ones, how many, and for how long. */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"
#include "io/arena.h"

enum { MEGABYTE = 1 << 20, MOST = 256, DEVICE = 3 };

/* Stands for a driver. */
static struct {
    void *at[MOST];
    size_t count, bytes, calls, refuse_after;
} driver;

static fst_code lock(int device, void *address, size_t size, fst_status *status)
{
    CHECK_INT(device, DEVICE);
    CHECK_INT((int64_t)((uintptr_t)address % 4096 + size % 4096), 0);
    if (++driver.calls > driver.refuse_after)
        return fst_fail(status, FST_DEVICE_FAILED, "no more can be locked");
    driver.at[driver.count++] = address;
    driver.bytes += size;
    return FST_OK;
}

static void unlock(int device, void *address)
{
    size_t i = 0;
    CHECK_INT(device, DEVICE);
    while (i < driver.count && driver.at[i] != address)
        i++;
    if (CHECK(i < driver.count))
        driver.at[i] = driver.at[--driver.count];
}

static fst_arena *new_arena(size_t refuse_after)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    memset(&driver, 0, sizeof driver);
    driver.refuse_after = refuse_after;
    CHECK_INT(fst_arena_prepare_locks(arena, (fst_arena_locker){lock, unlock, DEVICE}, &status),
              FST_OK);
    CHECK_INT((int64_t)driver.calls, 1);
    CHECK_INT((int64_t)driver.count, 0); /* that was a trial */
    driver.bytes = 0;
    return arena;
}

static size_t held(fst_arena *arena, size_t size)
{
    fst_status status = {0};
    size_t block = SIZE_MAX;
    CHECK_INT(fst_arena_take(arena, size, &block, &status), FST_OK);
    memset(fst_arena_data(arena, block), (int)block + 1, size);
    CHECK_INT(fst_arena_hold(arena, block, size, &status), FST_OK);
    return block;
}

/* Where a block is locked, or NULL. */
static unsigned char *locked(fst_arena *arena, size_t block, size_t size)
{
    fst_status status = {0};
    size_t found = SIZE_MAX;
    void *at = NULL;
    CHECK_INT(fst_arena_lock(arena, fst_arena_data(arena, block), size, &found, &at, &status),
              FST_OK);
    if (at)
        CHECK_INT((int64_t)found, (int64_t)block);
    return at;
}

static void a_block_is_locked_elsewhere_and_once(void)
{
    fst_arena *arena = new_arena(MOST);
    void *before = NULL;
    for (int round = 0; round < 3; round++) {
        const size_t block = held(arena, MEGABYTE);
        unsigned char *plain = fst_arena_data(arena, block);
        unsigned char *at = locked(arena, block, MEGABYTE);
        if (!CHECK(at && at != plain))
            return;
        CHECK(at == driver.at[0] && (!before || at == before));
        CHECK_BYTES(at, plain, MEGABYTE);
        plain[5] = 99;
        CHECK_INT(at[5], 99);
        fst_arena_end_hold(arena, block); /* the batch is gone, the copy is not */
        CHECK_INT((int64_t)fst_arena_counted(arena).held, 1);
        const size_t other = held(arena, MEGABYTE);
        CHECK(other != block);
        CHECK_INT(at[5], 99);
        fst_arena_end_lock(arena, block);
        fst_arena_end_hold(arena, other);
        CHECK_INT((int64_t)fst_arena_counted(arena).held, 0);
        before = at;
    }
    CHECK_INT((int64_t)driver.calls, 2);
    CHECK_INT((int64_t)fst_arena_counted(arena).locked, 1);
    fst_arena_drop(arena);
    CHECK_INT((int64_t)driver.count, 0);
}

static void what_is_no_held_block_is_not_locked(void)
{
    fst_status status = {0};
    fst_arena *arena = new_arena(MOST);
    size_t block = 0, taken = 0;
    void *at = NULL;
    char mine[64];
    CHECK_INT(fst_arena_take(arena, 100, &taken, &status), FST_OK);
    CHECK(!locked(arena, taken, 100));
    block = held(arena, 100);
    CHECK(!locked(arena, block, MEGABYTE));
    CHECK_INT(fst_arena_lock(arena, mine, 64, &block, &at, &status), FST_OK);
    CHECK(!at);
    char *inside = (char *)fst_arena_data(arena, block) + 8;
    CHECK_INT(fst_arena_lock(arena, inside, 8, &block, &at, &status), FST_OK);
    CHECK(!at);
    CHECK_INT((int64_t)driver.calls, 1);
    fst_arena_drop(arena);

    arena = fst_arena_new(&status); /* not prepared */
    CHECK(!locked(arena, held(arena, 100), 100));
    fst_arena_drop(arena);
}

/* Of batches of many sizes no more is locked than twice what is on its way, and the rest of the
 * memory goes back to the system as ever. */
static void no_more_is_locked_than_needed(void)
{
    enum { KEPT = 40 };
    fst_arena *arena = new_arena(MOST);
    size_t blocks[KEPT];
    for (int round = 0; round < 3; round++)
        for (size_t size = MEGABYTE; size < 8 * MEGABYTE; size += MEGABYTE / 2) {
            const size_t block = held(arena, size);
            const int is_locked = locked(arena, block, size) != NULL;
            fst_arena_end_hold(arena, block);
            if (is_locked)
                fst_arena_end_lock(arena, block);
        }
    CHECK(driver.bytes > 8 * MEGABYTE);
    CHECK(driver.bytes <= (size_t)33 * MEGABYTE); /* 2 * 8 taken, 2 * 8 in use, and a little */
    for (int i = 0; i < KEPT; i++)
        blocks[i] = held(arena, 8 * MEGABYTE);
    for (int i = 0; i < KEPT; i++)
        fst_arena_end_hold(arena, blocks[i]);
    CHECK(fst_arena_counted(arena).backed <= driver.bytes + (size_t)18 * MEGABYTE);
    fst_arena_drop(arena);
    CHECK_INT((int64_t)driver.count, 0);
}

static void a_driver_that_refuses_is_asked_no_more(void)
{
    fst_status status = {0};
    fst_arena *arena = new_arena(2);
    const size_t one = held(arena, MEGABYTE), two = held(arena, MEGABYTE);
    size_t found = 0;
    void *at = NULL;
    CHECK(locked(arena, one, MEGABYTE) != NULL);
    CHECK_INT(fst_arena_lock(arena, fst_arena_data(arena, two), 1, &found, &at, &status),
              FST_DEVICE_FAILED);
    CHECK_CONTAINS(status.message, "no more can be locked");
    CHECK(!at);
    CHECK(!locked(arena, two, MEGABYTE));
    CHECK_INT((int64_t)driver.calls, 3);
    fst_arena_end_hold(arena, two);
    CHECK_INT((int64_t)fst_arena_counted(arena).held, 1);
    CHECK(locked(arena, one, MEGABYTE) != NULL); /* that is locked already */
    fst_arena_drop(arena);
    CHECK_INT((int64_t)driver.count, 0);

    arena = fst_arena_new(&status);
    driver.refuse_after = 0;
    for (int i = 0; i < 2; i++) {
        status = (fst_status){0};
        CHECK_INT(fst_arena_prepare_locks(arena, (fst_arena_locker){lock, unlock, DEVICE}, &status),
                  FST_DEVICE_FAILED);
    }
    CHECK(!locked(arena, held(arena, 100), 100));
    fst_arena_drop(arena);
}

/* A child has neither the second mapping nor a right to unlock. */
static void a_child_lets_go_of_nothing(void)
{
    fst_arena *arena = new_arena(MOST);
    const size_t block = held(arena, MEGABYTE);
    unsigned char *at = locked(arena, block, MEGABYTE), in_memory;
    int how = 0;
    const pid_t child = fork();
    if (!child) {
        const long failed = checks_failed;
        CHECK(mincore(at, 4096, &in_memory));
        CHECK(!locked(arena, block, MEGABYTE));
        fst_arena_drop(arena);
        CHECK_INT((int64_t)driver.count, 1);
        _exit(checks_failed > failed);
    }
    CHECK_INT(waitpid(child, &how, 0), child);
    CHECK_INT(how, 0);
    CHECK_INT(mincore(at, 4096, &in_memory), 0);
    fst_arena_drop(arena);
    CHECK(mincore(at, 4096, &in_memory));
}

static void what_a_device_may_read_at_the_end_stays(void)
{
    fst_arena *arena = new_arena(MOST);
    const size_t block = held(arena, MEGABYTE);
    const unsigned char *at = locked(arena, block, MEGABYTE);
    fst_arena_keep_locked(1);
    fst_arena_drop(arena);
    fst_arena_keep_locked(0);
    CHECK_INT((int64_t)driver.count, 1);
    CHECK_INT(at[MEGABYTE - 1], (int)block + 1);
}

int main(void)
{
    a_block_is_locked_elsewhere_and_once();
    what_is_no_held_block_is_not_locked();
    no_more_is_locked_than_needed();
    a_driver_that_refuses_is_asked_no_more();
    a_child_lets_go_of_nothing();
    what_a_device_may_read_at_the_end_stays();
    return check_report();
}
