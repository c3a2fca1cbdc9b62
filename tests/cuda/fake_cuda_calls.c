/* The entry points of the fake library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda_inside.h"

enum { DEPTH = 64, RELAXED = 2, MULTIPROCESSORS = 4, OCCUPANCY = 2 };

static int initialized;
static int retained[FAKE_MAX_DEVICES]; /* the contexts */
static int modules[FAKE_MAX_DEVICES];
static __thread int stack[DEPTH], depth, mode;
fake_event *fake_events;

/* A function of one device. */
typedef struct {
    const fake_cuda_kernel *kernel;
    int device;
} function;
static function functions[FAKE_MAX_DEVICES][32];

/* An entry point: counts, fails if asked, and then runs the block, which sets `result`. */
#define ENTRY(name, parameters, ...)                      \
    int name parameters;                                  \
    int name parameters                                   \
    {                                                     \
        int result = fake_enter(FAKE_##name);             \
        const int device = depth ? stack[depth - 1] : -1; \
        (void)device;                                     \
        if (!result)                                      \
            __VA_ARGS__                                   \
        fake_unlock();                                    \
        return result;                                    \
    }

/* What a capture in the usual mode forbids, of any thread. */
static int unsafe_now(const char *call)
{
    if (!fake_capturing() || mode == RELAXED)
        return FAKE_OK;
    fake_complain("%s would break a capture", call);
    return FAKE_CAPTURE_UNSUPPORTED;
}

ENTRY(cuInit, (unsigned flags), {
    result = flags ? FAKE_INVALID_VALUE : fake.devices ? FAKE_OK : FAKE_NO_DEVICE;
    initialized = !result;
})

ENTRY(cuDriverGetVersion, (int *version), { *version = fake.version; })

ENTRY(cuGetErrorName, (int code, const char **name), {
    *name = code == FAKE_OUT_OF_MEMORY             ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == FAKE_NO_DEVICE               ? "CUDA_ERROR_NO_DEVICE"
            : code == FAKE_INVALID_DEVICE          ? "CUDA_ERROR_INVALID_DEVICE"
            : code == FAKE_INVALID_CONTEXT         ? "CUDA_ERROR_INVALID_CONTEXT"
            : code == FAKE_NO_BINARY_FOR_GPU       ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : code == FAKE_UNSUPPORTED_PTX_VERSION ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
            : code == FAKE_NOT_FOUND               ? "CUDA_ERROR_NOT_FOUND"
                                                   : "CUDA_ERROR_OF_THE_FAKE";
})

ENTRY(cuGetErrorString, (int code, const char **text),
      { *text = code == FAKE_OUT_OF_MEMORY ? "out of memory" : "as the test wished"; })

ENTRY(cuDeviceGet, (int *handle, int ordinal), {
    *handle = ordinal;
    result = !initialized             ? FAKE_NOT_INITIALIZED
             : ordinal < fake.devices ? FAKE_OK
                                      : FAKE_INVALID_DEVICE;
})

ENTRY(cuDeviceGetName, (char *name, int size, int handle),
      { snprintf(name, (size_t)size, "Fake GPU %d", handle); })

ENTRY(cuDeviceGetAttribute, (int *value, int attribute, int handle), {
    *value = attribute == 16   ? MULTIPROCESSORS
             : attribute == 75 ? fake.capability / 10
             : attribute == 76 ? fake.capability % 10
                               : -1;
    result = handle < fake.devices ? FAKE_OK : FAKE_INVALID_DEVICE;
})

ENTRY(cuDevicePrimaryCtxRetain, (void **context, int handle), {
    if (retained[handle]++)
        fake_complain("the context of device %d is retained twice", handle);
    *context = &retained[handle];
})

ENTRY(cuCtxPushCurrent_v2, (void *context), {
    const int *given = context;
    result = FAKE_INVALID_CONTEXT;
    if (given >= retained && given < retained + FAKE_MAX_DEVICES && *given && depth < DEPTH) {
        stack[depth++] = (int)(given - retained);
        result = FAKE_OK;
    }
})

ENTRY(cuCtxPopCurrent_v2, (void **context), {
    if (depth)
        *context = &retained[stack[--depth]];
    else
        result = FAKE_INVALID_CONTEXT;
})

ENTRY(cuThreadExchangeStreamCaptureMode, (int *wanted), {
    const int old = mode;
    mode = *wanted;
    *wanted = old;
})

ENTRY(cuModuleLoadData, (void **module, const void *image), {
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    result = device < 0             ? FAKE_INVALID_CONTEXT
             : magic != 0xBA55ED50u ? FAKE_INVALID_IMAGE
             : fake.capability < 75 ? FAKE_NO_BINARY_FOR_GPU
             : fake.version < 13000 ? FAKE_UNSUPPORTED_PTX_VERSION
                                    : unsafe_now("cuModuleLoadData");
    if (!result && modules[device]++)
        fake_complain("device %d has its kernels twice", device);
    *module = result ? NULL : &modules[device];
})

ENTRY(cuModuleGetFunction, (void **found, void *module, const char *name), {
    const int owner = (int)((int *)module - modules);
    result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_NOT_FOUND;
    for (size_t i = 0; device >= 0 && i < fake.kernel_count; i++)
        if (!strcmp(fake.kernels[i].name, name)) {
            functions[owner][i] = (function){&fake.kernels[i], owner};
            *found = &functions[owner][i];
            result = FAKE_OK;
        }
})

ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor,
      (int *blocks, void *kernel, int block, size_t shared), {
          (void)kernel;
          *blocks = block == 256 && shared == 0 ? OCCUPANCY : 0;
          result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_OK;
      })

