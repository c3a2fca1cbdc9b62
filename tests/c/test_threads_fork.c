/* The threads that fill batches, in a process that forks. */
#include <sys/wait.h>
#include <unistd.h>

#include "batcher_batches.h"

/* A child has none of the threads; it makes a batcher of its own. */
static void a_forked_child_is_told(void)
{
    static request r;
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_batcher *batcher = fst_batcher_new(&table, pool, 2, 1, &status);
    int done, outcome = 0;
    fst_slot *slots[FIELDS];
    fill_request(&r, 1500);
    fst_batch *batch = add(batcher, &r, NULL);
    const pid_t child = fork();
    if (child == 0) {
        int right = !fst_batcher_add(batcher, r.indices, r.count, NULL, &status) &&
                    status.code == FST_UNSUPPORTED &&
                    fst_batcher_wait(batcher, batch, 1, &done, &status) == FST_UNSUPPORTED &&
                    strstr(status.message, "forked");
        fst_batcher_drop(batcher, batch);
        fst_batcher_free(batcher);
        status.code = FST_OK;
        batcher = fst_batcher_new(&table, pool, 2, 0, &status);
        batch = fst_batcher_add(batcher, r.indices, 3, NULL, &status);
        right = right && batch && !fst_batcher_wait(batcher, batch, 1000, &done, &status) && done;
        r.count = fst_batcher_take(batcher, batch, slots);
        right = right && is_right(&r, slots);
        give_back(slots);
        fst_batcher_free(batcher);
        _exit(right ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &outcome, 0) == child);
    CHECK_INT(outcome, 0);
    CHECK_INT((int64_t)take(batcher, batch, slots), (int64_t)r.count);
    CHECK(is_right(&r, slots));
    give_back(slots);
    fst_batcher_free(batcher);
    fst_slots_close(pool);
}

int main(void)
{
    fill_table();
    a_forked_child_is_told();
    return check_report();
}
