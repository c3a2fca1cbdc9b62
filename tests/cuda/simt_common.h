/* simt_common.h - what both runners do alike. */
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simt.h"

enum {
    SIMT_WARP = 32,
    SIMT_MAX_BLOCK = 1024,
    SIMT_MAX_SHARED = 48 * 1024, /* what every GPU gives a block */
    SIMT_POISON = 0xFF,          /* NaN, and an index far outside */
};

extern const simt_kernel *const __start_simt_kernels[] __attribute__((weak));
extern const simt_kernel *const __stop_simt_kernels[] __attribute__((weak));

simt_dim3 simt_block_dim, simt_grid_dim;
_Thread_local simt_dim3 simt_thread_idx, simt_block_idx;

static char simt_message[300];

const char *simt_error(void)
{
    return simt_message;
}

/* Keeps the first message. */
__attribute__((format(printf, 1, 2))) static void simt_complain(const char *format, ...)
{
    va_list arguments;
    if (simt_message[0])
        return;
    va_start(arguments, format);
    vsnprintf(simt_message, sizeof simt_message, format, arguments);
    va_end(arguments);
}

const simt_kernel *simt_find(const char *name)
{
    for (const simt_kernel *const *k = __start_simt_kernels; k < __stop_simt_kernels; k++)
        if (!strcmp((*k)->name, name))
            return *k;
    return NULL;
}

static void *simt_must_alloc(size_t size)
{
    void *memory = malloc(size);
    if (!memory)
        abort();
    return memory;
}

/* Memory that kernels see as their own parameter, and nothing beyond it. */
static void *simt_copy_of(const simt_kernel *kernel, const void *launch)
{
    return memcpy(simt_must_alloc(kernel->launch_size), launch, kernel->launch_size);
}

/* Returns 0 and sets the dimensions, or -1. */
static int simt_start(const simt_kernel *kernel, unsigned grid, unsigned block)
{
    simt_message[0] = '\0';
    simt_grid_dim = (simt_dim3){grid, 1, 1};
    simt_block_dim = (simt_dim3){block, 1, 1};
    if (grid && block && block <= SIMT_MAX_BLOCK && block % SIMT_WARP == 0)
        return 0;
    simt_complain("%s: %u blocks of %u threads", kernel->name, grid, block);
    return -1;
}
