/* The CUDA driver. No other file knows libcuda. */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gpu/driver_calls.h"

static struct {
#define POINTER(name, parameters) cu_result(*name) parameters;
    ENTRY_POINTS(POINTER)
#undef POINTER
} cu;

enum { CLOSED, READY, FORKED };
static int state; /* READY once the driver is initialized, FORKED in the children of that process */
static int touched;  /* cuInit was called */
static int watching; /* for forks */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* Runs in a forked child. The thread that was opening the driver may have left it half done, and
 * does not exist here. */
static void note_fork(void)
{
    if (touched) {
        state = FORKED;
        return;
    }
    memset(&cu, 0, sizeof cu);
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Whether an error stays with the context. A kernel causes it, and the next calls return it. */
static int is_lasting(cu_result result)
{
    switch (result) {
    case CU_ECC_UNCORRECTABLE:
    case CU_NVLINK_UNCORRECTABLE:
    case CU_ILLEGAL_ADDRESS:
    case CU_LAUNCH_TIMEOUT:
    case CU_ASSERT:
        return 1;
    default:
        return result >= CU_HARDWARE_STACK_ERROR && result <= CU_LAUNCH_FAILED;
    }
}

/* An error that may be of earlier work, in torch's words. */
static fst_code lost(const char *call, const char *kernel, const char *place, const char *name,
                     const char *text, fst_status *status)
{
    return fst_fail(status, FST_DEVICE_LOST,
                    "CUDA error: %s (%s), returned by %s%s%s%s. It may be of earlier work on the "
                    "device, such as a kernel of the script. For debugging consider passing "
                    "CUDA_LAUNCH_BLOCKING=1",
                    text, name, call, kernel ? " of " : "", kernel ? kernel : "", place);
}

static fst_code failed(cu_result result, const char *call, const char *kernel, int device,
                       fst_status *status)
{
    const int full = result == CU_OUT_OF_MEMORY;
    const char *name = NULL, *text = NULL;
    char place[32] = "";
    if (cu.cuGetErrorName(result, &name) || !name)
        name = "unknown error";
    if (cu.cuGetErrorString(result, &text) || !text)
        text = "no description";
    if (device >= 0)
        snprintf(place, sizeof place, " on CUDA device %d", device);
    status->device_error = (int)result;
    if (is_lasting(result))
        return lost(call, kernel, place, name, text, status);
    return fst_fail(status, full ? FST_NO_MEMORY : FST_DEVICE_FAILED, "%s%s%s%s%s: %s (%s)",
                    full ? "CUDA out of memory. " : "", call, kernel ? " of " : "",
                    kernel ? kernel : "", place, name, text);
}

/* Returns the error of a call from the function that made it. */
#define TRY_FOR(kernel, name, ...)                                \
    do {                                                          \
        const cu_result result = cu.name(__VA_ARGS__);            \
        if (result)                                               \
            return failed(result, #name, kernel, device, status); \
    } while (0)
#define TRY(...) TRY_FOR(NULL, __VA_ARGS__)

static fst_code find_entry_points(void *library, fst_status *status)
{
    const char *missing = NULL;
    int version = 0;
#define FIND(name, parameters)                         \
    if (!(*(void **)&cu.name = dlsym(library, #name))) \
        missing = #name;
    ENTRY_POINTS(FIND)
#undef FIND
    if (!missing)
        return FST_OK;
    if (cu.cuDriverGetVersion)
        cu.cuDriverGetVersion(&version);
    return fst_fail(status, FST_UNSUPPORTED,
                    "the NVIDIA driver (for CUDA %d.%d) is too old: it has no %s; update it",
                    version / 1000, version % 1000 / 10, missing);
}

static fst_code open_driver(fst_status *status)
{
    const int device = -1;
    if (!watching && pthread_atfork(NULL, NULL, note_fork))
        return fst_fail(status, FST_NO_MEMORY, "no memory for a handler of fork()");
    watching = 1;
    if (!cu.cuInit) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library)
            return fst_fail(status, FST_UNSUPPORTED, "no NVIDIA driver: %s", dlerror());
        if (find_entry_points(library, status)) {
            memset(&cu, 0, sizeof cu);
            dlclose(library);
            return status->code;
        }
    }
    touched = 1;
    TRY(cuInit, 0);
    __atomic_store_n(&state, READY, __ATOMIC_RELEASE);
    return FST_OK;
}

int fst_driver_version(void)
{
    int (*ask)(int *) = NULL;
    int version = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library)
        *(void **)&ask = dlsym(library, "cuDriverGetVersion");
    if (!ask || ask(&version))
        version = 0;
    if (library)
        dlclose(library);
    return version;
}

fst_code fst_driver_open(fst_status *status)
{
    const int now = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
    if (now == READY)
        return FST_OK;
    if (now == FORKED) /* before the mutex, which another thread may have held at the fork */
        return fst_fail(status, FST_UNSUPPORTED,
                        "CUDA was initialized before this process was forked and cannot be used "
                        "in it: start the process by \"spawn\" or \"forkserver\"");
    pthread_mutex_lock(&opening);
    const fst_code code =
        __atomic_load_n(&state, __ATOMIC_ACQUIRE) == READY ? FST_OK : open_driver(status);
    pthread_mutex_unlock(&opening);
    return code;
}

fst_code fst_driver_describe(int device, fst_driver_device *out, fst_status *status)
{
    TRY(cuDriverGetVersion, &out->version);
    TRY(cuDeviceGet, &out->handle, device);
    TRY(cuDeviceGetName, out->name, (int)sizeof out->name, out->handle);
    TRY(cuDeviceGetAttribute, &out->multiprocessors, CU_MULTIPROCESSOR_COUNT, out->handle);
    TRY(cuDeviceGetAttribute, &out->major, CU_CAPABILITY_MAJOR, out->handle);
    TRY(cuDeviceGetAttribute, &out->minor, CU_CAPABILITY_MINOR, out->handle);
    return FST_OK;
}

fst_code fst_driver_retain(int device, int handle, void **context, fst_status *status)
{
    TRY(cuDevicePrimaryCtxRetain, context, handle);
    return FST_OK;
}

fst_code fst_driver_enter(int device, void *context, fst_status *status)
{
    TRY(cuCtxPushCurrent_v2, context);
    return FST_OK;
}

fst_code fst_driver_leave(int device, fst_status *status)
{
    void *context;
    const cu_result popped = cu.cuCtxPopCurrent_v2(&context);
    if (status->code || !popped)
        return status->code;
    return failed(popped, "cuCtxPopCurrent_v2", NULL, device, status);
}

fst_code fst_driver_relax(int device, int *mode, fst_status *status)
{
    *mode = CU_CAPTURE_RELAXED;
    TRY(cuThreadExchangeStreamCaptureMode, mode);
    return FST_OK;
}

fst_code fst_driver_restore(int device, int mode, fst_status *status)
{
    const cu_result exchanged = cu.cuThreadExchangeStreamCaptureMode(&mode);
    if (status->code || !exchanged)
        return status->code;
    return failed(exchanged, "cuThreadExchangeStreamCaptureMode", NULL, device, status);
}

fst_code fst_driver_load(int device, const void *image, void **module, fst_status *status)
{
    TRY(cuModuleLoadData, module, image);
    return FST_OK;
}

fst_code fst_driver_find(int device, void *module, const char *kernel, void **function,
                         fst_status *status)
{
    TRY_FOR(kernel, cuModuleGetFunction, function, module, kernel);
    return FST_OK;
}

fst_code fst_driver_occupancy(int device, const char *kernel, void *function, int block,
                              int *blocks, fst_status *status)
{
    TRY_FOR(kernel, cuOccupancyMaxActiveBlocksPerMultiprocessor, blocks, function, block, 0);
    return FST_OK;
}

fst_code fst_driver_launch(int device, const char *kernel, void *function, uint32_t grid,
                           uint32_t block, void *stream, void *args, fst_status *status)
{
    void *params[] = {args};
    TRY_FOR(kernel, cuLaunchKernel, function, grid, 1, 1, block, 1, 1, 0, stream, params, NULL);
    return FST_OK;
}

fst_code fst_driver_alloc(int device, size_t size, uint64_t *memory, fst_status *status)
{
    TRY(cuMemAlloc_v2, memory, size);
    return FST_OK;
}

void fst_driver_free(uint64_t memory)
{
    cu.cuMemFree_v2(memory);
}

fst_code fst_driver_alloc_pinned(int device, size_t size, void **memory, fst_status *status)
{
    TRY(cuMemHostAlloc, memory, size, 0);
    return FST_OK;
}

void fst_driver_free_pinned(void *memory)
{
    cu.cuMemFreeHost(memory);
}

fst_code fst_driver_lock(int device, void *memory, size_t size, fst_status *status)
{
    TRY(cuMemHostRegister_v2, memory, size, CU_FOR_ALL_CONTEXTS);
    return FST_OK;
}

void fst_driver_unlock(void *memory)
{
    cu.cuMemHostUnregister(memory);
}

fst_code fst_driver_upload(int device, uint64_t to, const void *pinned, size_t size, void *stream,
                           fst_status *status)
{
    TRY(cuMemcpyHtoDAsync_v2, to, pinned, size, stream);
    return FST_OK;
}

fst_code fst_driver_new_event(int device, void **event, fst_status *status)
{
    TRY(cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
    return FST_OK;
}

void fst_driver_free_event(void *event)
{
    cu.cuEventDestroy_v2(event);
}

fst_code fst_driver_record(int device, void *event, void *stream, fst_status *status)
{
    TRY(cuEventRecord, event, stream);
    return FST_OK;
}

fst_code fst_driver_wait(int device, void *stream, void *event, fst_status *status)
{
    TRY(cuStreamWaitEvent, stream, event, 0);
    return FST_OK;
}

fst_code fst_driver_passed(int device, void *event, int *passed, fst_status *status)
{
    const cu_result result = cu.cuEventQuery(event);
    *passed = result == 0;
    if (!result || result == CU_NOT_READY)
        return FST_OK;
    return failed(result, "cuEventQuery", NULL, device, status);
}

fst_code fst_driver_stream_id(int device, void *stream, uint64_t *id, fst_status *status)
{
    TRY(cuStreamGetId, stream, id);
    return FST_OK;
}

fst_code fst_driver_await(int device, void *event, fst_status *status)
{
    TRY(cuEventSynchronize, event);
    return FST_OK;
}

void fst_driver_synchronize(void *event)
{
    cu.cuEventSynchronize(event);
}

fst_code fst_driver_capture(int device, void *stream, uint64_t *capture, fst_status *status)
{
    int capturing = 0;
    TRY(cuStreamGetCaptureInfo_v2, stream, &capturing, capture, NULL, NULL, NULL);
    *capture = capturing ? *capture : 0; /* a broken capture refuses further work */
    return FST_OK;
}

static fst_code give_to_graph(int device, void *stream, void *holder, fst_status *status)
{
    int capturing = 0;
    void *graph = NULL;
    TRY(cuStreamGetCaptureInfo_v2, stream, &capturing, NULL, &graph, NULL, NULL);
    TRY(cuGraphRetainUserObject, graph, holder, 1, CU_MOVE);
    return FST_OK;
}

fst_code fst_driver_give_to_graph(int device, void *stream, void *object, void (*gone)(void *),
                                  fst_status *status)
{
    void *holder = NULL;
    const cu_result result = cu.cuUserObjectCreate(&holder, object, gone, 1, CU_NO_DESTRUCTOR_SYNC);
    if (result) {
        gone(object);
        return failed(result, "cuUserObjectCreate", NULL, device, status);
    }
    if (give_to_graph(device, stream, holder, status))
        cu.cuUserObjectRelease(holder, 1);
    return status->code;
}
