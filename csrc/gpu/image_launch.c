#include "gpu/image_launch.h"

#include "base/device.h"

fst_code fst_gpu_image(fst_gpu_tables *tables, const fst_image_batch *batch,
                       const fst_image_sample *samples, void *stream, fst_status *status)
{
    fst_image_batch args = *batch;
    const fst_gpu_device *device = tables->device;
    const size_t pixels = (size_t)batch->height * (size_t)batch->width;
    const size_t blocks = (pixels + FST_DEVICE_BLOCK - 1) / FST_DEVICE_BLOCK * (size_t)batch->count;
    const fst_kernel kernel = batch->antialias ? FST_KERNEL_IMAGE_SMOOTH : FST_KERNEL_IMAGE;
    int mode;
    if (!blocks || !batch->channels)
        return FST_OK;
    if (fst_gpu_enter_relaxed(device, &mode, status))
        return status->code;
    if (!fst_gpu_ring_upload(&tables->ring, device, batch->samples, samples,
                             (size_t)batch->count * sizeof *samples, stream, status))
        fst_gpu_launch(device, kernel, blocks, stream, &args, status);
    return fst_gpu_leave_relaxed(device, mode, status);
}
