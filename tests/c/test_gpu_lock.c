/* The host's memory, page-locked by the driver: without kernels, in the device's context. */
#include <stdlib.h>

#include "fake_cuda.h"
#include "gpu/context.h"
#include "gpu_child.h"

enum { SIZE = 1 << 16, OUT_OF_MEMORY = 2 };

static void memory_is_locked_and_unlocked(void *memory)
{
    fst_status status = {0};
    const uint64_t place = (uint64_t)(uintptr_t)memory;
    CHECK_INT(fst_gpu_lock_host(1, memory, SIZE, &status), FST_OK);
    CHECK(fake_cuda_is_pinned(place, SIZE) && !fake_cuda_is_pinned(place + 1, SIZE));
    CHECK_INT(fst_gpu_lock_host(0, memory, SIZE, &status), FST_DEVICE_FAILED);
    CHECK_CONTAINS(status.message, "cuMemHostRegister_v2 on CUDA device 0: ");
    fst_gpu_unlock_host(1, memory);
    CHECK(!fake_cuda_is_pinned(place, SIZE));
    CHECK_INT(fake_cuda_calls("cuModuleLoadData"), 0);
    CHECK(!fake_cuda_complaint());
}

static void errors_are_told(void *memory)
{
    static const char *const calls[] = {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent_v2", "cuMemHostRegister_v2"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        fst_status status = {0};
        fake_cuda_fail(calls[i], 1, OUT_OF_MEMORY);
        CHECK_INT(fst_gpu_lock_host(0, memory, SIZE, &status), FST_NO_MEMORY);
        CHECK_CONTAINS(status.message, calls[i]);
    }
    fst_status status = {0};
    CHECK_INT(fst_gpu_lock_host(FST_GPU_DEVICES, memory, SIZE, &status), FST_BAD_VALUE);
    status = (fst_status){0};
    CHECK_INT(fst_gpu_lock_host(0, memory, SIZE, &status), FST_OK);
    fake_cuda_fail("cuCtxPushCurrent_v2", 1, 4); /* the driver has shut down */
    fst_gpu_unlock_host(0, memory);
    fst_gpu_unlock_host(0, memory);
    CHECK_INT((int64_t)fake_cuda_alive().registered, 0);
    CHECK(!fake_cuda_complaint());
}

static void a_capture_goes_on(void *memory)
{
    fst_status status = {0};
    void *stream = fake_cuda_stream(0);
    fake_cuda_begin_capture(stream);
    CHECK_INT(fst_gpu_lock_host(0, memory, SIZE, &status), FST_OK);
    fst_gpu_unlock_host(0, memory);
    fake_cuda_free_graph(fake_cuda_end_capture(stream));
    CHECK_INT(fake_cuda_mode(), 0);
    CHECK(!fake_cuda_complaint());
}

int main(void)
{
    void *memory = aligned_alloc(SIZE, SIZE);
    void (*const parts[])(void *) = {memory_is_locked_and_unlocked, errors_are_told,
                                     a_capture_goes_on};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        in_child(parts[i], memory, "locking");
    free(memory);
    return check_report();
}
