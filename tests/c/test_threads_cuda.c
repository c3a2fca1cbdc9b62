/* The kernels with a thread of the system for every thread of the grid: the results of the CPU and,
 * under ThreadSanitizer, no race; but a race wherever one is planted. */
#include "../cuda/bugs.h"
#include "../cuda/child.h"
#include "../cuda/models.h"

enum { GRID = 3, RACE = 66 /* how ThreadSanitizer ends a program */ };

static void steps(fst_dtype dtype, placement how)
{
    const kind k = {dtype, dtype, dtype, how, random_unit, -1, NULL};
    const options o = {1024.0, 0.0, 0.5, .measure_found_inf = 1, .write_grad = 1};
    model *start = new_model(FST_RULE_adam);
    add_param(start, 0, 3000, &k);
    add_param(start, 1, 0, &k);
    add_param(start, 2, 17000, &k);
    model *got = model_clone(start), *want = model_clone(start);
    const outcome seen = device_step(got, &o, GRID), expected = cpu_step(want, &o);
    CHECK(same_step(got, &seen, want, &expected));
    model_free(start);
    model_free(got);
    model_free(want);
}

/* Of four chunks, which go by blocks or, in a grid of one block, by warps. */
static void norms_and_unscaling(unsigned grid)
{
    fst_plan plan;
    device d;
    array *a = array_new_aligned(FST_BF16, 50000);
    array_fill(a, random_unit);
    device_make_of(&d, &plan, a);
    for (int i = FST_NORM_SQUARES; i <= FST_NORM_NONZERO; i++) {
        const fst_norm_launch norm = {.tables = d.tables, .kind = i};
        device_launch(&d, "fst_norm", grid, &norm);
        CHECK(d.outcome->norm >= 0.0);
    }
    const fst_unscale_launch unscale = {.tables = d.tables, .factor = 0.5};
    const fst_clamp_launch clamp = {.tables = d.tables, .limit = 0.125};
    device_launch(&d, "fst_unscale", grid, &unscale);
    device_launch(&d, "fst_clamp", grid, &clamp);
    CHECK(fabs(get(&a->op, 49999)) <= 0.125);
    device_free(&d);
    fst_plan_free(&plan);
    array_free(a);
}

static int run_bug(const char *name, unsigned right)
{
    uint32_t ticket = 0;
    double *numbers = must_alloc((GRID * FST_DEVICE_BLOCK + 1) * sizeof *numbers);
    const bug_launch launch = {numbers, &ticket, right};
    numbers[0] = 0.0;
    const int failed = simt_launch(simt_find(name), GRID, FST_DEVICE_BLOCK, &launch);
    const int wrong = !strcmp(name, "bug_missing_fence") && numbers[0] != GRID * FST_DEVICE_BLOCK;
    free(numbers);
    return failed || wrong;
}

static void races_are_found(const char *program)
{
#if defined(__SANITIZE_THREAD__)
    const int race = RACE;
    CHECK_INT(status_of_child(program, "bug_missing_barrier", "0"), race);
    CHECK_INT(status_of_child(program, "bug_adds_at_once", "0"), race);
    CHECK_INT(status_of_child(program, "bug_missing_fence", "2"), race);
    CHECK_INT(status_of_child(program, "bug_missing_fence", "3"), race);
#endif
    CHECK_INT(status_of_child(program, "bug_missing_barrier", "1"), 0);
    CHECK_INT(status_of_child(program, "bug_missing_fence", "1"), 0);
}

int main(int count, char **arguments)
{
    if (count == 3)
        return run_bug(arguments[1], (unsigned)atoi(arguments[2]));
    races_are_found(arguments[0]);
    fst_cpu = fst_cpu_select(NULL);
    steps(FST_F32, ALIGNED);
    steps(FST_F16, MISALIGNED);
    steps(FST_F64, BY_COLUMNS);
    norms_and_unscaling(1);
    norms_and_unscaling(GRID);
    return check_report();
}
