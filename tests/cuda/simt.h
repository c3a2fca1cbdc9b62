/* simt.h - kernels without a GPU: the words of CUDA C for a C compiler. A kernel becomes a function
 * and an entry in a table; a runner, simt_fibers.c or simt_threads.c, calls it for every thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct {
    unsigned x, y, z;
} simt_dim3;

typedef struct {
    const char *name;
    size_t launch_size; /* of its one parameter, a struct */
    void (*run)(const void *launch);
} simt_kernel;

/* The kernel of that name that is linked in, or NULL. */
const simt_kernel *simt_find(const char *name);

/* Runs a kernel with a copy of `launch`; all dimensions but x are 1. Returns 0, or -1 after a
 * mistake that simt_error() describes. */
int simt_launch(const simt_kernel *kernel, unsigned grid, unsigned block, const void *launch);
const char *simt_error(void);

/* The order in which blocks, and threads between barriers, run: 0 as they are numbered, else
 * shuffled, differently for each number. Threads of the other runner have no order. */
void simt_shuffle_by(uint64_t seed);

/* What kernels call. `line` says where, for messages. */
extern _Thread_local simt_dim3 simt_thread_idx, simt_block_idx;
extern simt_dim3 simt_block_dim, simt_grid_dim;
int simt_barrier(int any, int line);
double simt_shuffle_down(uint32_t mask, double value, unsigned delta, int line);
double simt_shuffle_xor(uint32_t mask, double value, unsigned lanes, int line);
void *simt_shared_memory(size_t size, int line);
void simt_fence(void);
uint32_t simt_atomic_inc(uint32_t *at, uint32_t last);
uint32_t simt_atomic_or(uint32_t *at, uint32_t value);
uint32_t simt_atomic_exchange(uint32_t *at, uint32_t value);

#ifdef SIMT_KERNELS
#define threadIdx simt_thread_idx
#define blockIdx simt_block_idx
#define blockDim simt_block_dim
#define gridDim simt_grid_dim
#define __syncthreads() ((void)simt_barrier(0, __LINE__))
#define __syncthreads_or(any) simt_barrier((any), __LINE__)
#define __syncwarp() ((void)simt_shuffle_down(0xFFFFFFFFu, 0.0, 1, __LINE__))
#define __shfl_down_sync(mask, value, delta) simt_shuffle_down((mask), (value), (delta), __LINE__)
#define __shfl_xor_sync(mask, value, lanes) \
    ((uint32_t)simt_shuffle_xor((mask), (double)(value), (lanes), __LINE__))
#define __threadfence() simt_fence()
#define atomicInc(at, last) simt_atomic_inc((at), (last))
#define atomicOr(at, value) simt_atomic_or((at), (value))
#define atomicExch(at, value) simt_atomic_exchange((at), (value))

#define FST_DEVICE static inline __attribute__((unused))
#define FST_DEVICE_CALL static __attribute__((noinline, unused))
#define FST_UNROLL
#define FST_ROLLED
#define FST_SHARED(type, name) type *const name = simt_shared_memory(sizeof(type), __LINE__)
/* The table is a section of pointers: structs might be padded apart. */
#define FST_KERNEL(name, launch_type)                                                             \
    static void name(const launch_type launch);                                                   \
    static void name##_run(const void *launch)                                                    \
    {                                                                                             \
        name(*(const launch_type *)launch);                                                       \
    }                                                                                             \
    static const simt_kernel name##_entry = {#name, sizeof(launch_type), name##_run};             \
    static const simt_kernel *const name##_place __attribute__((used, section("simt_kernels"))) = \
        &name##_entry;                                                                            \
    static void name(const launch_type launch)
#endif
