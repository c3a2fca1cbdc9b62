/* driver_calls.h - the declarations of cuda.h that are used, for driver.c alone. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef void (*cu_host_function)(void *argument);
enum {
    CU_OUT_OF_MEMORY = 2,
    CU_ECC_UNCORRECTABLE = 214,
    CU_NVLINK_UNCORRECTABLE = 220,
    CU_NOT_READY = 600,
    CU_ILLEGAL_ADDRESS = 700,
    CU_LAUNCH_TIMEOUT = 702,
    CU_ASSERT = 710,
    CU_HARDWARE_STACK_ERROR = 714, /* and up to the next, errors of instructions */
    CU_LAUNCH_FAILED = 719,
    CU_MULTIPROCESSOR_COUNT = 16,
    CU_CAPABILITY_MAJOR = 75,
    CU_CAPABILITY_MINOR = 76,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_CAPTURE_RELAXED = 2,
    CU_FOR_ALL_CONTEXTS = 1,
    CU_NO_DESTRUCTOR_SYNC = 1,
    CU_MOVE = 1,
};

#define ENTRY_POINTS(X)                                                                           \
    X(cuInit, (unsigned flags))                                                                   \
    X(cuDriverGetVersion, (int *version))                                                         \
    X(cuGetErrorName, (cu_result result, const char **name))                                      \
    X(cuGetErrorString, (cu_result result, const char **text))                                    \
    X(cuDeviceGet, (int *handle, int ordinal))                                                    \
    X(cuDeviceGetName, (char *name, int size, int handle))                                        \
    X(cuDeviceGetAttribute, (int *value, int attribute, int handle))                              \
    X(cuDevicePrimaryCtxRetain, (void **context, int handle))                                     \
    X(cuCtxPushCurrent_v2, (void *context))                                                       \
    X(cuCtxPopCurrent_v2, (void **context))                                                       \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                             \
    X(cuModuleLoadData, (void **module, const void *image))                                       \
    X(cuModuleGetFunction, (void **function, void *module, const char *name))                     \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                \
      (int *blocks, void *function, int block, size_t shared))                                    \
    X(cuLaunchKernel, (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,         \
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,     \
                       void *stream, void **params, void **extra))                                \
    X(cuMemAlloc_v2, (uint64_t *memory, size_t size))                                             \
    X(cuMemFree_v2, (uint64_t memory))                                                            \
    X(cuMemHostAlloc, (void **memory, size_t size, unsigned flags))                               \
    X(cuMemFreeHost, (void *memory))                                                              \
    X(cuMemHostRegister_v2, (void *memory, size_t size, unsigned flags))                          \
    X(cuMemHostUnregister, (void *memory))                                                        \
    X(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t size, void *stream))           \
    X(cuEventCreate, (void **event, unsigned flags))                                              \
    X(cuEventDestroy_v2, (void *event))                                                           \
    X(cuEventRecord, (void *event, void *stream))                                                 \
    X(cuEventQuery, (void *event))                                                                \
    X(cuEventSynchronize, (void *event))                                                          \
    X(cuStreamWaitEvent, (void *stream, void *event, unsigned flags))                             \
    X(cuStreamGetId, (void *stream, uint64_t *id))                                                \
    X(cuStreamGetCaptureInfo_v2,                                                                  \
      (void *stream, int *state, uint64_t *id, void **graph, void *const **nodes, size_t *count)) \
    X(cuUserObjectCreate,                                                                         \
      (void **holder, void *object, cu_host_function gone, unsigned count, unsigned flags))       \
    X(cuUserObjectRelease, (void *holder, unsigned count))                                        \
    X(cuGraphRetainUserObject, (void *graph, void *holder, unsigned count, unsigned flags))
