#define _GNU_SOURCE /* for the cores of threads */
#include "core/engines.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/threads.h"
#include "io/clock.h"

enum { MOST_UPDATERS = 256 };

typedef struct {
    fst_engines *all;
    unsigned engine;
} engine_thread;

struct fst_engines {
    fst_pipeline tiles;
    pthread_mutex_t lock;
    pthread_cond_t ready[FST_ENGINES]; /* a tile waits for the engine */
    pthread_cond_t rested;             /* a tile has finished with an engine */
    fst_engine_work work;
    void *context;
    uint64_t busy[FST_ENGINES];
    int ending;
    pid_t owner;
    unsigned count;
    pthread_t ids[2 + MOST_UPDATERS];
    engine_thread threads[2 + MOST_UPDATERS];
};

/* Wakes threads for the tiles that wait for an engine. */
static void wake(fst_engines *all, unsigned engine)
{
    if (all->tiles.lists[engine].first != FST_NO_TILE)
        pthread_cond_broadcast(&all->ready[engine]);
}

static void *run(void *argument)
{
    const engine_thread *self = argument;
    fst_engines *all = self->all;
    const unsigned engine = self->engine;
    pthread_mutex_lock(&all->lock);
    while (!all->ending) {
        const uint32_t tile = fst_pipeline_take(&all->tiles, engine);
        if (tile == FST_NO_TILE) {
            pthread_cond_wait(&all->ready[engine], &all->lock);
            continue;
        }
        pthread_mutex_unlock(&all->lock);
        const int64_t began = fst_now_ns();
        const int failed = all->work(all->context, engine, tile);
        const uint64_t took = (uint64_t)(fst_now_ns() - began);
        pthread_mutex_lock(&all->lock);
        all->busy[engine] += took;
        fst_pipeline_finish(&all->tiles, engine, tile, failed);
        if (engine + 1 < FST_ENGINES)
            wake(all, engine + 1);
        pthread_cond_broadcast(&all->rested);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* Binds an updating thread to one of the process's cores: not to the first, where others are. Only
 * speed depends on it. */
static void bind_to_core(pthread_t id, unsigned updater)
{
    cpu_set_t may, one;
    if (sched_getaffinity(0, sizeof may, &may))
        return;
    const unsigned cores = (unsigned)CPU_COUNT(&may);
    unsigned wanted = cores ? (updater + 1) % cores : 0;
    for (unsigned core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, &may) || wanted--)
            continue;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        pthread_setaffinity_np(id, sizeof one, &one);
        return;
    }
}

static void end(fst_engines *all)
{
    pthread_mutex_lock(&all->lock);
    all->ending = 1;
    for (int engine = 0; engine < FST_ENGINES; engine++)
        pthread_cond_broadcast(&all->ready[engine]);
    pthread_mutex_unlock(&all->lock);
    for (unsigned i = 0; i < all->count; i++)
        pthread_join(all->ids[i], NULL);
    fst_pipeline_free(&all->tiles);
    for (int engine = 0; engine < FST_ENGINES; engine++)
        pthread_cond_destroy(&all->ready[engine]);
    pthread_cond_destroy(&all->rested);
    pthread_mutex_destroy(&all->lock);
    free(all);
}

fst_engines *fst_engines_new(unsigned updaters, fst_engine_work work, void *context,
                             fst_status *status)
{
    fst_engines *all = calloc(1, sizeof *all);
    if (!all || fst_pipeline_init(&all->tiles, 0, status)) {
        free(all);
        fst_fail(status, FST_NO_MEMORY, "no memory for the threads of an offload");
        return NULL;
    }
    pthread_mutex_init(&all->lock, NULL);
    for (int engine = 0; engine < FST_ENGINES; engine++)
        pthread_cond_init(&all->ready[engine], NULL);
    pthread_cond_init(&all->rested, NULL);
    all->work = work;
    all->context = context;
    all->owner = getpid();
    updaters = updaters < 1 ? 1 : updaters > MOST_UPDATERS ? MOST_UPDATERS : updaters;
    for (unsigned i = 0; i < 2 + updaters; i++) {
        const unsigned engine = i == 0   ? FST_ENGINE_IN
                                : i == 1 ? FST_ENGINE_OUT
                                         : FST_ENGINE_UPDATE;
        all->threads[i] = (engine_thread){all, engine};
        if (fst_thread_start(&all->ids[i], "faststep-step", run, &all->threads[i])) {
            end(all);
            fst_fail(status, FST_NO_MEMORY, "the system has no more threads");
            return NULL;
        }
        all->count++;
        if (engine == FST_ENGINE_UPDATE)
            bind_to_core(all->ids[i], i - 2);
    }
    return all;
}

