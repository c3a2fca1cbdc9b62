/* Passes of fixed sizes, one after another, for a tool that counts instructions: it counts inside
 * measured(), and begins anew at each return from it. The names of the passes are printed in their
 * order. See benchmarks/instructions.py; as an argument it takes the instruction set. */
#include "common.h"
#include "core/rule_args.h"
#include "core/passes.h"

enum { LARGE = 4 * FST_CHUNK, SMALL = 64, MANY = 500 };

typedef struct {
    fst_plan plan;
    fst_update_args args;
    double number;
    int how;
} task;

typedef fst_code (*pass)(task *t, fst_status *status);

static double *expected; /* sums of squares of the chunks */

/* The same names in each program, for the counting tool. */
__attribute__((noinline)) void measured(pass run, task *t, fst_status *status);

void measured(pass run, task *t, fst_status *status)
{
    CHECK_INT(run(t, status), FST_OK);
}

static fst_code run_measure(task *t, fst_status *status)
{
    fst_measurement out;
    return fst_measure(&t->plan, 0, t->number, &out, status);
}

static fst_code run_unscale(task *t, fst_status *status)
{
    fst_measurement out;
    return fst_unscale(&t->plan, 0, t->number, &out, status);
}

static fst_code run_norm(task *t, fst_status *status)
{
    double norm;
    return fst_total_norm(&t->plan, 0, t->number, &norm, status);
}

static fst_code run_clip_expected(task *t, fst_status *status)
{
    double norm;
    int done;
    return fst_clip_expected(&t->plan, 0, expected, 0.5, &norm, &done, status);
}

static fst_code run_scale(task *t, fst_status *status)
{
    return fst_scale(&t->plan, 0, t->number, status);
}

static fst_code run_clamp(task *t, fst_status *status)
{
    return fst_clamp(&t->plan, 0, t->number, status);
}

static fst_code run_accumulate(task *t, fst_status *status)
{
    return fst_accumulate(&t->plan, t->number, t->how, status);
}

static fst_code run_update(task *t, fst_status *status)
{
    return fst_update(&t->plan, &t->args, t->number, t->how, status);
}

/* Sealing a plan whose counts have changed, which makes the chunk list. */
static fst_code run_seal(task *t, fst_status *status)
{
    t->plan.stale = 1;
    t->plan.sealed = 0;
    return fst_plan_seal(&t->plan, 0, 1, status);
}

/* Spans of elements of 0.5, whose memory is never freed: the program ends soon. */
static task *task_new(unsigned width, const fst_dtype *dtypes, const char *used, int64_t count,
                      size_t spans, double number, int how)
{
    fst_status status = {0};
    task *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    fst_plan_init(&t->plan, width);
    for (size_t s = 0; s < spans; s++) {
        fst_operand *ops = fst_plan_add(&t->plan, count, 0, &status);
        for (unsigned k = 0; CHECK(ops != NULL) && k < width; k++) {
            if (!used[k])
                continue;
            const size_t size = fst_dtype_size(dtypes[k]);
            unsigned char *data = aligned_alloc(64, ((size_t)count * size + 63) / 64 * 64);
            for (int64_t i = 0; CHECK(data != NULL) && i < count; i++)
                store_value(data + (size_t)i * size, dtypes[k], 0.5);
            ops[k] = (fst_operand){.data = data, .dtype = dtypes[k]};
        }
    }
    CHECK_INT(fst_plan_seal(&t->plan, 0, 1, &status), FST_OK);
    t->number = number;
    t->how = how;
    return t;
}

static task *one_operand(fst_dtype dtype, int64_t count, size_t spans, double number)
{
    return task_new(1, &dtype, "\1", count, spans, number, 0);
}

/* Adam's update of an fp32 parameter, or a bf16 one with its remainder, beside states of a type. */
static task *adam_beside(int halves, fst_dtype state, int in_codes)
{
    const fst_dtype param = halves ? FST_BF16 : FST_F32;
    const fst_dtype dtypes[FST_OP_COUNT] = {param, param, (fst_dtype)FST_I16, state, state, state};
    const char used[FST_OP_COUNT] = {1, 1, (char)halves, 1, 1, 0};
    const double hyper[FST_MAX_HYPER] = {0.01, 0.9, 0.99, 1e-8, 0.01, 1.0};
    task *t = task_new(FST_OP_COUNT, dtypes, used, LARGE, 1, 1.0, 0);
    t->args = (fst_update_args){.rule = FST_RULE_adam, .clip_coefficient = 0.5, .sign = 1.0};
    fst_rule_fill_args(&t->args, hyper, 3.0);
    for (unsigned k = 0; in_codes && k < 2; k++) { /* with signs, and of roots */
        fst_operand *op = &t->plan.operands[FST_OP_STATE + k];
        op->scales = calloc(LARGE / 64, sizeof *op->scales);
        op->dtype = k ? FST_U8 : FST_I8;
    }
    return t;
}

