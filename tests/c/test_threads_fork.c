/* The threads that fill batches, in a process that forks. */
#include <sys/wait.h>
#include <unistd.h>

#include "crew_batches.h"

/* A child has none of the threads; it makes a crew of its own. */
static void a_forked_child_is_told(void)
{
    static request r;
    fst_status status = {0};
    fst_slots *pool = fst_slots_new(&status);
    fst_crew *crew = fst_crew_new(&table, pool, 2, 1, &status);
    uint64_t number;
    int done, outcome = 0;
    fst_slot *slots[FIELDS];
    fill_request(&r, 1500);
    CHECK_INT(fst_crew_add(crew, r.indices, r.count, NULL, &number, &status), FST_OK);
    const pid_t child = fork();
    if (child == 0) {
        int right =
            fst_crew_add(crew, r.indices, r.count, NULL, &number, &status) == FST_UNSUPPORTED &&
            fst_crew_wait(crew, 1, &done, &status) == FST_UNSUPPORTED &&
            strstr(status.message, "forked");
        fst_crew_free(crew);
        status.code = FST_OK;
        crew = fst_crew_new(&table, pool, 2, 0, &status);
        right = right && !fst_crew_add(crew, r.indices, 3, NULL, &number, &status) &&
                !fst_crew_wait(crew, 1000, &done, &status) && done;
        r.count = fst_crew_take(crew, slots);
        right = right && is_right(&r, slots);
        give_back(slots);
        fst_crew_free(crew);
        _exit(right ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &outcome, 0) == child);
    CHECK_INT(outcome, 0);
    wait_for(crew);
    CHECK_INT((int64_t)fst_crew_take(crew, slots), (int64_t)r.count);
    CHECK(is_right(&r, slots));
    give_back(slots);
    fst_crew_free(crew);
    fst_slots_close(pool);
}

int main(void)
{
    fill_table();
    a_forked_child_is_told();
    return check_report();
}
