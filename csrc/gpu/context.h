/* context.h - the devices in use, each with its primary context, its kernels and their grids. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { FST_GPU_DEVICES = 64 };

typedef enum {
    FST_KERNEL_BEGIN,
    FST_KERNEL_UPDATE,
    FST_KERNEL_UNSCALE,
    FST_KERNEL_NORM,
    FST_KERNEL_SCALE,
    FST_KERNEL_CLAMP,
    FST_KERNEL_ACCUMULATE,
    FST_KERNEL_LOSS_SCALE,
    FST_KERNEL_IMAGE,
    FST_KERNEL_IMAGE_SMOOTH,
    FST_KERNEL_CROSS_ENTROPY,
    FST_KERNEL_COUNT,
} fst_kernel;

/* A device, kept until the process ends. Whatever was set up stays when the rest fails. */
typedef struct {
    int ordinal;
    void *context, *module; /* NULL: not retained, not loaded yet */
    void *functions[FST_KERNEL_COUNT];
    uint32_t grids[FST_KERNEL_COUNT]; /* blocks that run at a time */
    int ready;
} fst_gpu_device;

/* Counts of calls since the process started. */
typedef struct {
    uint64_t launches, uploads, uploaded_bytes;
} fst_gpu_counts;

/* Set where the kernels are: a fatbin in a file, read when a device is first used, or in memory
 * that stays. Must be called before any device is used. The path is copied. */
fst_code fst_gpu_kernels_in_file(const char *path, fst_status *status);
void fst_gpu_kernels_in_memory(const void *fatbin, size_t size);

/* Fails if the kernels need a newer driver than this machine's. The driver is not initialized. */
fst_code fst_gpu_check_driver(fst_status *status);

/* The device with this ordinal, with its kernels loaded; NULL with the reason if that fails.
 * Another call tries again. Safe from any thread. */
fst_gpu_device *fst_gpu_device_get(int ordinal, fst_status *status);

/* The same with its context only, for work without kernels. */
fst_gpu_device *fst_gpu_context_get(int ordinal, fst_status *status);

/* Page-locks whole pages of the host's memory for a device to read. Unlocking may wait for the
 * device. */
fst_code fst_gpu_lock_host(int ordinal, void *memory, size_t size, fst_status *status);
void fst_gpu_unlock_host(int ordinal, void *memory);

/* Make the device's context current for this thread, and undo that. An error that `status` has
 * already is kept. */
fst_code fst_gpu_enter(const fst_gpu_device *device, fst_status *status);
fst_code fst_gpu_leave(const fst_gpu_device *device, fst_status *status);

/* The same, and permit what a capture forbids (fst_driver_relax); `mode` is theirs. */
fst_code fst_gpu_enter_relaxed(const fst_gpu_device *device, int *mode, fst_status *status);
fst_code fst_gpu_leave_relaxed(const fst_gpu_device *device, int mode, fst_status *status);

/* Launches a kernel in at most `blocks` blocks, as many as run at a time, and at least one. */
fst_code fst_gpu_launch(const fst_gpu_device *device, fst_kernel kernel, size_t blocks,
                        void *stream, void *args, fst_status *status);

/* Copies from pinned memory to the device's. */
fst_code fst_gpu_upload(const fst_gpu_device *device, uint64_t to, const void *pinned, size_t size,
                        void *stream, fst_status *status);

/* Waits, in a thread without the context, until the event has passed. */
fst_code fst_gpu_await(const fst_gpu_device *device, void *event, fst_status *status);

fst_gpu_counts fst_gpu_counted(void);
