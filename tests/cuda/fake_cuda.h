/* fake_cuda.h - what a test asks of the library that stands in for libcuda.so.1.
 *
 * Device memory is host memory with guards around it. Work on a stream is queued and runs late, in
 * the order of the stream and of the events between streams only, so that a wait that is missing
 * and a pinned slot that is used again too early are seen. Misuse that the real driver would not
 * report is kept as a complaint. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* A kernel of the fatbin. It runs with its grid, its block and a copy of the struct it was launched
 * with; NULL: it does nothing. A result other than 0 is a complaint. */
typedef struct fake_cuda_kernel fake_cuda_kernel;
struct fake_cuda_kernel {
    const char *name;
    size_t args_size;
    int (*run)(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args);
    const void *user;
};

/* The kernels that cuModuleGetFunction finds; the table must stay. */
void fake_cuda_use(const fake_cuda_kernel *kernels, size_t count);

/* The n-th call from now on of an entry point returns `code`, once; with -1 every call does. */
void fake_cuda_fail(const char *call, long nth, int code);

/* Calls of an entry point since the start; of all of them for NULL. */
long fake_cuda_calls(const char *call);

/* The i-th entry point, or NULL past the end. */
const char *fake_cuda_entry(size_t index);

/* How many devices there are, their compute capability (10 * major + minor) and the driver's CUDA
 * version. */
void fake_cuda_machine(int devices, int capability, int version);

/* Operations that a stream holds back before it runs the oldest; 0 at first. */
void fake_cuda_lag(size_t operations);

/* A stream of a device. A closed one must not be used any more. */
void *fake_cuda_stream(int device);
void fake_cuda_close_stream(void *stream);

/* Destroys a stream, without waiting for its work, and gives its handle to a new one. */
void fake_cuda_recreate_stream(void *stream);

/* Runs all that is queued: of all streams, or of one and of what it waits for. */
void fake_cuda_synchronize(void);
void fake_cuda_run(void *stream);

/* Captures a stream into a graph, which another one joins until that ends, as by an event; replays
 * a graph on a stream. */
void fake_cuda_begin_capture(void *stream);
void fake_cuda_join_capture(void *stream, void *captured);
void *fake_cuda_end_capture(void *stream);
void fake_cuda_replay(void *graph, void *stream);
void fake_cuda_free_graph(void *graph);

/* Memory of a device for tensors. */
void *fake_cuda_malloc(int device, size_t size);
void fake_cuda_free(void *memory);

/* Whether [address, address + size) lies in one living allocation of the device whose kernel runs;
 * where it does not that is a complaint. */
int fake_cuda_holds(uint64_t address, size_t size);

/* What lives: allocations of device memory and of pinned memory, events, pieces of other memory
 * that are registered and so pinned, objects that graphs hold. */
typedef struct {
    size_t memory, pinned, events, registered, objects;
} fake_cuda_living;
fake_cuda_living fake_cuda_alive(void);

/* Let this thread call the driver's functions for a device, as torch does, without a context that
 * it would have to retain. */
void fake_cuda_enter(int device);
void fake_cuda_leave(void);

/* Reads a device's memory when the stream comes to it, as a kernel of the consumer would. */
void fake_cuda_read(void *stream, void *to, const void *from, size_t size);

/* Whether memory is pinned. */
int fake_cuda_is_pinned(uint64_t address, size_t size);

/* Contexts that this thread has pushed and not popped, and whether its capture mode is the usual
 * one. */
int fake_cuda_depth(void);
int fake_cuda_mode(void);

/* The first complaint since the last call, or NULL. */
const char *fake_cuda_complaint(void);
