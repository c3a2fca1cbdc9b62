#include "gpu/context.h"

#include <pthread.h>
#include <string.h>

#include "base/device.h"
#include "gpu/driver.h"
#include "gpu/fatbin.h"

static const char *const names[FST_KERNEL_COUNT] = {
    [FST_KERNEL_BEGIN] = "fst_begin",
    [FST_KERNEL_UPDATE] = "fst_update",
    [FST_KERNEL_UNSCALE] = "fst_unscale",
    [FST_KERNEL_NORM] = "fst_norm",
    [FST_KERNEL_SCALE] = "fst_scale",
    [FST_KERNEL_CLAMP] = "fst_clamp",
    [FST_KERNEL_ACCUMULATE] = "fst_accumulate",
    [FST_KERNEL_LOSS_SCALE] = "fst_loss_scale",
    [FST_KERNEL_IMAGE] = "fst_image",
    [FST_KERNEL_IMAGE_SMOOTH] = "fst_image_smooth",
    [FST_KERNEL_CROSS_ENTROPY] = "fst_cross_entropy",
};

static fst_gpu_device devices[FST_GPU_DEVICES];
static fst_fatbin_source source;
static fst_gpu_counts counts;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

fst_code fst_gpu_kernels_in_file(const char *path, fst_status *status)
{
    return fst_fatbin_in_file(&source, path, status);
}

void fst_gpu_kernels_in_memory(const void *fatbin, size_t size)
{
    fst_fatbin_in_memory(&source, fatbin, size);
}

static fst_code find_kernels(fst_gpu_device *device, int multiprocessors, fst_status *status)
{
    for (unsigned k = 0; k < FST_KERNEL_COUNT; k++) {
        int blocks = 0;
        if (fst_driver_find(device->ordinal, device->module, names[k], &device->functions[k],
                            status) ||
            fst_driver_occupancy(device->ordinal, names[k], device->functions[k], FST_DEVICE_BLOCK,
                                 &blocks, status))
            return status->code;
        if (blocks < 1)
            return fst_fail(status, FST_UNSUPPORTED,
                            "no block of %s fits on a multiprocessor of CUDA device %d", names[k],
                            device->ordinal);
        device->grids[k] = (uint32_t)(blocks * multiprocessors);
    }
    return FST_OK;
}

/* Explains an error of loading kernels: CUDA's text names neither the device nor what is too
 * old. */
static fst_code explain(const fst_driver_device *info, fst_status *status)
{
    char reason[sizeof status->message];
    memcpy(reason, status->message, sizeof reason);
    return fst_fail(status, status->code,
                    "%.180s; the kernels may be built for other GPUs (FASTSTEP_CUDA=1 builds them "
                    "for all), or need a newer device than %s (compute capability %d.%d) or a "
                    "newer driver than one for CUDA %d.%d",
                    reason, info->name, info->major, info->minor, info->version / 1000,
                    info->version % 1000 / 10);
}

/* CUDA promises to load kernels of the driver's own major version. */
static fst_code check_version(const fst_fatbin *fatbin, int version, fst_status *status)
{
    if (fatbin->cuda <= version / 1000)
        return FST_OK;
    return fst_fail(status, FST_UNSUPPORTED,
                    "the CUDA kernels of this package need a driver for CUDA %d or later, and the "
                    "driver of this machine is for CUDA %d.%d; update it",
                    fatbin->cuda, version / 1000, version % 1000 / 10);
}

fst_code fst_gpu_check_driver(fst_status *status)
{
    fst_fatbin fatbin;
    const int version = fst_driver_version();
    if (!version || fst_fatbin_open(&source, &fatbin, status))
        return status->code;
    check_version(&fatbin, version, status);
    fst_fatbin_close(&fatbin);
    return status->code;
}

static fst_code load_module(fst_gpu_device *device, const fst_driver_device *info,
                            fst_status *status)
{
    fst_fatbin fatbin;
    if (fst_fatbin_open(&source, &fatbin, status))
        return status->code;
    if (!check_version(&fatbin, info->version, status) &&
        fst_driver_load(device->ordinal, fatbin.data, &device->module, status) != FST_OK &&
        status->code != FST_NO_MEMORY)
        explain(info, status);
    fst_fatbin_close(&fatbin);
    return status->code;
}

static fst_code retain(fst_gpu_device *device, int ordinal, fst_driver_device *info,
                       fst_status *status)
{
    void *context = device->context;
    device->ordinal = ordinal;
    if (fst_driver_describe(ordinal, info, status) ||
        (!context && fst_driver_retain(ordinal, info->handle, &context, status)))
        return status->code;
    __atomic_store_n(&device->context, context, __ATOMIC_RELEASE);
    return FST_OK;
}

static fst_code start(fst_gpu_device *device, int ordinal, fst_status *status)
{
    fst_driver_device info;
    int mode;
    if (retain(device, ordinal, &info, status) || fst_gpu_enter_relaxed(device, &mode, status))
        return status->code;
    if (device->module || !load_module(device, &info, status))
        find_kernels(device, info.multiprocessors, status);
    return fst_gpu_leave_relaxed(device, mode, status);
}

