/* Shared memory for batches: who owns a block, what is used again, and what a killed worker leaves.
 */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"
#include "io/arena.h"

enum { MEGABYTE = 1 << 20 };

static size_t take(fst_arena *arena, size_t size)
{
    fst_status status = {0};
    size_t block = SIZE_MAX;
    CHECK_INT(fst_arena_take(arena, size, &block, &status), FST_OK);
    memset(fst_arena_data(arena, block), (int)block + 1, size);
    return block;
}

static void hold(fst_arena *arena, size_t block, size_t size)
{
    fst_status status = {0};
    CHECK_INT(fst_arena_hold(arena, block, size, &status), FST_OK);
}

static void blocks_go_round(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    const size_t sizes[] = {1, 100, 5000, 3 * MEGABYTE};
    size_t blocks[4];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++)
            blocks[i] = take(arena, sizes[i]);
        for (int i = 0; i < 4; i++) {
            const unsigned char *data = fst_arena_data(arena, blocks[i]);
            CHECK_INT(data[0], (int)blocks[i] + 1);
            CHECK_INT(data[sizes[i] - 1], (int)blocks[i] + 1);
            hold(arena, blocks[i], sizes[i]);
        }
        CHECK_INT((int64_t)fst_arena_counted(arena).held, 4);
        for (int i = 0; i < 4; i++)
            fst_arena_end_hold(arena, blocks[i]);
    }
    const fst_arena_counts counts = fst_arena_counted(arena);
    CHECK_INT((int64_t)counts.made, 4);
    CHECK_INT((int64_t)counts.free, 4);
    fst_arena_drop(arena);
}

static void only_taken_blocks_are_held(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    const size_t block = take(arena, 100);
    CHECK_INT(fst_arena_hold(arena, block + 1, 100, &status), FST_BAD_VALUE);
    CHECK_INT(fst_arena_hold(arena, block, 2 * MEGABYTE, &status), FST_BAD_VALUE);
    hold(arena, block, 100);
    CHECK_INT(fst_arena_hold(arena, block, 100, &status), FST_BAD_VALUE);
    CHECK(fst_arena_pin(arena, block));
    fst_arena_end_hold(arena, block);
    CHECK_INT((int64_t)fst_arena_counted(arena).held, 1); /* the pin */
    fst_arena_end_hold(arena, block);
    CHECK_INT((int64_t)fst_arena_counted(arena).free, 1);
    CHECK(!fst_arena_pin(arena, block));
    fst_arena_drop(arena);
}

/* A tensor in a worker that somebody keeps stays the worker's. */
static void loans_end_or_leave(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    size_t block = take(arena, 100);
    fst_arena_lend(arena, block);
    fst_arena_end_loan(arena, block);
    CHECK_INT((int64_t)fst_arena_counted(arena).free, 1);
    block = take(arena, 100);
    fst_arena_lend(arena, block);
    fst_arena_send(arena, block);
    CHECK(!fst_arena_sent(arena, block)); /* it still lives */
    fst_arena_send(arena, block);
    fst_arena_end_loan(arena, block);
    CHECK(fst_arena_sent(arena, block));
    CHECK_INT((int64_t)fst_arena_counted(arena).taken, 1);
    hold(arena, block, 100);
    fst_arena_end_hold(arena, block);
    fst_arena_drop(arena);
}

/* Blocks that were kept and then dropped are more than batches on their way need. */
static void surplus_memory_goes_back(void)
{
    enum { KEPT = 40 };
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    size_t blocks[KEPT];
    for (int i = 0; i < KEPT; i++) {
        blocks[i] = take(arena, MEGABYTE);
        hold(arena, blocks[i], MEGABYTE);
    }
    CHECK(fst_arena_counted(arena).backed >= (size_t)KEPT * MEGABYTE);
    for (int i = 0; i < KEPT; i++)
        fst_arena_end_hold(arena, blocks[i]);
    CHECK(fst_arena_counted(arena).backed <= (size_t)4 * MEGABYTE);
    const size_t again = take(arena, MEGABYTE);
    CHECK(again < KEPT);
    for (int i = 0; i < 20; i++) { /* other sizes: what is free makes room */
        const size_t other = take(arena, (size_t)(i + 5) * 100000);
        hold(arena, other, 100);
        fst_arena_end_hold(arena, other);
    }
    CHECK(fst_arena_counted(arena).backed <= (size_t)12 * MEGABYTE);
    fst_arena_drop(arena);
}

static void small_data_does_not_hold_large_blocks(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    const size_t large = take(arena, MEGABYTE);
    fst_arena_give_back(arena, large);
    CHECK(take(arena, 10) != large);
    CHECK(take(arena, MEGABYTE / 3) == large);
    fst_arena_drop(arena);
}