ENTRY(cuLaunchKernel,
      (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
       unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params,
       void **extra),
      {
          const function *f = kernel;
          fake_stream *on = device < 0 ? NULL : fake_stream_of(stream, device);
          fake_op op = {.kind = FAKE_LAUNCH, .kernel = f->kernel};
          op.grid = grid_x;
          op.block = block_x;
          op.args = params[0];
          if (device < 0)
              result = FAKE_INVALID_CONTEXT;
          else if (!on || f->device != device)
              result = FAKE_INVALID_HANDLE;
          else if (!grid_x || grid_x > MULTIPROCESSORS * OCCUPANCY || grid_y != 1 || grid_z != 1 ||
                   !block_x || block_y != 1 || block_z != 1 || shared || extra)
              result = FAKE_INVALID_VALUE;
          else
              fake_submit(on, op);
      })

ENTRY(cuMemAlloc_v2, (uint64_t *memory, size_t size), {
    result = device < 0 ? FAKE_INVALID_CONTEXT
             : !size    ? FAKE_INVALID_VALUE
                        : unsafe_now("cuMemAlloc_v2");
    if (!result)
        *memory = (uint64_t)(uintptr_t)fake_allocate(device, size);
})

/* As the real one does of such memory, it waits for the device. */
ENTRY(cuMemFree_v2, (uint64_t memory), {
    if (device >= 0)
        fake_finish(device);
    result = device < 0 ? FAKE_INVALID_CONTEXT : fake_release((void *)(uintptr_t)memory, 0);
})

ENTRY(cuMemHostAlloc, (void **memory, size_t size, unsigned flags), {
    result = device < 0       ? FAKE_INVALID_CONTEXT
             : !size || flags ? FAKE_INVALID_VALUE
                              : unsafe_now("cuMemHostAlloc");
    if (!result)
        *memory = fake_allocate(-1, size);
})

ENTRY(cuMemFreeHost, (void *memory),
      { result = device < 0 ? FAKE_INVALID_CONTEXT : fake_release(memory, 1); })

ENTRY(cuMemHostRegister_v2, (void *memory, size_t size, unsigned flags), {
    result = device < 0   ? FAKE_INVALID_CONTEXT
             : flags != 1 ? FAKE_INVALID_VALUE
                          : unsafe_now("cuMemHostRegister_v2");
    if (!result)
        result = fake_register(memory, size);
})

ENTRY(cuMemHostUnregister, (void *memory),
      { result = device < 0 ? FAKE_INVALID_CONTEXT : fake_unregister(memory); })

ENTRY(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t size, void *stream), {
    fake_stream *on = device < 0 ? NULL : fake_stream_of(stream, device);
    if (!on)
        result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_INVALID_HANDLE;
    else if (!fake_inside(device, to, size) || !fake_inside(-1, (uint64_t)(uintptr_t)from, size)) {
        fake_complain("a copy of %zu bytes leaves its memory", size);
        result = FAKE_INVALID_VALUE;
    } else
        fake_submit(
            on,
            (fake_op){.kind = FAKE_COPY, .to = (void *)(uintptr_t)to, .from = from, .size = size});
})

