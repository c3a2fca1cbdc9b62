/* retain.h - memory that torch frees stays with the process: the functions of libc10 that take and
 * free memory get large blocks from the heap of heap.h. */
#pragma once

#include <stdbool.h>

#include "base/status.h"
#include "memory/cgroup.h"
#include "memory/heap.h"

/* Blocks of at least so many bytes come from the heap. */
enum { FST_RETAIN_LEAST = 128 << 10 };

typedef struct {
    bool active;
    size_t limit; /* bytes that may be kept; SIZE_MAX: as many as there are */
    fst_heap_counts heap;
} fst_retain_counts;

/* From now on freed blocks are kept, at most `limit` bytes and, with a group, what it has left. */
fst_code fst_retain(size_t limit, const fst_cgroup *group, fst_status *status);

/* New blocks come from the C library again, and what is kept goes back. Returns its bytes. */
size_t fst_retain_undo(void);

/* What is kept goes back to the system now. Returns its bytes. */
size_t fst_retain_release(void);

fst_retain_counts fst_retain_count(void);

/* The allocator in place of glibc's, by the file that it is in; NULL: it is glibc's. */
const char *fst_retain_stranger(void);
