/* Every order of events of three tiles in three engines: gradients arrive, engines take tiles and
 * finish or fail, the step allows updates or begins anew. The states that can be reached are
 * visited once each, and each is left by every event that can happen in it. */
#include "check.h"
#include "core/pipeline.h"

#include <stdlib.h>

enum { TILES = 3, TABLE = 1 << 21 };

/* When updates are allowed: as soon as a gradient is ready, at different times; when all are here,
 * which clipping and the check for infinities need; or never, because one was infinite. */
typedef enum { EACH, TOGETHER, NEVER } way;

/* What the machine is told, and what the copies and updates would have done. */
typedef struct {
    fst_pipeline machine;
    uint8_t state[TILES + 1], allowed[TILES + 1];
    uint32_t next[TILES + 1];
    uint8_t arrivals[TILES], on_host[TILES], updated[TILES], back[TILES];
    uint8_t running[FST_ENGINES][TILES]; /* tiles that the engine has, of `hands` at most */
    uint8_t failures, decided, skipped;
} world;

typedef struct {
    way way;
    int hands;    /* tiles that the updating engine works on at a time */
    int failures; /* at most, wherever they happen */
    int arrivals; /* of each gradient at most */
} rules;

static world *seen;
static uint8_t *used;
static long states, ends;

static void point(world *w)
{
    w->machine.state = w->state;
    w->machine.allowed = w->allowed;
    w->machine.next = w->next;
}

/* Notes a state. Returns 0 if it was known. */
static int is_new(const world *w)
{
    world key;
    memcpy(&key, w, sizeof key); /* with its padding, which began as zeros */
    key.machine.state = key.machine.allowed = NULL;
    key.machine.next = NULL;
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < sizeof key; i++)
        hash = (hash ^ ((const uint8_t *)&key)[i]) * 1099511628211u;
    size_t at = (hash ^ hash >> 32) % TABLE;
    for (; used[at]; at = (at + 1) % TABLE)
        if (!memcmp(&seen[at], &key, sizeof key))
            return 0;
    if (states + 1 == TABLE) {
        CHECK(!"the table is large enough");
        exit(check_report());
    }
    used[at] = 1;
    memcpy(&seen[at], &key, sizeof key);
    return ++states, 1;
}

static int hands_of(const rules *r, unsigned engine)
{
    return engine == FST_ENGINE_UPDATE ? r->hands : 1;
}

static int running(const world *w, unsigned engine)
{
    int count = 0;
    for (int t = 0; t < TILES; t++)
        count += w->running[engine][t];
    return count;
}

/* What holds in every state. */
static void check_state(const world *w, const rules *r)
{
    uint32_t copying = 0, pending = 0;
    const fst_pass_state state = fst_pipeline_state(&w->machine);
    for (int t = 0; t < TILES; t++) {
        copying += w->state[t] == FST_TILE_ARRIVED || w->state[t] == FST_TILE_COPYING;
        pending += w->allowed[t];
        CHECK_INT(w->state[t] == FST_TILE_STRANDED,
                  w->updated[t] && !w->back[t] && w->state[t] > FST_TILE_RETURNING);
        if (w->state[t] == FST_TILE_HERE)
            CHECK(!w->allowed[t] && w->on_host[t]);
        if (state == FST_PASS_REFUSED || r->way == NEVER)
            CHECK(!w->updated[t]);
        if (state == FST_PASS_RETURNED && w->updated[t])
            CHECK(w->back[t]);
        if (w->updated[t] && r->way == TOGETHER)
            CHECK(w->decided);
    }
    CHECK_INT(w->machine.copying, copying);
    CHECK_INT(w->machine.pending, pending);
    for (unsigned e = 0; e < FST_ENGINES; e++) { /* each that waits is in the engine's list once */
        int listed = 0, wait = 0;
        for (uint32_t t = w->machine.lists[e].first; t != FST_NO_TILE; t = w->next[t])
            CHECK(listed++ < TILES && w->state[t] == (e ? e == 1 ? FST_TILE_READY : FST_TILE_UPDATED
                                                        : FST_TILE_ARRIVED));
        for (int t = 0; t < TILES; t++)
            wait +=
                w->state[t] == (e ? e == 1 ? FST_TILE_READY : FST_TILE_UPDATED : FST_TILE_ARRIVED);
        CHECK_INT(listed, wait);
    }
}

static void go(world w, const rules *r);

static void arrive(world w, const rules *r, int t)
{
    const int rests = w.state[t] == FST_TILE_IDLE || w.state[t] == FST_TILE_HERE;
    point(&w);
    CHECK_INT(fst_pipeline_arrive(&w.machine, (uint32_t)t), rests);
    if (!rests)
        return;
    w.arrivals[t]++;
    w.on_host[t] = 0;
    go(w, r);
}

/* Allows some tiles. None of them, or all, where an engine has failed. */
static void allow(world w, const rules *r, int first, int last)
{
    point(&w);
    int refused = 0;
    for (int t = first; t < last; t++)
        refused += !fst_pipeline_allow(&w.machine, (uint32_t)t);
    CHECK_INT(refused, w.failures ? last - first : 0);
    w.decided = 1;
    go(w, r);
}

