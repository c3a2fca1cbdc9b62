/* driver.h - the CUDA driver: a library that is opened at first use, never at start-up.
 *
 * Each function is one call of the driver whose error comes back with CUDA's own text, the call and
 * the device, which `device` is only there for. Contexts, streams, events, modules and functions
 * are the driver's handles. From fst_driver_load on, all need fst_driver_enter. */
#ifndef FST_GPU_DRIVER_H
#define FST_GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
    char name[64];
    int handle, multiprocessors;
    int major, minor; /* compute capability */
    int version;      /* of CUDA, that the driver supports: 1000 * major + 10 * minor */
} fst_driver_device;

/* Finds the driver and initializes it; after a fork, and where the driver lacks a function, this is
 * an error. Safe from any thread, and cheap once it has succeeded. */
fst_code fst_driver_open(fst_status *status);

fst_code fst_driver_describe(int device, fst_driver_device *out, fst_status *status);

/* The device's primary context, which torch uses too. It is never released: at exit the driver and
 * torch tidy up in any order. */
fst_code fst_driver_retain(int device, int handle, void **context, fst_status *status);

/* Makes the context current for this thread, and allows what a stream capture would forbid: to take
 * memory and to ask for events. Everything is put back by fst_driver_leave, which keeps an error
 * that `status` has already. */
fst_code fst_driver_enter(int device, void *context, int *mode, fst_status *status);
fst_code fst_driver_leave(int device, int mode, fst_status *status);

fst_code fst_driver_load(int device, const void *image, void **module, fst_status *status);
fst_code fst_driver_find(int device, void *module, const char *kernel, void **function,
                         fst_status *status);

/* Blocks of a kernel that fit on a multiprocessor at once. */
fst_code fst_driver_occupancy(int device, const char *kernel, void *function, int block,
                              int *blocks, fst_status *status);

/* Launches a kernel whose only parameter is the struct at `args`. */
fst_code fst_driver_launch(int device, const char *kernel, void *function, uint32_t grid,
                           uint32_t block, void *stream, void *args, fst_status *status);

fst_code fst_driver_alloc(int device, size_t size, uint64_t *memory, fst_status *status);
void fst_driver_free(uint64_t memory);
fst_code fst_driver_alloc_pinned(int device, size_t size, void **memory, fst_status *status);
void fst_driver_free_pinned(void *memory);

/* Page-locks whole pages of memory that somebody else took, for all devices. */
fst_code fst_driver_lock(int device, void *memory, size_t size, fst_status *status);
void fst_driver_unlock(void *memory);

fst_code fst_driver_upload(int device, uint64_t to, const void *pinned, size_t size, void *stream,
                           fst_status *status);

fst_code fst_driver_new_event(int device, void **event, fst_status *status);
void fst_driver_free_event(void *event);
fst_code fst_driver_record(int device, void *event, void *stream, fst_status *status);
fst_code fst_driver_wait(int device, void *stream, void *event, fst_status *status);
fst_code fst_driver_passed(int device, void *event, int *passed, fst_status *status);

/* Blocks until the event has passed: for what is about to be freed only. */
void fst_driver_synchronize(void *event);

/* *capture becomes the number of the capture that the stream is part of, or 0. */
fst_code fst_driver_capture(int device, void *stream, uint64_t *capture, fst_status *status);

#endif
