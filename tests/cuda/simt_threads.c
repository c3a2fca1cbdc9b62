/* simt_threads.c - runs kernels with a POSIX thread for every thread of the grid, all at once, so
 * that ThreadSanitizer sees a missing barrier, and a missing fence between blocks, as the data race
 * that it is.
 *
 * ThreadSanitizer knows no fences. A fence is therefore carried by the atomic operations around it,
 * as C11 has it: an atomic operation after a fence releases, and a fence after an atomic operation
 * acquires. A barrier ends what a fence before it has done for the writes of other threads. */
#include <pthread.h>

#include "simt_common.h"

#if defined(__SANITIZE_THREAD__)
void __tsan_acquire(void *address);
void __tsan_release(void *address);
#define ACQUIRE(address) __tsan_acquire(address)
#define RELEASE(address) __tsan_release(address)
#else
#define ACQUIRE(address) __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define RELEASE(address) __atomic_thread_fence(__ATOMIC_RELEASE)
#endif

typedef struct {
    pthread_barrier_t all, warps[SIMT_MAX_BLOCK / SIMT_WARP];
    pthread_mutex_t lock;
    char *shared;
    size_t shared_size;
    int any[2];
    double values[SIMT_MAX_BLOCK];
} block_state;

typedef struct {
    pthread_t thread;
    block_state *block;
    unsigned thread_index, block_index;
} worker;

static const simt_kernel *kernel;
static const void *parameter;
static _Thread_local block_state *own_block;
static _Thread_local unsigned own, barriers;
static _Thread_local int fenced;
static _Thread_local uint32_t *last_atomic;

void simt_shuffle_by(uint64_t number)
{
    (void)number;
}

int simt_barrier(int any, int line)
{
    int *met = &own_block->any[barriers++ % 2];
    (void)line;
    fenced = 0;
    if (any)
        __atomic_store_n(met, 1, __ATOMIC_RELAXED);
    pthread_barrier_wait(&own_block->all);
    const int result = __atomic_load_n(met, __ATOMIC_RELAXED);
    /* Used again by the barrier after the next: everybody has read it when the next one opens. */
    if (pthread_barrier_wait(&own_block->all) == PTHREAD_BARRIER_SERIAL_THREAD)
        __atomic_store_n(met, 0, __ATOMIC_RELAXED);
    return result;
}

static double shuffle_from(unsigned source, double value)
{
    pthread_barrier_t *warp = &own_block->warps[own / SIMT_WARP];
    own_block->values[own] = value;
    pthread_barrier_wait(warp);
    const double result = own_block->values[source];
    pthread_barrier_wait(warp);
    return result;
}

double simt_shuffle_down(uint32_t mask, double value, unsigned delta, int line)
{
    const unsigned lane = own % SIMT_WARP;
    (void)mask, (void)line;
    return shuffle_from(lane + delta < SIMT_WARP ? own + delta : own, value);
}

double simt_shuffle_xor(uint32_t mask, double value, unsigned lanes, int line)
{
    (void)mask, (void)line;
    return shuffle_from(own ^ lanes, value);
}

void *simt_shared_memory(size_t size, int line)
{
    (void)line;
    pthread_mutex_lock(&own_block->lock);
    if (!own_block->shared) {
        own_block->shared = memset(simt_must_alloc(size), SIMT_POISON, size);
        own_block->shared_size = size;
    }
    pthread_mutex_unlock(&own_block->lock);
    return own_block->shared;
}

void simt_fence(void)
{
    if (last_atomic)
        ACQUIRE(last_atomic);
    fenced = 1;
}

static void before_atomic(uint32_t *at)
{
    if (fenced)
        RELEASE(at);
    last_atomic = at;
}

uint32_t simt_atomic_inc(uint32_t *at, uint32_t last)
{
    uint32_t old = __atomic_load_n(at, __ATOMIC_RELAXED), next;
    before_atomic(at);
    do
        next = old >= last ? 0 : old + 1;
    while (!__atomic_compare_exchange_n(at, &old, next, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

uint32_t simt_atomic_or(uint32_t *at, uint32_t value)
{
    before_atomic(at);
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

uint32_t simt_atomic_exchange(uint32_t *at, uint32_t value)
{
    before_atomic(at);
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

static void *worker_main(void *argument)
{
    const worker *self = argument;
    own_block = self->block;
    own = self->thread_index;
    simt_thread_idx = (simt_dim3){own, 0, 0};
    simt_block_idx = (simt_dim3){self->block_index, 0, 0};
    kernel->run(parameter);
    return NULL;
}

static void block_init(block_state *block, unsigned threads)
{
    pthread_barrier_init(&block->all, NULL, threads);
    for (unsigned warp = 0; warp < threads / SIMT_WARP; warp++)
        pthread_barrier_init(&block->warps[warp], NULL, SIMT_WARP);
    pthread_mutex_init(&block->lock, NULL);
    block->shared = NULL;
    block->any[0] = block->any[1] = 0;
}

static void block_free(block_state *block, unsigned threads)
{
    pthread_barrier_destroy(&block->all);
    for (unsigned warp = 0; warp < threads / SIMT_WARP; warp++)
        pthread_barrier_destroy(&block->warps[warp]);
    pthread_mutex_destroy(&block->lock);
    free(block->shared);
}

int simt_launch(const simt_kernel *which, unsigned grid, unsigned block, const void *launch)
{
    pthread_attr_t attributes;
    if (simt_start(which, grid, block))
        return -1;
    void *copy = simt_copy_of(which, launch);
    block_state *blocks = simt_must_alloc(grid * sizeof *blocks);
    worker *workers = simt_must_alloc((size_t)grid * block * sizeof *workers);
    kernel = which;
    parameter = copy;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    for (unsigned b = 0; b < grid; b++)
        block_init(&blocks[b], block);
    for (unsigned i = 0; i < grid * block; i++) {
        workers[i] = (worker){.block = &blocks[i / block]};
        workers[i].block_index = i / block;
        workers[i].thread_index = i % block;
        if (pthread_create(&workers[i].thread, &attributes, worker_main, &workers[i]))
            abort(); /* the others would wait for it forever */
    }
    for (unsigned i = 0; i < grid * block; i++)
        pthread_join(workers[i].thread, NULL);
    for (unsigned b = 0; b < grid; b++)
        block_free(&blocks[b], block);
    pthread_attr_destroy(&attributes);
    free(workers);
    free(blocks);
    free(copy);
    return 0;
}
