/* graph_memory.h - memory that a captured graph reads and writes at every replay. It belongs to the
 * graph: whoever captured it may be gone before. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Memory of the device, and pinned memory, for the graph that the stream is captured into. Within
 * fst_gpu_enter. */
fst_code fst_graph_memory_take(int device, void *stream, size_t size, size_t pinned_size,
                               uint64_t *memory, void **pinned, fst_status *status);

/* Frees the memory of graphs that are gone: CUDA forbids that at the moment when they go. Within
 * fst_gpu_enter, of any device. */
void fst_graph_memory_sweep(void);
