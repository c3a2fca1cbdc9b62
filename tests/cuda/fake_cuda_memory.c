/* Device memory and pinned memory of the fake library, with guards around each allocation. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda_inside.h"

enum { GUARD = 256, PATTERN = 0xA5, FRESH = 0xC3, REGISTERED = 4096 };

typedef struct allocation allocation;
struct allocation {
    allocation *next;
    unsigned char *bytes; /* between two guards */
    void *owned;
    size_t size;
    int device;
};

static allocation *living;
static struct {
    const unsigned char *bytes;
    size_t size;
} registered[REGISTERED]; /* size 0: a free place */
static char complaint[400];

void fake_complain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (!complaint[0])
        vsnprintf(complaint, sizeof complaint, format, arguments);
    va_end(arguments);
}

const char *fake_cuda_complaint(void)
{
    static char last[sizeof complaint];
    fake_lock();
    fake_check_guards();
    memcpy(last, complaint, sizeof last);
    complaint[0] = 0;
    fake_unlock();
    return last[0] ? last : NULL;
}

void *fake_allocate(int device, size_t size)
{
    allocation *a = malloc(sizeof *a);
    char *owned = malloc(size + 3 * GUARD);
    if (!a || !owned)
        abort();
    *a = (allocation){.next = living, .owned = owned, .size = size, .device = device};
    a->bytes = (unsigned char *)owned + GUARD + (GUARD - (uintptr_t)owned % GUARD) % GUARD;
    memset(owned, PATTERN, size + 3 * GUARD);
    memset(a->bytes, FRESH, size);
    living = a;
    return a->bytes;
}

static void check_guards(const allocation *a)
{
    for (size_t i = 0; i < GUARD; i++)
        if (a->bytes[a->size + i] != PATTERN || (i && a->bytes[-(ptrdiff_t)i] != PATTERN)) {
            fake_complain("something wrote beside an allocation of %zu bytes", a->size);
            return;
        }
}

void fake_check_guards(void)
{
    for (const allocation *a = living; a; a = a->next)
        check_guards(a);
}

int fake_release(void *memory, int pinned)
{
    for (allocation **at = &living; *at; at = &(*at)->next) {
        allocation *a = *at;
        if (a->bytes != memory || (a->device < 0) != pinned)
            continue;
        check_guards(a);
        *at = a->next;
        memset(a->bytes, PATTERN, a->size);
        free(a->owned);
        free(a);
        return FAKE_OK;
    }
    fake_complain("freed what is not allocated: %p", memory);
    return FAKE_INVALID_VALUE;
}

int fake_register(void *memory, size_t size)
{
    const unsigned char *bytes = memory;
    size_t place = REGISTERED;
    if (!size || (uintptr_t)memory % 4096 || size % 4096)
        return FAKE_INVALID_VALUE;
    for (size_t i = 0; i < REGISTERED; i++) {
        if (registered[i].size && bytes < registered[i].bytes + registered[i].size &&
            registered[i].bytes < bytes + size)
            return FAKE_ALREADY_REGISTERED;
        if (!registered[i].size)
            place = i;
    }
    if (place == REGISTERED)
        return FAKE_OUT_OF_MEMORY;
    registered[place].bytes = bytes;
    registered[place].size = size;
    return FAKE_OK;
}

int fake_unregister(void *memory)
{
    for (size_t i = 0; i < REGISTERED; i++)
        if (registered[i].size && registered[i].bytes == memory) {
            registered[i].size = 0;
            return FAKE_OK;
        }
    fake_complain("unregistered what is not registered: %p", memory);
    return FAKE_NOT_REGISTERED;
}

int fake_inside(int device, uint64_t address, size_t size)
{
    for (size_t i = 0; device < 0 && i < REGISTERED; i++) {
        const uint64_t begin = (uint64_t)(uintptr_t)registered[i].bytes;
        if (address >= begin && size <= registered[i].size &&
            address - begin <= registered[i].size - size)
            return 1;
    }
    for (const allocation *a = living; a; a = a->next) {
        const uint64_t begin = (uint64_t)(uintptr_t)a->bytes;
        if (a->device == device && address >= begin && size <= a->size &&
            address - begin <= a->size - size)
            return 1;
    }
    return 0;
}

int fake_cuda_is_pinned(uint64_t address, size_t size)
{
    fake_lock();
    const int pinned = fake_inside(-1, address, size);
    fake_unlock();
    return pinned;
}

int fake_cuda_holds(uint64_t address, size_t size)
{
    const int holds = fake_inside(fake_running(), address, size);
    if (!holds)
        fake_complain("a kernel on device %d uses %zu bytes that are not in its memory",
                      fake_running(), size);
    return holds;
}

void *fake_cuda_malloc(int device, size_t size)
{
    fake_lock();
    void *memory = fake_allocate(device, size);
    fake_unlock();
    return memory;
}

void fake_cuda_free(void *memory)
{
    fake_lock();
    fake_release(memory, 0);
    fake_unlock();
}

fake_cuda_living fake_cuda_alive(void)
{
    fake_cuda_living count = {0};
    fake_lock();
    for (const fake_event *e = fake_events; e; e = e->next)
        count.events++;
    for (const allocation *a = living; a; a = a->next) {
        count.memory += a->device >= 0;
        count.pinned += a->device < 0;
    }
    count.objects = fake_objects;
    for (size_t i = 0; i < REGISTERED; i++)
        count.registered += registered[i].size != 0;
    fake_unlock();
    return count;
}