/* The entry of a device, once the driver is open. */
static fst_gpu_device *find_device(int ordinal, fst_status *status)
{
    if (ordinal < 0 || ordinal >= FST_GPU_DEVICES) {
        fst_fail(status, FST_BAD_VALUE, "no CUDA device %d: the last one is %d", ordinal,
                 FST_GPU_DEVICES - 1);
        return NULL;
    }
    return fst_driver_open(status) ? NULL : &devices[ordinal];
}

fst_gpu_device *fst_gpu_context_get(int ordinal, fst_status *status)
{
    fst_driver_device info;
    fst_gpu_device *device = find_device(ordinal, status);
    if (!device || __atomic_load_n(&device->context, __ATOMIC_ACQUIRE))
        return device;
    pthread_mutex_lock(&loading);
    if (!device->context)
        retain(device, ordinal, &info, status);
    pthread_mutex_unlock(&loading);
    return status->code ? NULL : device;
}

fst_gpu_device *fst_gpu_device_get(int ordinal, fst_status *status)
{
    fst_gpu_device *device = find_device(ordinal, status);
    if (!device)
        return NULL;
    if (__atomic_load_n(&device->ready, __ATOMIC_ACQUIRE))
        return device;
    pthread_mutex_lock(&loading);
    if (!device->ready && !start(device, ordinal, status))
        __atomic_store_n(&device->ready, 1, __ATOMIC_RELEASE);
    const int ready = device->ready;
    pthread_mutex_unlock(&loading);
    return ready ? device : NULL;
}

fst_code fst_gpu_enter(const fst_gpu_device *device, fst_status *status)
{
    if (fst_driver_open(status)) /* a forked child keeps its devices, but must not use them */
        return status->code;
    return fst_driver_enter(device->ordinal, device->context, status);
}

fst_code fst_gpu_leave(const fst_gpu_device *device, fst_status *status)
{
    return fst_driver_leave(device->ordinal, status);
}

fst_code fst_gpu_enter_relaxed(const fst_gpu_device *device, int *mode, fst_status *status)
{
    if (fst_gpu_enter(device, status))
        return status->code;
    if (fst_driver_relax(device->ordinal, mode, status))
        fst_driver_leave(device->ordinal, status);
    return status->code;
}

fst_code fst_gpu_leave_relaxed(const fst_gpu_device *device, int mode, fst_status *status)
{
    fst_driver_restore(device->ordinal, mode, status);
    return fst_driver_leave(device->ordinal, status);
}

fst_code fst_gpu_lock_host(int ordinal, void *memory, size_t size, fst_status *status)
{
    int mode;
    const fst_gpu_device *device = fst_gpu_context_get(ordinal, status);
    if (!device || fst_gpu_enter_relaxed(device, &mode, status))
        return status->code;
    fst_driver_lock(ordinal, memory, size, status);
    return fst_gpu_leave_relaxed(device, mode, status);
}

void fst_gpu_unlock_host(int ordinal, void *memory)
{
    int mode;
    fst_status status = {0};
    const fst_gpu_device *device = fst_gpu_context_get(ordinal, &status);
    if (!device || fst_gpu_enter_relaxed(device, &mode, &status))
        return; /* the driver has shut down already, as at the end of a program */
    fst_driver_unlock(memory);
    fst_gpu_leave_relaxed(device, mode, &status);
}

fst_code fst_gpu_launch(const fst_gpu_device *device, fst_kernel kernel, size_t blocks,
                        void *stream, void *args, fst_status *status)
{
    const uint32_t most = device->grids[kernel];
    const uint32_t grid = blocks < 1 ? 1 : blocks < most ? (uint32_t)blocks : most;
    __atomic_fetch_add(&counts.launches, 1, __ATOMIC_RELAXED);
    return fst_driver_launch(device->ordinal, names[kernel], device->functions[kernel], grid,
                             FST_DEVICE_BLOCK, stream, args, status);
}

fst_code fst_gpu_upload(const fst_gpu_device *device, uint64_t to, const void *pinned, size_t size,
                        void *stream, fst_status *status)
{
    __atomic_fetch_add(&counts.uploads, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counts.uploaded_bytes, size, __ATOMIC_RELAXED);
    return fst_driver_upload(device->ordinal, to, pinned, size, stream, status);
}

fst_code fst_gpu_await(const fst_gpu_device *device, void *event, fst_status *status)
{
    int mode;
    if (fst_gpu_enter_relaxed(device, &mode, status))
        return status->code;
    fst_driver_await(device->ordinal, event, status);
    return fst_gpu_leave_relaxed(device, mode, status);
}

fst_gpu_counts fst_gpu_counted(void)
{
    return (fst_gpu_counts){
        __atomic_load_n(&counts.launches, __ATOMIC_RELAXED),
        __atomic_load_n(&counts.uploads, __ATOMIC_RELAXED),
        __atomic_load_n(&counts.uploaded_bytes, __ATOMIC_RELAXED),
    };
}
