/* simt_fibers.c - runs kernels on one thread: blocks one after another, the threads of a block as
 * fibers that run from barrier to barrier, warp by warp. Says where threads wait at different
 * barriers, or leave while others wait. Shared memory is new and poisoned for every block. */
#include "simt_common.h"
#include "simt_switch.h"

/* AddressSanitizer wants to know on which stack a thread runs. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define start_switch __sanitizer_start_switch_fiber
#define finish_switch __sanitizer_finish_switch_fiber
#else
static void start_switch(void **fake_stack, const void *bottom, size_t size)
{
    (void)fake_stack, (void)bottom, (void)size;
}

static void finish_switch(void *fake_stack, const void **bottom, size_t *size)
{
    (void)fake_stack, (void)bottom, (void)size;
}
#endif

enum { STACK = 256 * 1024 };

typedef enum { READY, AT_BARRIER, AT_SHUFFLE, GONE } state;

typedef struct {
    simt_context context;
    char *stack;
    void *fake_stack; /* AddressSanitizer's, while another fiber runs */
    state state;
    int line;        /* where it waits */
    int any;         /* what it brought to the barrier, and what it takes away */
    double brought;  /* to the shuffle */
    unsigned source; /* the thread whose value it takes */
} fiber;

static fiber fibers[SIMT_MAX_BLOCK];
static simt_context scheduler;
static void *scheduler_fake_stack;
static const void *scheduler_bottom;
static size_t scheduler_size;
static unsigned current;
static uint64_t seed;
static const simt_kernel *kernel;
static const void *parameter;
static char *shared;
static size_t shared_size;

void simt_shuffle_by(uint64_t number)
{
    seed = number;
}

/* Gives the scheduler its turn, until it gives this fiber one. */
static void park(state why, int line)
{
    fiber *own = &fibers[current];
    own->state = why;
    own->line = line;
    start_switch(why == GONE ? NULL : &own->fake_stack, scheduler_bottom, scheduler_size);
    simt_switch(&own->context, &scheduler);
    finish_switch(own->fake_stack, &scheduler_bottom, &scheduler_size);
}

static void resume(unsigned index)
{
    current = index;
    simt_thread_idx = (simt_dim3){index, 0, 0};
    start_switch(&scheduler_fake_stack, fibers[index].stack, STACK);
    simt_switch(&scheduler, &fibers[index].context);
    finish_switch(scheduler_fake_stack, NULL, NULL);
}

static void fiber_main(void)
{
    finish_switch(NULL, &scheduler_bottom, &scheduler_size);
    kernel->run(parameter);
    park(GONE, 0);
}

int simt_barrier(int any, int line)
{
    fibers[current].any = any != 0;
    park(AT_BARRIER, line);
    return fibers[current].any;
}

static double shuffle_from(unsigned source, uint32_t mask, double value, int line)
{
    fiber *own = &fibers[current];
    if (mask != 0xFFFFFFFFu)
        simt_complain("%s: line %d: a shuffle of some lanes only", kernel->name, line);
    own->brought = value;
    own->source = source;
    park(AT_SHUFFLE, line);
    return own->brought;
}

double simt_shuffle_down(uint32_t mask, double value, unsigned delta, int line)
{
    const unsigned lane = current % SIMT_WARP;
    return shuffle_from(lane + delta < SIMT_WARP ? current + delta : current, mask, value, line);
}

double simt_shuffle_xor(uint32_t mask, double value, unsigned lanes, int line)
{
    return shuffle_from(current ^ lanes, mask, value, line);
}

/* One piece of it per block: every call gives that piece. */
void *simt_shared_memory(size_t size, int line)
{
    if (!shared) {
        shared = memset(simt_must_alloc(size), SIMT_POISON, size);
        shared_size = size;
    }
    if (size != shared_size || size > SIMT_MAX_SHARED)
        simt_complain("%s: line %d: %zu bytes of shared memory", kernel->name, line, size);
    return shared;
}

void simt_fence(void)
{
}

/* Counts from 0 to `last`, and from there to 0 again. */
uint32_t simt_atomic_inc(uint32_t *at, uint32_t last)
{
    const uint32_t old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}

