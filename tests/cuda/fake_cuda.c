/* A library that stands in for libcuda.so.1 (see fake_cuda.h): what a test sets and reads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda_inside.h"

static const char *const names[FAKE_ENTRIES] = {
#define NAME(name) #name,
    FAKE_EACH_ENTRY(NAME)
#undef NAME
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static long calls[FAKE_ENTRIES];
static struct {
    long at; /* the call that fails; 0: none does, -1: each does */
    int code;
} failures[FAKE_ENTRIES];

fake_settings fake = {.devices = 2, .capability = 90, .version = 13000};

void fake_lock(void)
{
    pthread_mutex_lock(&lock);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

int fake_enter(int entry)
{
    fake_lock();
    if (fake_dropping)
        fake_complain("%s is called by what a graph calls when it goes", names[entry]);
    calls[entry]++;
    if (failures[entry].at != -1 && failures[entry].at != calls[entry])
        return FAKE_OK;
    if (failures[entry].at > 0)
        failures[entry].at = 0;
    return failures[entry].code;
}

static int entry_of(const char *call)
{
    for (int i = 0; i < FAKE_ENTRIES; i++)
        if (!strcmp(names[i], call))
            return i;
    fprintf(stderr, "fake_cuda: no entry point %s\n", call);
    abort();
}

void fake_cuda_fail(const char *call, long nth, int code)
{
    const int entry = entry_of(call);
    fake_lock();
    failures[entry].at = nth > 0 ? calls[entry] + nth : nth;
    failures[entry].code = code;
    fake_unlock();
}

long fake_cuda_calls(const char *call)
{
    long sum = 0;
    fake_lock();
    for (int i = 0; !call && i < FAKE_ENTRIES; i++)
        sum += calls[i];
    if (call)
        sum = calls[entry_of(call)];
    fake_unlock();
    return sum;
}

const char *fake_cuda_entry(size_t index)
{
    return index < FAKE_ENTRIES ? names[index] : NULL;
}

void fake_cuda_use(const fake_cuda_kernel *kernels, size_t count)
{
    fake.kernels = kernels;
    fake.kernel_count = count;
}

void fake_cuda_machine(int devices, int capability, int version)
{
    fake.devices = devices;
    fake.capability = capability;
    fake.version = version;
}
