/* context.h - the devices in use: each has its primary context, its kernels and their grids. */
#ifndef FST_GPU_CONTEXT_H
#define FST_GPU_CONTEXT_H

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
    FST_KERNEL_COUNT,
} fst_kernel;

/* Kept until the process ends; what it has already is kept when the rest fails. */
typedef struct {
    int ordinal;
    void *context, *module; /* NULL: not retained, not loaded yet */
    void *functions[FST_KERNEL_COUNT];
    uint32_t grids[FST_KERNEL_COUNT]; /* blocks that run at a time */
    int ready;
} fst_gpu_device;

/* What was asked of the driver since the process started. */
typedef struct {
    uint64_t launches, uploads, uploaded_bytes;
} fst_gpu_counts;

/* Where the kernels are: a fatbin in a file, read when a device is first used, or in memory that
 * stays. Called before any device is used; the path is copied. */
fst_code fst_gpu_kernels_in_file(const char *path, fst_status *status);
void fst_gpu_kernels_in_memory(const void *fatbin, size_t size);

/* The device with this ordinal, with its kernels loaded; NULL if that cannot be, with the reason.
 * Another call tries again. Safe from any thread. */
fst_gpu_device *fst_gpu_device_get(int ordinal, fst_status *status);

/* The same with its context only: for what needs no kernels. */
fst_gpu_device *fst_gpu_context_get(int ordinal, fst_status *status);

/* Page-locks whole pages of the host's memory, so that a device reads them while the host goes on;
 * unlocking may wait for the device. */
fst_code fst_gpu_lock_host(int ordinal, void *memory, size_t size, fst_status *status);
void fst_gpu_unlock_host(int ordinal, void *memory);

/* Between the two the device's context is current for this thread; `mode` is theirs. An error that
 * `status` has already is kept. */
fst_code fst_gpu_enter(const fst_gpu_device *device, int *mode, fst_status *status);
fst_code fst_gpu_leave(const fst_gpu_device *device, int mode, fst_status *status);

/* Launches a kernel in as many of `blocks` blocks as run at a time, at least one. */
fst_code fst_gpu_launch(const fst_gpu_device *device, fst_kernel kernel, size_t blocks,
                        void *stream, void *args, fst_status *status);

/* Copies from pinned memory to the device's. */
fst_code fst_gpu_upload(const fst_gpu_device *device, uint64_t to, const void *pinned, size_t size,
                        void *stream, fst_status *status);

fst_gpu_counts fst_gpu_counted(void);

#endif