/* What a child writes its parent reads; a killed child's blocks are found. */
static void processes_share_blocks(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    int numbers[2];
    CHECK_INT(pipe(numbers), 0);
    const pid_t child = fork();
    if (!child) {
        fst_arena *own =
            fst_arena_attach(dup(fst_arena_file(arena)), fst_arena_reserve(arena), &status);
        size_t block = take(own, 2 * MEGABYTE);
        take(own, 500); /* is never sent */
        const ssize_t written = write(numbers[1], &block, sizeof block);
        raise(written == sizeof block ? SIGKILL : SIGTERM);
    }
    size_t block = 0;
    int how = 0;
    CHECK_INT(read(numbers[0], &block, sizeof block), sizeof block);
    CHECK_INT(waitpid(child, &how, 0), child);
    CHECK(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL);
    hold(arena, block, 2 * MEGABYTE);
    const unsigned char *data = fst_arena_data(arena, block);
    CHECK_INT(data[2 * MEGABYTE - 1], (int)block + 1);
    CHECK_INT((int64_t)fst_arena_sweep(arena), 1);
    CHECK_INT((int64_t)fst_arena_counted(arena).held, 1);
    CHECK_INT((int64_t)fst_arena_counted(arena).taken, 0);
    fst_arena_end_hold(arena, block);
    fst_arena_drop(arena);
    close(numbers[0]);
    close(numbers[1]);
}

/* A limit for files stands for memory that has run out: an error, not a signal. */
static void no_memory_is_an_error(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    struct rlimit before, small = {.rlim_cur = 4 * MEGABYTE};
    size_t block = 0;
    signal(SIGXFSZ, SIG_IGN);
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &before), 0);
    small.rlim_max = before.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &small), 0);
    CHECK_INT(fst_arena_take(arena, 8 * MEGABYTE, &block, &status), FST_NO_MEMORY);
    CHECK_CONTAINS(status.message, "no shared memory: a batch");
    CHECK_INT((int64_t)fst_arena_counted(arena).taken, 0);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &before), 0);
    take(arena, 8 * MEGABYTE);
    status = (fst_status){0};
    CHECK_INT(fst_arena_take(arena, SIZE_MAX / 2, &block, &status), FST_NO_MEMORY);
    CHECK_CONTAINS(status.message, "addresses");
    CHECK_INT((int64_t)fst_arena_made(arena), 1); /* no entry of the table is lost */
    status = (fst_status){0};
    CHECK_INT(fst_arena_take(arena, SIZE_MAX, &block, &status), FST_NO_MEMORY);
    CHECK_CONTAINS(status.message, "addresses");
    status = (fst_status){0};
    CHECK_INT(fst_arena_take(arena, fst_arena_reserve(arena), &block, &status), FST_NO_MEMORY);
    CHECK_INT((int64_t)fst_arena_made(arena), 1);
    fst_arena_drop(arena);
    status = (fst_status){0};
    CHECK(!fst_arena_attach(-1, (size_t)1 << 26, &status));
    CHECK_CONTAINS(status.message, "main process");
}

/* A file that is handed over is closed, also where it is no arena. */
static void attaching_takes_the_file(void)
{
    const size_t reserves[] = {(size_t)1 << 26, 5, SIZE_MAX / 2};
    for (int i = 0; i < 3; i++) {
        fst_status status = {0};
        int ends[2];
        CHECK_INT(pipe(ends), 0);
        CHECK(!fst_arena_attach(ends[0], reserves[i], &status));
        CHECK_CONTAINS(status.message, "the arena of the main process cannot be mapped: Invalid");
        CHECK_INT(close(ends[0]), -1);
        CHECK_INT(close(ends[1]), 0);
    }
}

static void the_table_may_be_full(void)
{
    fst_status status = {0};
    fst_arena *arena = fst_arena_new(&status);
    size_t block = 0;
    for (int i = 0; i < FST_ARENA_BLOCKS && !status.code; i++)
        fst_arena_take(arena, 1, &block, &status);
    CHECK_INT(status.code, FST_OK);
    CHECK_INT(fst_arena_take(arena, 1, &block, &status), FST_NO_MEMORY);
    CHECK_CONTAINS(status.message, "kept already");
    CHECK_INT((int64_t)fst_arena_sweep(arena), FST_ARENA_BLOCKS);
    fst_arena_drop(arena);
}

int main(void)
{
    blocks_go_round();
    only_taken_blocks_are_held();
    loans_end_or_leave();
    surplus_memory_goes_back();
    small_data_does_not_hold_large_blocks();
    processes_share_blocks();
    no_memory_is_an_error();
    attaching_takes_the_file();
    the_table_may_be_full();
    fst_keep_freed_memory();
    return check_report();
}
