/* driver.h - the CUDA driver, a library that is opened at first use, never at start-up.
 *
 * Each function is one call of the driver. Its error has CUDA's own text, the call and the
 * device; the argument `device` is only for that. Contexts, streams, events, modules and
 * functions are the driver's handles. From fst_driver_load on, all functions need
 * fst_driver_enter. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
    char name[64];
    int handle, multiprocessors;
    int major, minor; /* compute capability */
    int version;      /* of CUDA, that the driver supports: 1000 * major + 10 * minor */
} fst_driver_device;

/* Opens and initializes the driver. Fails after a fork, and where the driver lacks a function.
 * Safe from any thread, and cheap once it has succeeded. */
fst_code fst_driver_open(fst_status *status);

/* The CUDA version that the driver supports, without initializing it; 0 if there is none. */
int fst_driver_version(void);

fst_code fst_driver_describe(int device, fst_driver_device *out, fst_status *status);

/* Retains the device's primary context, which torch uses too. It is never released: at exit the
 * driver and torch shut down in any order. */
fst_code fst_driver_retain(int device, int handle, void **context, fst_status *status);

/* Make the context current for this thread, and undo that. An error that `status` has already is
 * kept. */
fst_code fst_driver_enter(int device, void *context, fst_status *status);
fst_code fst_driver_leave(int device, fst_status *status);

/* Permit this thread calls that a stream capture of any thread forbids: allocating and freeing
 * memory, loading kernels, querying events and waiting for them. An error that `status` has
 * already is kept. */
fst_code fst_driver_relax(int device, int *mode, fst_status *status);
fst_code fst_driver_restore(int device, int mode, fst_status *status);

fst_code fst_driver_load(int device, const void *image, void **module, fst_status *status);
fst_code fst_driver_find(int device, void *module, const char *kernel, void **function,
                         fst_status *status);

/* The number of blocks of a kernel that fit on a multiprocessor at once. */
fst_code fst_driver_occupancy(int device, const char *kernel, void *function, int block,
                              int *blocks, fst_status *status);

/* Launches a kernel whose only parameter is the struct at `args`. */
fst_code fst_driver_launch(int device, const char *kernel, void *function, uint32_t grid,
                           uint32_t block, void *stream, void *args, fst_status *status);

fst_code fst_driver_alloc(int device, size_t size, uint64_t *memory, fst_status *status);
void fst_driver_free(uint64_t memory);
fst_code fst_driver_alloc_pinned(int device, size_t size, void **memory, fst_status *status);
void fst_driver_free_pinned(void *memory);

/* Page-locks whole pages of memory for all devices. */
fst_code fst_driver_lock(int device, void *memory, size_t size, fst_status *status);
void fst_driver_unlock(void *memory);

fst_code fst_driver_upload(int device, uint64_t to, const void *pinned, size_t size, void *stream,
                           fst_status *status);

fst_code fst_driver_new_event(int device, void **event, fst_status *status);
void fst_driver_free_event(void *event);
fst_code fst_driver_record(int device, void *event, void *stream, fst_status *status);
fst_code fst_driver_wait(int device, void *stream, void *event, fst_status *status);
fst_code fst_driver_passed(int device, void *event, int *passed, fst_status *status);

/* The number of a stream. No other stream of the process has it, while the handle of a stream that
 * was destroyed comes again, and that of the per-thread stream means another in each thread. */
fst_code fst_driver_stream_id(int device, void *stream, uint64_t *id, fst_status *status);

/* Wait until the event has passed; the second one is only for what is about to be freed. */
fst_code fst_driver_await(int device, void *event, fst_status *status);
void fst_driver_synchronize(void *event);

/* *capture becomes the number of the capture that the stream is part of, or 0. */
fst_code fst_driver_capture(int device, void *stream, uint64_t *capture, fst_status *status);

/* Gives an object to the graph that the stream is captured into, or after an error to nobody. When
 * nothing can replay the graph any more, `gone` is called with the object, by any thread. It must
 * not call the driver. */
fst_code fst_driver_give_to_graph(int device, void *stream, void *object, void (*gone)(void *),
                                  fst_status *status);
