/* claim.c - lets CPU tensors claim to lie on a CUDA device: a DLPack exchange API that asks torch's
 * and changes the device in the answer. One API per device, as a tensor's type has one. */
#include "py/torch/dlpack.h"

enum { DEVICES = 2 };

static fst_dl_api torch_api, claims[DEVICES];
static void *streams[DEVICES];

static const fst_dl_device places[DEVICES] = {{FST_DL_CUDA, 0}, {FST_DL_CUDA, 1}};

#define CLAIM(n)                                                         \
    static int tensor_##n(void *object, fst_dl_tensor *out)              \
    {                                                                    \
        const int failed = torch_api.tensor_from_py_object(object, out); \
        out->device = places[n];                                         \
        return failed;                                                   \
    }                                                                    \
    static int managed_##n(void *object, fst_dl_managed **out)           \
    {                                                                    \
        if (torch_api.managed_tensor_from_py_object(object, out))        \
            return -1;                                                   \
        (*out)->tensor.device = places[n];                               \
        return 0;                                                        \
    }
CLAIM(0)
CLAIM(1)
#undef CLAIM

static int current_stream(int32_t type, int32_t device, void **out)
{
    if (type != FST_DL_CUDA || device < 0 || device >= DEVICES)
        return -1;
    *out = streams[device];
    return 0;
}

/* The stream that is current on a device from now on. */
void claim_stream(int device, void *stream)
{
    streams[device] = stream;
}

/* The API of tensors that claim to lie on `device`, made from torch's. */
const fst_dl_api *claim_api(const fst_dl_api *original, int device)
{
    torch_api = *original;
    for (int n = 0; n < DEVICES; n++) {
        claims[n] = torch_api;
        claims[n].header.previous = 0;
        claims[n].current_work_stream = current_stream;
    }
    claims[0].tensor_from_py_object = tensor_0;
    claims[0].managed_tensor_from_py_object = managed_0;
    claims[1].tensor_from_py_object = tensor_1;
    claims[1].managed_tensor_from_py_object = managed_1;
    return &claims[device];
}