static task *update_of(fst_rule rule, fst_dtype dtype, int64_t count, size_t spans)
{
    fst_dtype dtypes[FST_OP_COUNT];
    char used[FST_OP_COUNT] = {[FST_OP_PARAM] = 1, [FST_OP_GRAD] = 1};
    const double hyper[FST_MAX_HYPER] = {0.01, 0.9, 0.99, 1e-8, 0.01, 1.0};
    for (unsigned k = 0; k < FST_OP_COUNT; k++)
        dtypes[k] = dtype;
    for (unsigned k = 0; k < fst_rules[rule].states; k++)
        used[FST_OP_STATE + k] = 1;
    task *t = task_new(FST_OP_COUNT, dtypes, used, count, spans, 1.0, 0);
    t->args = (fst_update_args){.rule = rule, .clip_coefficient = 0.5, .sign = 1.0};
    fst_rule_fill_args(&t->args, hyper, 3.0);
    return t;
}

/* Once before it is counted, so that what is made at first is there. */
static void count(const char *name, const char *suffix, pass run, task *t)
{
    fst_status status = {0};
    CHECK_INT(run(t, &status), FST_OK);
    printf("%s%s\n", name, suffix);
    measured(run, t, &status);
}

static void count_reductions(void)
{
    task *t = one_operand(FST_F32, LARGE, 1, 1.0);
    expected = must_alloc(t->plan.chunk_count * sizeof *expected);
    count("measure fp32", "", run_measure, t);
    memcpy(expected, t->plan.partial, t->plan.chunk_count * sizeof *expected);
    count("clip_expected fp32", "", run_clip_expected, t);
    count("unscale fp32", "", run_unscale, one_operand(FST_F32, LARGE, 1, 1.0));
    count("norm 2 fp32", "", run_norm, one_operand(FST_F32, LARGE, 1, 2.0));
    count("norm inf fp32", "", run_norm, one_operand(FST_F32, LARGE, 1, INFINITY));
    count("scale fp32", "", run_scale, one_operand(FST_F32, LARGE, 1, 0.5));
    count("scale bf16", "", run_scale, one_operand(FST_BF16, LARGE, 1, 0.5));
    count("clamp fp32", "", run_clamp, one_operand(FST_F32, LARGE, 1, 0.25));
    count("measure fp32", ", small", run_measure, one_operand(FST_F32, SMALL, MANY, 1.0));
    count("seal", ", small", run_seal, one_operand(FST_F32, SMALL, MANY, 1.0));
}

static void count_sums(void)
{
    static const fst_dtype mixed[] = {FST_F32, FST_BF16, FST_BF16};
    for (int start = 0; start < 2; start++)
        count(start ? "start of fp32 with bf16" : "fp32 += bf16", "", run_accumulate,
              task_new(2, mixed, "\1\1", LARGE, 1, 0.5, start));
    count("fp32 += bf16, bf16", "", run_accumulate, task_new(3, mixed, "\1\1\1", LARGE, 1, 0.5, 0));
}

static void count_updates(void)
{
    for (unsigned r = 0; r < FST_RULE_COUNT; r++) {
        char name[64];
        snprintf(name, sizeof name, "update %s", fst_rules[r].name);
        count(name, " fp32", run_update, update_of((fst_rule)r, FST_F32, LARGE, 1));
        count(name, " bf16", run_update, update_of((fst_rule)r, FST_BF16, LARGE, 1));
        count(name, " fp32, small", run_update, update_of((fst_rule)r, FST_F32, SMALL, MANY));
    }
    count("update adam fp32 beside bf16", "", run_update, adam_beside(0, FST_BF16, 0));
    task *noisy = adam_beside(0, FST_BF16, 0);
    noisy->args.noisy = 1;
    count("update adam fp32 beside bf16", " by noise", run_update, noisy);
    count("update adam fp32 beside codes", "", run_update, adam_beside(0, FST_BF16, 1));
    count("update adam in halves", " beside fp32", run_update, adam_beside(1, FST_F32, 0));
    count("update adam in halves", " beside bf16", run_update, adam_beside(1, FST_BF16, 0));
    count("update adam in halves", " beside codes", run_update, adam_beside(1, FST_BF16, 1));
}

int main(int count_of_arguments, char **arguments)
{
    const fst_cpu_kernels *kernels = fst_cpu_select(count_of_arguments > 1 ? arguments[1] : "base");
    if (!kernels) {
        fprintf(stderr, "this machine and build do not run that instruction set\n");
        return 2;
    }
    fst_cpu = kernels;
    count_reductions();
    count_sums();
    count_updates();
    return check_report();
}
