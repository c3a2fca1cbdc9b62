/* dlpack.h - the part of DLPack 1.3's C exchange API (https://github.com/dmlc/dlpack) that is used
 * here, declared by its ABI; a test compiles it against torch's copy of the header. */
#pragma once

#include <stdint.h>

enum { FST_DL_CPU = 1, FST_DL_CUDA = 2 }; /* device types */
/* Type codes. */
enum { FST_DL_INT, FST_DL_UINT, FST_DL_FLOAT, FST_DL_BFLOAT = 4, FST_DL_COMPLEX };

typedef struct {
    int32_t device_type, device_id;
} fst_dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} fst_dl_dtype;

typedef struct {
    void *data;
    fst_dl_device device;
    int32_t ndim;
    fst_dl_dtype dtype;
    int64_t *shape, *strides; /* owned by the tensor */
    uint64_t byte_offset;
} fst_dl_tensor;

/* An export that keeps the tensor alive until its deleter is called. */
typedef struct fst_dl_managed {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*deleter)(struct fst_dl_managed *self);
    uint64_t flags;
    fst_dl_tensor tensor;
} fst_dl_managed;

typedef struct fst_dl_header {
    struct {
        uint32_t major, minor;
    } version;
    struct fst_dl_header *previous;
} fst_dl_header;

typedef struct {
    fst_dl_header header;
    void (*managed_tensor_allocator)(void);
    int (*managed_tensor_from_py_object)(void *object, fst_dl_managed **out);
    int (*managed_tensor_to_py_object)(fst_dl_managed *managed, void **out);
    int (*tensor_from_py_object)(void *object, fst_dl_tensor *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out);
} fst_dl_api;