uint32_t simt_atomic_or(uint32_t *at, uint32_t value)
{
    const uint32_t old = *at;
    *at = old | value;
    return old;
}

uint32_t simt_atomic_exchange(uint32_t *at, uint32_t value)
{
    const uint32_t old = *at;
    *at = value;
    return old;
}

/* The order of `count` things; see simt_shuffle_by. */
static void shuffle(unsigned *order, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        order[i] = i;
        if (seed) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            const unsigned other = (unsigned)((seed >> 33) * (i + 1) >> 31);
            order[i] = order[other];
            order[other] = i;
        }
    }
}

/* Whether all of [first, last) wait in the same place; complains where they never will. */
static int meet(unsigned first, unsigned last, state where)
{
    unsigned waiting = 0, gone = 0;
    int line = 0, any = 0;
    for (unsigned i = first; i < last; i++) {
        any |= fibers[i].any;
        gone += fibers[i].state == GONE;
        if (fibers[i].state != where)
            continue;
        if (waiting++ && fibers[i].line != line)
            simt_complain("%s: threads wait at lines %d and %d", kernel->name, line,
                          fibers[i].line);
        line = fibers[i].line;
    }
    if (waiting && gone)
        simt_complain("%s: threads left while others wait at line %d", kernel->name, line);
    if (waiting < last - first || simt_message[0])
        return 0;
    for (unsigned i = first; i < last; i++) {
        fibers[i].state = READY;
        if (where == AT_BARRIER)
            fibers[i].any = any;
    }
    return 1;
}

static int meet_in_warp(unsigned first)
{
    double values[SIMT_WARP];
    if (!meet(first, first + SIMT_WARP, AT_SHUFFLE))
        return 0;
    for (unsigned i = 0; i < SIMT_WARP; i++)
        values[i] = fibers[fibers[first + i].source].brought;
    for (unsigned i = 0; i < SIMT_WARP; i++)
        fibers[first + i].brought = values[i];
    return 1;
}

/* Runs a warp until all of its threads wait for other warps, or are gone. */
static void run_warp(unsigned first)
{
    unsigned order[SIMT_WARP];
    do {
        shuffle(order, SIMT_WARP);
        for (unsigned i = 0; i < SIMT_WARP; i++)
            if (fibers[first + order[i]].state == READY)
                resume(first + order[i]);
    } while (meet_in_warp(first));
}

/* Runs all warps, then lets them go on from the barrier. 0 when nobody is left. */
static int run_round(unsigned count)
{
    unsigned order[SIMT_MAX_BLOCK / SIMT_WARP], gone = 0;
    shuffle(order, count / SIMT_WARP);
    for (unsigned i = 0; i < count / SIMT_WARP; i++)
        run_warp(order[i] * SIMT_WARP);
    for (unsigned i = 0; i < count; i++)
        gone += fibers[i].state == GONE;
    if (gone == count)
        return 0;
    if (!meet(0, count, AT_BARRIER))
        simt_complain("%s: some threads wait in a shuffle and some at a barrier", kernel->name);
    return !simt_message[0];
}

static void run_block(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        fiber *own = &fibers[i];
        if (!own->stack)
            own->stack = simt_must_alloc(STACK);
        simt_context_make(&own->context, own->stack, STACK, fiber_main);
        own->state = READY;
        own->any = 0;
    }
    while (run_round(count))
        ;
    free(shared);
    shared = NULL;
}

int simt_launch(const simt_kernel *which, unsigned grid, unsigned block, const void *launch)
{
    if (simt_start(which, grid, block))
        return -1;
    unsigned *order = simt_must_alloc(grid * sizeof *order);
    void *copy = simt_copy_of(which, launch);
    kernel = which;
    parameter = copy;
    shuffle(order, grid);
    for (unsigned i = 0; i < grid && !simt_message[0]; i++) {
        simt_block_idx = (simt_dim3){order[i], 0, 0};
        run_block(block);
    }
    free(copy);
    free(order);
    return simt_message[0] ? -1 : 0;
}

__attribute__((destructor)) static void free_stacks(void)
{
    for (unsigned i = 0; i < SIMT_MAX_BLOCK; i++)
        free(fibers[i].stack);
}
