/* The plan: its chunk list, what it keeps between steps, and the rounds of spans that share memory.
 */
#include "common.h"
#include "core/passes.h"
#include "core/rule_args.h"

static fst_status status;

/* Adds a span whose operand 0 lies at `data`; the other operands stay absent. */
static void add(fst_plan *plan, void *data, int64_t count, fst_dtype dtype)
{
    fst_operand *op = fst_plan_add(plan, count, 0, &status);
    if (CHECK(op != NULL))
        op[0] = (fst_operand){.data = data, .dtype = dtype};
}

static void seal(fst_plan *plan)
{
    CHECK_INT(fst_plan_seal(plan, 0, 1, &status), FST_OK);
}

/* Every element of every span once, in order within a span, spans in order within a round. */
static void chunks_are_sound(const fst_plan *plan)
{
    const fst_work work = fst_plan_work(plan);
    int64_t *done = must_alloc((work.span_count + 1) * sizeof *done);
    uint64_t cost = 0;
    int64_t wrong = 0;
    memset(done, 0, (work.span_count + 1) * sizeof *done);
    CHECK_INT(work.rounds[0], 0);
    CHECK_INT(work.rounds[work.round_count], (int64_t)work.chunk_count);
    for (size_t round = 0; round < work.round_count; round++)
        for (size_t i = work.rounds[round]; i < work.rounds[round + 1]; i++) {
            const fst_chunk *chunk = &work.chunks[i];
            const int64_t left = work.spans[chunk->span].count - chunk->begin;
            wrong += chunk->cost != cost;
            wrong += chunk->begin != done[chunk->span];
            wrong += chunk->count != (left < FST_CHUNK ? left : FST_CHUNK);
            wrong += i > work.rounds[round] && chunk->span < chunk[-1].span;
            done[chunk->span] += chunk->count;
            cost += chunk->count + FST_CHUNK_COST;
        }
    wrong += work.chunks[work.chunk_count].cost != cost;
    for (size_t i = 0; i < work.span_count; i++)
        wrong += done[i] != work.spans[i].count;
    CHECK_INT(wrong, 0);
    free(done);
}

/* The list is kept exactly while the counts and the memory stay the same: a mark survives. */
static int kept_its_chunks(fst_plan *plan, float *data, const int64_t *counts, size_t span_count)
{
    const uint64_t mark = 12345;
    plan->chunks[0].cost = mark;
    fst_plan_begin(plan);
    for (size_t i = 0; i < span_count; i++) {
        add(plan, data, counts[i], FST_F32);
        data += counts[i];
    }
    seal(plan);
    const int kept = plan->chunks[0].cost == mark;
    if (kept)
        plan->chunks[0].cost = 0;
    chunks_are_sound(plan);
    return kept;
}

static void chunk_list_is_reused(void)
{
    static float data[400000];
    const int64_t counts[] = {1, 16384, 16385, 100000, 7}, other[] = {1, 16384, 16385, 100001, 7};
    fst_plan plan;
    fst_plan_init(&plan, FST_OP_COUNT);
    fst_plan_begin(&plan);
    add(&plan, data, 5, FST_F32);
    seal(&plan);
    chunks_are_sound(&plan);
    CHECK(!kept_its_chunks(&plan, data, counts, 5));
    CHECK(kept_its_chunks(&plan, data, counts, 5));
    CHECK(!kept_its_chunks(&plan, data, other, 5));
    CHECK(kept_its_chunks(&plan, data, other, 5));
    CHECK(!kept_its_chunks(&plan, data, other, 4));
    CHECK(!kept_its_chunks(&plan, data, other, 5));
    fst_plan_begin(&plan); /* a step that fails half-way, with another count */
    add(&plan, data, 3, FST_F32);
    CHECK(!kept_its_chunks(&plan, data, other, 5));
    CHECK_INT((int64_t)plan.chunk_count, 1 + 1 + 2 + 7 + 1);
    fst_plan_begin(&plan);
    seal(&plan);
    chunks_are_sound(&plan);
    CHECK_INT((int64_t)plan.chunk_count, 0);
    fst_plan_free(&plan);
    CHECK(plan.chunks == NULL && plan.span_count == 0);
}