static void take(world w, const rules *r, unsigned engine)
{
    point(&w);
    const uint32_t t = fst_pipeline_take(&w.machine, engine);
    if (!CHECK(t < TILES))
        return;
    w.running[engine][t] = 1;
    if (engine == FST_ENGINE_UPDATE)
        CHECK(w.on_host[t] && !w.updated[t] && w.allowed[t]);
    if (engine == FST_ENGINE_OUT)
        CHECK(w.updated[t] && !w.back[t]);
    go(w, r);
}

static void finish(world w, const rules *r, unsigned engine, int t, int failed)
{
    point(&w);
    w.running[engine][t] = 0;
    w.failures = (uint8_t)(w.failures + failed);
    fst_pipeline_finish(&w.machine, engine, (uint32_t)t, failed);
    if (engine == FST_ENGINE_IN)
        w.on_host[t] = !failed;
    else if (engine == FST_ENGINE_UPDATE && !failed)
        w.updated[t] = 1;
    else if (engine == FST_ENGINE_OUT)
        w.back[t] = !failed;
    go(w, r);
}

/* Nothing moves any more: what was promised holds. */
static void end(world w, const rules *r)
{
    const fst_pass_state state = fst_pipeline_state(&w.machine);
    int updated = 0, back = 0, stranded = 0;
    ends++;
    for (int t = 0; t < TILES; t++) {
        CHECK(fst_pipeline_rests(&w.machine, (uint32_t)t));
        updated += w.updated[t];
        back += w.back[t];
        stranded += w.state[t] == FST_TILE_STRANDED;
    }
    if (!w.failures)
        CHECK(r->way == NEVER ? state == FST_PASS_COLLECTING && !updated
                              : state == FST_PASS_RETURNED && updated == TILES && back == TILES);
    else
        CHECK(updated ? state == FST_PASS_PARTIAL : state != FST_PASS_RETURNED);
    if (r->way == TOGETHER && state == FST_PASS_REFUSED)
        CHECK(!updated);
    CHECK_INT(back + stranded, updated);
    point(&w);
    fst_pipeline_begin(&w.machine);
    CHECK_INT(fst_pipeline_state(&w.machine), FST_PASS_COLLECTING);
    for (int t = 0; t < TILES; t++)
        CHECK(w.state[t] == (w.updated[t] > w.back[t] ? FST_TILE_STRANDED : FST_TILE_IDLE) &&
              !w.allowed[t]);
}

static int may_allow(const world *w, int t)
{
    return !w->allowed[t] && !w->updated[t] && w->state[t] >= FST_TILE_ARRIVED &&
           w->state[t] <= FST_TILE_HERE;
}

static void go(world w, const rules *r)
{
    int all_here = 1, moves = 0;
    point(&w);
    if (!is_new(&w))
        return;
    check_state(&w, r);
    for (int t = 0; t < TILES; t++) {
        all_here &= w.state[t] == FST_TILE_HERE;
        if (w.arrivals[t] < (w.updated[t] || w.allowed[t] || w.decided ? 1 : r->arrivals))
            arrive(w, r, t), moves++;
        else if (w.state[t] > FST_TILE_HERE || w.state[t] == FST_TILE_COPYING)
            CHECK_INT(fst_pipeline_arrive(&w.machine, (uint32_t)t), 0);
        if (r->way == EACH && may_allow(&w, t) && !w.failures)
            allow(w, r, t, t + 1), moves++;
    }
    if (r->way == TOGETHER && !w.decided && all_here)
        allow(w, r, 0, TILES), moves++;
    for (unsigned e = 0; e < FST_ENGINES; e++) {
        if (w.machine.lists[e].first != FST_NO_TILE && running(&w, e) < hands_of(r, e))
            take(w, r, e), moves++;
        for (int t = 0; t < TILES; t++) {
            if (!w.running[e][t])
                continue;
            moves++;
            finish(w, r, e, t, 0);
            if (w.failures < r->failures)
                finish(w, r, e, t, 1);
        }
    }
    if (!moves)
        end(w, r);
}

static void every_order(rules r)
{
    fst_status status = {0};
    fst_pipeline made;
    world w;
    memset(&w, 0, sizeof w);
    CHECK_INT(fst_pipeline_init(&made, TILES, &status), FST_OK);
    memcpy(&w.machine, &made, sizeof made);
    fst_pipeline_free(&made);
    memset(used, 0, TABLE);
    const long before = states;
    states = 0;
    go(w, &r);
    printf("  way %d, %d hands, %d failures, %d arrivals: %ld states\n", (int)r.way, r.hands,
           r.failures, r.arrivals, states);
    states += before;
}

int main(void)
{
    seen = malloc(TABLE * sizeof *seen);
    used = malloc(TABLE);
    for (way w = EACH; w <= NEVER; w++)
        for (int hands = 1; hands <= 2; hands++)
            for (int failures = 0; failures <= 2; failures++)
                every_order((rules){w, hands, failures, w == EACH ? 1 : 2});
    CHECK(states > 1000 && ends > 10);
    free(seen);
    free(used);
    return check_report();
}
