/* fake_cuda_inside.h - what the files of the fake library share. All of it is under one lock, which
 * each function of fake_cuda.h takes that reads or changes what entry points change: threads of a
 * test may be in the driver while another asks. */
#pragma once

#include "fake_cuda.h"

enum {
    FAKE_OK = 0,
    FAKE_INVALID_VALUE = 1,
    FAKE_OUT_OF_MEMORY = 2,
    FAKE_NOT_INITIALIZED = 3,
    FAKE_DEINITIALIZED = 4,
    FAKE_NO_DEVICE = 100,
    FAKE_INVALID_DEVICE = 101,
    FAKE_INVALID_IMAGE = 200,
    FAKE_INVALID_CONTEXT = 201,
    FAKE_NO_BINARY_FOR_GPU = 209,
    FAKE_UNSUPPORTED_PTX_VERSION = 222,
    FAKE_INVALID_HANDLE = 400,
    FAKE_NOT_FOUND = 500,
    FAKE_NOT_READY = 600,
    FAKE_ALREADY_REGISTERED = 712,
    FAKE_NOT_REGISTERED = 713,
    FAKE_CAPTURE_UNSUPPORTED = 900,
    FAKE_CAPTURED_EVENT = 907,
    FAKE_MAX_DEVICES = 4,
};

/* clang-format off */
#define FAKE_EACH_ENTRY(X) \
    X(cuInit) \
    X(cuDriverGetVersion) \
    X(cuGetErrorName) \
    X(cuGetErrorString) \
    X(cuDeviceGet) \
    X(cuDeviceGetName) \
    X(cuDeviceGetAttribute) \
    X(cuDevicePrimaryCtxRetain) \
    X(cuCtxPushCurrent_v2) \
    X(cuCtxPopCurrent_v2) \
    X(cuThreadExchangeStreamCaptureMode) \
    X(cuModuleLoadData) \
    X(cuModuleGetFunction) \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(cuLaunchKernel) \
    X(cuMemAlloc_v2) \
    X(cuMemFree_v2) \
    X(cuMemHostAlloc) \
    X(cuMemFreeHost) \
    X(cuMemHostRegister_v2) \
    X(cuMemHostUnregister) \
    X(cuMemcpyHtoDAsync_v2) \
    X(cuEventCreate) \
    X(cuEventDestroy_v2) \
    X(cuEventRecord) \
    X(cuEventQuery) \
    X(cuEventSynchronize) \
    X(cuStreamWaitEvent) \
    X(cuStreamGetId) \
    X(cuStreamGetCaptureInfo_v2) \
    X(cuUserObjectCreate) \
    X(cuUserObjectRelease) \
    X(cuGraphRetainUserObject)
/* clang-format on */

enum {
#define NUMBER(name) FAKE_##name,
    FAKE_EACH_ENTRY(NUMBER)
#undef NUMBER
        FAKE_ENTRIES
};

typedef struct {
    int devices, capability, version;
    const fake_cuda_kernel *kernels;
    size_t kernel_count;
} fake_settings;

typedef enum { FAKE_COPY, FAKE_LAUNCH, FAKE_WAIT, FAKE_RECORD } fake_kind;

typedef struct fake_stream fake_stream;

/* An operation in a stream's queue or in a graph. */
typedef struct fake_op fake_op;
struct fake_op {
    fake_op *next;
    fake_kind kind;
    void *to; /* of a copy */
    const void *from;
    size_t size;
    const fake_cuda_kernel *kernel;
    unsigned grid, block;
    void *args;
    fake_stream *other; /* that is waited for until it has done so many operations */
    uint64_t until;
};

/* What a graph holds; the driver calls `gone` when it is dropped. */
typedef struct fake_object fake_object;
struct fake_object {
    fake_object *next;
    void *object;
    void (*gone)(void *object);
};

typedef struct {
    fake_op *first, **last;
    fake_object *objects;
} fake_graph;

struct fake_stream {
    fake_stream *next;
    fake_op *first, **last;
    uint64_t submitted, done;
    uint64_t capture; /* 0: none */
    fake_graph *graph;
    int device, closed;
    unsigned long thread; /* of a per-thread stream */
    uint64_t id;
};

typedef struct fake_event fake_event;
struct fake_event {
    fake_event *next;
    fake_stream *stream;
    uint64_t until;
    int device;
    int captured; /* it marks a place in a graph */
};

/* fake_cuda.c */
extern fake_settings fake;
void fake_lock(void); /* by a thread that has it, too */
void fake_unlock(void);
int fake_enter(int entry); /* takes the lock; what the call returns if it is to fail */

/* fake_cuda_calls.c */
extern fake_event *fake_events; /* that live */

/* fake_cuda_memory.c */
void *fake_allocate(int device, size_t size); /* device: -1 for pinned memory */
int fake_release(void *memory, int pinned);
int fake_register(void *memory, size_t size);
int fake_unregister(void *memory);
int fake_inside(int device, uint64_t address, size_t size); /* -1: pinned or registered */
void fake_check_guards(void);
void fake_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* fake_cuda_queue.c */
fake_stream *fake_stream_of(void *handle, int device);
void fake_submit(fake_stream *stream, fake_op op);
void fake_run_until(fake_stream *stream, uint64_t until);
void fake_finish(int device);
void fake_drop(fake_object *dropped);
extern size_t fake_objects; /* that live */
extern __thread int fake_dropping;
int fake_capturing(void); /* whether any stream is captured */
int fake_running(void);   /* the device whose kernel runs, or -1 */