ENTRY(cuEventCreate, (void **event, unsigned flags), {
    fake_event *made = device < 0 || flags != 2 ? NULL : calloc(1, sizeof *made);
    result = device < 0 ? FAKE_INVALID_CONTEXT : made ? FAKE_OK : FAKE_INVALID_VALUE;
    if (made) {
        made->device = device;
        made->next = fake_events;
        *event = fake_events = made;
    }
})

ENTRY(cuEventDestroy_v2, (void *event), {
    fake_event **at = &fake_events;
    while (*at && *at != event)
        at = &(*at)->next;
    if (*at)
        *at = (*at)->next;
    else
        fake_complain("an event is destroyed twice");
    free(event);
})

ENTRY(cuEventRecord, (void *event, void *stream), {
    fake_event *recorded = event;
    fake_stream *on = device < 0 ? NULL : fake_stream_of(stream, device);
    if (!on || recorded->device != device)
        result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_INVALID_HANDLE;
    else if (on->capture) {
        recorded->stream = NULL;
        recorded->captured = 1;
    } else {
        recorded->stream = on;
        recorded->captured = 0;
        recorded->until = on->submitted + 1;
        fake_submit(on, (fake_op){.kind = FAKE_RECORD});
    }
})

ENTRY(cuEventQuery, (void *event), {
    const fake_event *asked = event;
    result = asked->captured ? FAKE_CAPTURED_EVENT : unsafe_now("cuEventQuery");
    if (!result && asked->stream && asked->stream->done < asked->until)
        result = FAKE_NOT_READY;
})

ENTRY(cuEventSynchronize, (void *event), {
    const fake_event *asked = event;
    if (asked->captured)
        result = FAKE_CAPTURED_EVENT;
    else if (asked->stream)
        fake_run_until(asked->stream, asked->until);
})

ENTRY(cuStreamWaitEvent, (void *stream, void *event, unsigned flags), {
    const fake_event *asked = event;
    fake_stream *on = device < 0 ? NULL : fake_stream_of(stream, device);
    if (!on || flags)
        result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_INVALID_HANDLE;
    else if (asked->captured) {
        fake_complain("a stream joins a capture by its event");
        result = FAKE_CAPTURED_EVENT;
    } else if (asked->stream)
        fake_submit(on,
                    (fake_op){.kind = FAKE_WAIT, .other = asked->stream, .until = asked->until});
})

ENTRY(cuStreamGetId, (void *stream, uint64_t *id), {
    const fake_stream *asked = device < 0 ? NULL : fake_stream_of(stream, device);
    if (asked)
        *id = asked->id;
    else
        result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_INVALID_HANDLE;
})

#ifndef FAKE_CUDA_OLD
ENTRY(cuStreamGetCaptureInfo_v2,
      (void *stream, int *state, uint64_t *id, void **graph, const void **nodes, size_t *count), {
          const fake_stream *on = device < 0 ? NULL : fake_stream_of(stream, device);
          if (on && !nodes && !count) {
              *state = on->capture != 0;
              if (id)
                  *id = on->capture;
              if (graph)
                  *graph = on->graph;
          } else
              result = device < 0 ? FAKE_INVALID_CONTEXT : FAKE_INVALID_HANDLE;
      })
#endif

ENTRY(cuUserObjectCreate,
      (void **holder, void *object, void (*gone)(void *), unsigned count, unsigned flags), {
          fake_object *made = count != 1 || flags != 1 ? NULL : calloc(1, sizeof *made);
          result = made ? FAKE_OK : FAKE_INVALID_VALUE;
          if (made) {
              *made = (fake_object){.object = object, .gone = gone};
              *holder = made;
              fake_objects++;
          }
      })

ENTRY(cuUserObjectRelease, (void *holder, unsigned count), {
    result = count == 1 ? FAKE_OK : FAKE_INVALID_VALUE;
    if (!result)
        fake_drop(holder);
})

ENTRY(cuGraphRetainUserObject, (void *graph, void *holder, unsigned count, unsigned flags), {
    fake_graph *to = graph;
    fake_object *object = holder;
    result = to && count == 1 && flags == 1 ? FAKE_OK : FAKE_INVALID_VALUE;
    if (!result) {
        object->next = to->objects;
        to->objects = object;
    }
})

void fake_cuda_enter(int device)
{
    if (depth == DEPTH)
        abort();
    stack[depth++] = device;
}

void fake_cuda_leave(void)
{
    depth--;
}

int fake_cuda_depth(void)
{
    return depth;
}

int fake_cuda_mode(void)
{
    return mode;
}
