/* What the simulator with fibers must find: every planted mistake, and nothing in a right kernel.
 */
#include "../cuda/bugs.h"
#include "../cuda/child.h"
#include "check.h"
#include "simt.h"

#include <stdlib.h>

enum { GRID = 3, NUMBERS = GRID * FST_DEVICE_BLOCK + 1 };

static double *numbers;

static int run(const char *name, unsigned grid, unsigned right)
{
    uint32_t ticket = 0;
    const bug_launch launch = {numbers, &ticket, right};
    memset(numbers, 0, NUMBERS * sizeof *numbers);
    return simt_launch(simt_find(name), grid, FST_DEVICE_BLOCK, &launch);
}

static void is_reported(const char *name, const char *message)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        simt_shuffle_by(seed);
        CHECK_INT(run(name, GRID, 0), -1);
        CHECK_CONTAINS(simt_error(), name);
        CHECK_CONTAINS(simt_error(), message);
    }
    simt_shuffle_by(0);
}

/* Without the barrier some thread sees the poison, whatever the order. */
static void a_missing_barrier_shows(void)
{
    for (unsigned right = 0; right < 2; right++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            int wrong = 0;
            simt_shuffle_by(seed);
            CHECK_INT(run("bug_missing_barrier", 1, right), 0);
            for (unsigned i = 0; i < FST_DEVICE_BLOCK; i++)
                wrong += !(numbers[i] == (double)((i + 1) % FST_DEVICE_BLOCK));
            CHECK(right ? wrong == 0 : wrong > 0);
        }
    simt_shuffle_by(0);
}

static void shared_memory_is_poisoned_for_every_block(void)
{
    CHECK_INT(run("bug_fresh_shared", GRID, 0), 0);
    for (unsigned i = 0; i < GRID; i++)
        CHECK(isnan(numbers[i]));
}

static void right_kernels_pass(void)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        simt_shuffle_by(seed);
        CHECK_INT(run("bug_missing_fence", GRID, 1), 0);
        CHECK(numbers[0] == GRID * FST_DEVICE_BLOCK);
    }
    simt_shuffle_by(0);
}

static void impossible_launches_are_refused(void)
{
    const bug_launch launch = {numbers, NULL, 1};
    const simt_kernel *kernel = simt_find("bug_fresh_shared");
    CHECK(simt_find("no_such_kernel") == NULL);
    CHECK_INT(simt_launch(kernel, 0, 256, &launch), -1);
    CHECK_INT(simt_launch(kernel, 1, 0, &launch), -1);
    CHECK_INT(simt_launch(kernel, 1, 2048, &launch), -1);
    CHECK_INT(simt_launch(kernel, 1, 100, &launch), -1);
}

/* AddressSanitizer ends the program. */
static void steps_too_far_are_found(const char *program)
{
#if defined(__SANITIZE_ADDRESS__)
    CHECK_INT(status_of_child(program, "bug_beyond_memory", "0"), 0);
    CHECK_INT(status_of_child(program, "bug_beyond_memory", "514"), 1);
    CHECK_INT(status_of_child(program, "bug_beyond_shared", "0"), 0);
    CHECK_INT(status_of_child(program, "bug_beyond_shared", "2"), 1);
#else
    CHECK_INT(status_of_child(program, "bug_beyond_memory", "0"), 0);
#endif
}

/* UndefinedBehaviorSanitizer ends the program. */
static void words_out_of_line_are_found(const char *program)
{
    CHECK_INT(status_of_child(program, "bug_misaligned_word", "0"), 0);
#if defined(SANITIZE_UNDEFINED)
    CHECK_INT(status_of_child(program, "bug_misaligned_word", "1"), 1);
#endif
    CHECK_INT(status_of_child(program, "bug_misaligned_word", "2"), 0);
}

int main(int count, char **arguments)
{
    numbers = malloc(NUMBERS * sizeof *numbers);
    if (!numbers)
        return 1;
    if (count == 3) {
        const int failed = run(arguments[1], 1, (unsigned)atoi(arguments[2]));
        free(numbers);
        return failed;
    }
    is_reported("bug_two_barriers", "threads wait at lines");
    is_reported("bug_leaves_early", "threads left while others wait");
    is_reported("bug_half_a_shuffle", "some threads wait in a shuffle");
    a_missing_barrier_shows();
    shared_memory_is_poisoned_for_every_block();
    right_kernels_pass();
    impossible_launches_are_refused();
    steps_too_far_are_found(arguments[0]);
    words_out_of_line_are_found(arguments[0]);
    free(numbers);
    return check_report();
}
