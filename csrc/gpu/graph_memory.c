#include "gpu/graph_memory.h"

#include <stdlib.h>

#include "gpu/driver.h"

typedef struct graph_memory graph_memory;
struct graph_memory {
    graph_memory *next;
    uint64_t memory;
    void *pinned;
};

static graph_memory *gone; /* whose graphs are; threads of the driver add to it */

static void note_gone(void *object)
{
    graph_memory *held = object;
    held->next = __atomic_load_n(&gone, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&gone, &held->next, held, 1, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED))
        ;
}

static void free_held(graph_memory *held)
{
    if (held->memory)
        fst_driver_free(held->memory);
    if (held->pinned)
        fst_driver_free_pinned(held->pinned);
    free(held);
}

void fst_graph_memory_sweep(void)
{
    graph_memory *held = __atomic_exchange_n(&gone, NULL, __ATOMIC_ACQUIRE);
    while (held) {
        graph_memory *next = held->next;
        free_held(held);
        held = next;
    }
}

fst_code fst_graph_memory_take(int device, void *stream, size_t size, size_t pinned_size,
                               uint64_t *memory, void **pinned, fst_status *status)
{
    graph_memory *held = calloc(1, sizeof *held);
    if (!held)
        return fst_fail(status, FST_NO_MEMORY, "no memory for the tables of a graph");
    if (fst_driver_alloc(device, size, &held->memory, status) ||
        fst_driver_alloc_pinned(device, pinned_size, &held->pinned, status)) {
        free_held(held);
        return status->code;
    }
    *memory = held->memory;
    *pinned = held->pinned;
    return fst_driver_give_to_graph(device, stream, held, note_gone, status);
}
