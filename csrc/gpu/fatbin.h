/* fatbin.h - the compiled kernels, in a file beside the package or in memory. */
#pragma once

#include <stddef.h>

#include "base/status.h"

typedef struct {
    char *path;
    const void *data; /* where there is no path */
    size_t size;
} fst_fatbin_source;

typedef struct {
    const void *data;
    void *owned; /* to be freed */
    int cuda;    /* the major version of CUDA whose nvcc made it; 0: unknown */
} fst_fatbin;

fst_code fst_fatbin_in_file(fst_fatbin_source *source, const char *path, fst_status *status);
void fst_fatbin_in_memory(fst_fatbin_source *source, const void *data, size_t size);

/* Reads the file and refuses anything but a whole fatbin: the driver takes no size and would
 * read past the end. */
fst_code fst_fatbin_open(const fst_fatbin_source *source, fst_fatbin *out, fst_status *status);
void fst_fatbin_close(fst_fatbin *fatbin);
