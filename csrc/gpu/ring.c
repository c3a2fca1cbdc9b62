#include "gpu/ring.h"

#include <stdlib.h>
#include <string.h>

#include "gpu/driver.h"

enum { LEAST = 4096 };

static fst_code insert(fst_gpu_ring *ring, const fst_gpu_device *device, fst_status *status)
{
    fst_ring_slot *slots = realloc(ring->slots, (ring->count + 1) * sizeof *slots);
    fst_ring_slot added = {.state = FST_RING_FREE};
    if (!slots)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu uploads", ring->count + 1);
    ring->slots = slots;
    if (fst_driver_new_event(device->ordinal, &added.event, status))
        return status->code;
    slots += ring->next;
    memmove(slots + 1, slots, (ring->count - ring->next) * sizeof *slots);
    *slots = added;
    ring->count++;
    return FST_OK;
}

/* Finds or inserts a free slot at ring->next. */
static fst_code find_free(fst_gpu_ring *ring, const fst_gpu_device *device, fst_status *status)
{
    for (size_t left = ring->count; left > 0; left--) {
        fst_ring_slot *slot = &ring->slots[ring->next];
        if (slot->state == FST_RING_COPYING) {
            int passed = 0;
            if (fst_driver_passed(device->ordinal, slot->event, &passed, status))
                return status->code;
            if (!passed)
                break; /* the others were filled later */
            slot->state = FST_RING_FREE;
        }
        if (slot->state == FST_RING_FREE)
            return FST_OK;
        ring->next = (ring->next + 1) % ring->count;
    }
    return insert(ring, device, status);
}

static fst_code reserve(fst_ring_slot *slot, const fst_gpu_device *device, size_t size,
                        fst_status *status)
{
    size_t capacity = LEAST;
    if (slot->capacity >= size)
        return FST_OK;
    while (capacity < size)
        capacity *= 2;
    if (slot->memory)
        fst_driver_free_pinned(slot->memory);
    slot->memory = NULL;
    slot->capacity = 0;
    if (fst_driver_alloc_pinned(device->ordinal, capacity, &slot->memory, status))
        return status->code;
    slot->capacity = capacity;
    return FST_OK;
}

fst_code fst_gpu_ring_upload(fst_gpu_ring *ring, const fst_gpu_device *device, uint64_t to,
                             const void *from, size_t size, void *stream, fst_status *status)
{
    if (find_free(ring, device, status))
        return status->code;
    fst_ring_slot *slot = &ring->slots[ring->next];
    if (reserve(slot, device, size, status))
        return status->code;
    memcpy(slot->memory, from, size);
    if (fst_gpu_upload(device, to, slot->memory, size, stream, status))
        return status->code;
    ring->next = (ring->next + 1) % ring->count;
    slot->state = FST_RING_LOST;
    if (!fst_driver_record(device->ordinal, slot->event, stream, status))
        slot->state = FST_RING_COPYING;
    return status->code;
}

void fst_gpu_ring_free(fst_gpu_ring *ring, int inside)
{
    for (size_t i = 0; inside && i < ring->count; i++) {
        if (ring->slots[i].state == FST_RING_COPYING)
            fst_driver_synchronize(ring->slots[i].event);
        if (ring->slots[i].memory)
            fst_driver_free_pinned(ring->slots[i].memory);
        fst_driver_free_event(ring->slots[i].event);
    }
    free(ring->slots);
    *ring = (fst_gpu_ring){0};
}