/* Many tiny spans, then one of more elements than 32 bits count: no memory is touched. */
static void large_plans(void)
{
    char here;
    fst_plan plan;
    fst_plan_init(&plan, 1);
    fst_plan_begin(&plan);
    for (size_t i = 0; i < 10000; i++)
        add(&plan, &here + 64 * i, 1 + (int64_t)(i % 9), FST_F32);
    seal(&plan);
    chunks_are_sound(&plan);
    CHECK_INT((int64_t)plan.chunk_count, 10000);
    fst_plan_begin(&plan);
    add(&plan, &here, (INT64_C(1) << 33) + 5, FST_BF16);
    seal(&plan);
    chunks_are_sound(&plan);
    CHECK_INT((int64_t)plan.chunk_count, (INT64_C(1) << 19) + 1);
    CHECK_INT(plan.chunks[1 << 19].begin, INT64_C(1) << 33);
    fst_plan_begin(&plan);
    add(&plan, &here, INT64_C(1) << 46, FST_BF16);
    CHECK_INT(fst_plan_seal(&plan, 0, 1, &status), FST_UNSUPPORTED);
    CHECK_CONTAINS(status.message, "2^32 chunks");
    status = (fst_status){.code = FST_OK};
    fst_plan_begin(&plan);
    add(&plan, &here, 20000, FST_BF16);
    seal(&plan);
    chunks_are_sound(&plan);
    fst_plan_free(&plan);
}

/* Elements [begin, begin + step * count) of one buffer, and the round they must be in. */
typedef struct {
    int64_t begin, count, step;
    uint32_t round;
} piece;

/* Steps the pieces of a buffer in one plan: as if one after another. */
static void pieces_keep_their_order(const piece *pieces, size_t count, size_t round_count)
{
    enum { SIZE = 60000 };
    const double hyper[FST_MAX_HYPER] = {0.5};
    fst_update_args args = {.rule = FST_RULE_sgd, .clip_coefficient = 1.0, .sign = 1.0};
    fst_rule_fill_args(&args, hyper, 1.0);
    array *got = array_new(FST_F32, FLAT, SIZE), *grad = array_new(FST_F32, FLAT, SIZE);
    array_fill(got, random_unit);
    array_fill(grad, random_unit);
    array *want = array_clone(got);
    fst_layout *layouts = must_alloc(count * sizeof *layouts);
    fst_plan plan;
    fst_plan_init(&plan, FST_OP_COUNT);
    fst_plan_begin(&plan);
    for (size_t i = 0; i < count; i++) {
        fst_operand *op = fst_plan_add(&plan, pieces[i].count, 0, &status);
        layouts[i] = (fst_layout){1, {pieces[i].count}, {pieces[i].step}, 0};
        op[FST_OP_GRAD] = grad->op;
        op[FST_OP_PARAM].data = element_at(&got->op, pieces[i].begin);
        if (pieces[i].step != 1)
            op[FST_OP_PARAM].layout = &layouts[i];
        for (int64_t k = 0, at = pieces[i].begin; k < pieces[i].count; k++, at += pieces[i].step)
            set(&want->op, at, get(&want->op, at) - 0.5 * get(&grad->op, k));
    }
    seal(&plan);
    chunks_are_sound(&plan);
    CHECK_INT((int64_t)plan.round_count, (int64_t)round_count);
    for (size_t round = 0; round < plan.round_count; round++)
        for (size_t i = plan.rounds[round]; i < plan.rounds[round + 1]; i++)
            CHECK_INT((int64_t)round, pieces[plan.chunks[i].span].round);
    CHECK_INT(fst_update(&plan, &args, 1.0, 0, &status), FST_OK);
    CHECK(same_memory(got, want));
    fst_plan_free(&plan);
    free(layouts);
    array_free(want);
    array_free(grad);
    array_free(got);
}

static void rounds(void)
{
    const piece apart[] = {{0, 100, 1, 0}, {100, 20000, 1, 0}, {20100, 5, 3, 0}, {20113, 9, 1, 0}};
    const piece twice[] = {{0, 30000, 1, 0}, {40000, 9, 1, 0}, {0, 30000, 1, 1}, {0, 30000, 1, 2}};
    const piece shifted[] = {{100, 200, 1, 0}, {299, 200, 1, 1}, {300, 10, 1, 2}, {0, 100, 1, 0}};
    const piece around[] = {{0, 50000, 1, 0}, {10, 1, 1, 1}, {20, 1, 1, 1}, {49999, 2, 1, 1}};
    const piece inside[] = {{10, 1, 1, 0}, {20, 1, 1, 0}, {0, 50000, 1, 1}, {11, 9, 1, 2}};
    const piece strided[] = {{0, 20000, 3, 0}, {59997, 1, 1, 1}, {59998, 1, 1, 0}, {3, 3, 3, 1}};
    pieces_keep_their_order(apart, 4, 1);
    pieces_keep_their_order(twice, 4, 3);
    pieces_keep_their_order(shifted, 4, 3);
    pieces_keep_their_order(around, 4, 2);
    pieces_keep_their_order(inside, 4, 3);
    pieces_keep_their_order(strided, 4, 2);
}

