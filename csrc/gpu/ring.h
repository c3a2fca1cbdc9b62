/* ring.h - a ring of pinned host memory for uploads. A slot is reused after the event behind its
 * copy has passed. Where the next slot is still in use the ring grows; it never waits. */
#pragma once

#include "gpu/context.h"

typedef enum {
    FST_RING_FREE,
    FST_RING_COPYING,
    FST_RING_LOST, /* its event could not be recorded: nobody knows when it is free */
} fst_ring_slot_state;

typedef struct {
    void *memory;
    void *event;
    size_t capacity;
    fst_ring_slot_state state;
} fst_ring_slot;

typedef struct {
    fst_ring_slot *slots; /* from the oldest copy to the newest, beginning at `next` */
    size_t count, next;
} fst_gpu_ring;

/* Copies `size` bytes to the device's memory, in the order of the stream. Within
 * fst_gpu_enter_relaxed. */
fst_code fst_gpu_ring_upload(fst_gpu_ring *ring, const fst_gpu_device *device, uint64_t to,
                             const void *from, size_t size, void *stream, fst_status *status);

/* Frees the host's part, and with `inside` (within fst_gpu_enter_relaxed) the driver's. */
void fst_gpu_ring_free(fst_gpu_ring *ring, int inside);