int fst_engines_are_here(const fst_engines *engines)
{
    return engines->owner == getpid();
}

static int all_rest(const fst_pipeline *tiles)
{
    return !tiles->copying && !tiles->pending;
}

/* Locks, once nothing moves. */
static void lock_at_rest(fst_engines *engines)
{
    pthread_mutex_lock(&engines->lock);
    while (!all_rest(&engines->tiles))
        pthread_cond_wait(&engines->rested, &engines->lock);
}

void fst_engines_free(fst_engines *engines)
{
    if (!engines || !fst_engines_are_here(engines))
        return;
    lock_at_rest(engines);
    pthread_mutex_unlock(&engines->lock);
    end(engines);
}

fst_code fst_engines_resize(fst_engines *engines, uint32_t count, fst_status *status)
{
    fst_pipeline tiles;
    if (fst_pipeline_init(&tiles, count, status))
        return status->code;
    lock_at_rest(engines);
    fst_pipeline_free(&engines->tiles);
    engines->tiles = tiles;
    pthread_mutex_unlock(&engines->lock);
    return FST_OK;
}

/* Whether all tiles of [first, last) say yes. With `moves` they may then wait for engines. */
static int for_each(fst_engines *engines, uint32_t first, uint32_t last, int moves,
                    int (*ask)(fst_pipeline *, uint32_t))
{
    int all = 1;
    pthread_mutex_lock(&engines->lock);
    for (uint32_t tile = first; tile < last; tile++)
        all &= ask(&engines->tiles, tile);
    for (unsigned engine = 0; moves && engine < FST_ENGINES; engine++)
        wake(engines, engine);
    pthread_mutex_unlock(&engines->lock);
    return all;
}

int fst_engines_arrive(fst_engines *engines, uint32_t first, uint32_t last)
{
    return for_each(engines, first, last, 1, fst_pipeline_arrive);
}

int fst_engines_allow(fst_engines *engines, uint32_t first, uint32_t last)
{
    return for_each(engines, first, last, 1, fst_pipeline_allow);
}

int fst_engines_expect(fst_engines *engines, uint32_t first, uint32_t last)
{
    return for_each(engines, first, last, 0, fst_pipeline_expects);
}

int fst_engines_copied(fst_engines *engines, uint32_t first, uint32_t last)
{
    return for_each(engines, first, last, 0, fst_pipeline_copied);
}

void fst_engines_begin(fst_engines *engines)
{
    lock_at_rest(engines);
    fst_pipeline_begin(&engines->tiles);
    pthread_mutex_unlock(&engines->lock);
}

fst_pass_state fst_engines_settle(fst_engines *engines)
{
    pthread_mutex_lock(&engines->lock);
    while (engines->tiles.copying)
        pthread_cond_wait(&engines->rested, &engines->lock);
    const fst_pass_state state = fst_pipeline_state(&engines->tiles);
    pthread_mutex_unlock(&engines->lock);
    return state;
}

fst_pass_state fst_engines_wait(fst_engines *engines, uint32_t first, uint32_t last)
{
    pthread_mutex_lock(&engines->lock);
    for (uint32_t tile = first; tile < last; tile++)
        while (!fst_pipeline_rests(&engines->tiles, tile))
            pthread_cond_wait(&engines->rested, &engines->lock);
    const fst_pass_state state = fst_pipeline_state(&engines->tiles);
    pthread_mutex_unlock(&engines->lock);
    return state;
}

void fst_engines_busy(fst_engines *engines, uint64_t busy[FST_ENGINES])
{
    pthread_mutex_lock(&engines->lock);
    for (int engine = 0; engine < FST_ENGINES; engine++)
        busy[engine] = engines->busy[engine];
    pthread_mutex_unlock(&engines->lock);
}