/* The same pointers and counts, but longer steps: spans that lay apart now meet. */
static void rounds_follow_strides_and_types(void)
{
    static double buffer[64];
    const fst_layout wide = {1, {10}, {2}, 0};
    fst_plan plan;
    fst_plan_init(&plan, 1);
    for (int step = 0; step < 3; step++) {
        const fst_operand op = {.data = buffer,
                                .layout = step == 1 ? &wide : NULL,
                                .dtype = step == 2 ? FST_F64 : FST_F32};
        fst_plan_begin(&plan);
        for (size_t i = 0; i < 2; i++) {
            fst_operand *added = fst_plan_add(&plan, 10, 0, &status);
            *added = op;
            added->data = (float *)(void *)buffer + 10 * i;
        }
        seal(&plan);
        CHECK_INT((int64_t)plan.round_count, step ? 2 : 1);
    }
    fst_plan_free(&plan);
}

/* What was sealed is kept until something is begun, or other operands are written. */
static void sealing_again(void)
{
    static float data[90];
    fst_plan plan;
    fst_plan_init(&plan, 2);
    fst_plan_begin(&plan);
    for (size_t i = 0; i < 2; i++) {
        fst_operand *op = fst_plan_add(&plan, 10, 0, &status);
        op[0] = (fst_operand){.data = data + 30 * i, .dtype = FST_F32};
        op[1] = (fst_operand){.data = data + 60, .dtype = FST_F32}; /* the same for both */
    }
    seal(&plan);
    CHECK_INT((int64_t)plan.round_count, 1);
    plan.operands[3].data = data + 80;
    seal(&plan);
    CHECK_INT((int64_t)plan.round_count, 1);
    CHECK_INT(fst_plan_seal(&plan, 0, 2, &status), FST_OK);
    CHECK_INT((int64_t)plan.round_count, 1);
    plan.operands[3].data = data + 60;
    fst_plan_moved(&plan, 1);
    CHECK_INT(fst_plan_seal(&plan, 0, 2, &status), FST_OK);
    CHECK_INT((int64_t)plan.round_count, 2);
    seal(&plan);
    fst_plan_moved(&plan, 1); /* is not written */
    CHECK(plan.sealed);
    fst_plan_moved(&plan, 0);
    CHECK(!plan.sealed);
    seal(&plan);
    fst_plan_begin(&plan);
    for (size_t i = 0; i < 2; i++) {
        fst_operand *op = fst_plan_add(&plan, 10, 0, &status);
        op[0] = (fst_operand){.data = data + 5 * i, .dtype = FST_F32};
        op[1] = (fst_operand){.data = data + 60, .dtype = FST_F32};
    }
    seal(&plan);
    CHECK_INT((int64_t)plan.round_count, 2);
    CHECK_INT(fst_plan_seal(&plan, 1, 1, &status), FST_OK); /* both write the other one */
    CHECK_INT((int64_t)plan.round_count, 2);
    CHECK_INT(fst_plan_seal(&plan, 0, 0, &status), FST_OK);
    CHECK_INT((int64_t)plan.round_count, 1);
    fst_plan_free(&plan);
}

/* A part of a larger span has the chunks of that, from its own first element on, and its memory is
 * that of its own elements. */
static void parts_of_a_span(void)
{
    enum { BEGIN = FST_CHUNK + 100, COUNT = 2 * FST_CHUNK };
    const int64_t begins[] = {BEGIN, 2 * FST_CHUNK, 3 * FST_CHUNK};
    float *data = must_alloc((BEGIN + COUNT) * sizeof *data);
    fst_plan plan;
    fst_plan_init(&plan, 1);
    for (int again = 0; again < 2; again++) {
        fst_plan_begin(&plan);
        fst_operand *op = fst_plan_add_part(&plan, BEGIN - again, COUNT + again, 0, &status);
        *op = (fst_operand){.data = data, .dtype = FST_F32};
        add(&plan, data, BEGIN - again, FST_F32);
        seal(&plan);
        CHECK_INT((int64_t)plan.round_count, 1);
        CHECK_INT((int64_t)plan.chunk_count, 5);
        for (size_t i = 0; i < 3; i++)
            CHECK_INT(plan.chunks[i].begin, begins[i] - (i ? 0 : again));
        CHECK_INT(plan.chunks[0].count, FST_CHUNK - 100 + again);
        CHECK_INT(plan.chunks[2].count, 100);
        CHECK_INT(plan.chunks[3].begin, 0);
    }
    fst_plan_free(&plan);
    free(data);
}

int main(void)
{
    fst_cpu = fst_cpu_select(NULL);
    chunk_list_is_reused();
    large_plans();
    rounds();
    rounds_follow_strides_and_types();
    sealing_again();
    parts_of_a_span();
    return check_report();
}
