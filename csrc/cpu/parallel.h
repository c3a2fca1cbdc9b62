/* parallel.h - one parallel region over a range, on torch's own intra-op threads. */
#pragma once

#include <stdint.h>

#include "base/status.h"

typedef void (*fst_range_fn)(int64_t begin, int64_t end, void *context);

/* Uses torch_parallel_for of the library at `path`, which must be loaded already. Work runs on
 * the calling thread without it (NULL path, or a torch without the function), and in a forked
 * child, whose copy of the thread pool has no threads. Returns 1 if the function was found; if
 * not, nothing changes. */
int fst_parallel_init(const char *path);

/* "torch_parallel_for" or "calling thread". */
const char *fst_parallel_name(void);

/* Calls fn for disjoint parts of [0, end) of at least `grain` each, and returns when all are done.
 */
fst_code fst_parallel_for(int64_t end, int64_t grain, fst_range_fn fn, void *context,
                          fst_status *status);
