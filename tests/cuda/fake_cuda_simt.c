/* Gives the fake library the real kernels, run by the simulator. */
#include <stdlib.h>

#include "fake_cuda_inside.h"
#include "simt.h"

/* Blocks and threads of each launch run in another order. */
static int simulate(const fake_cuda_kernel *self, unsigned grid, unsigned block, const void *args)
{
    static uint64_t launches;
    simt_shuffle_by(launches++ % 3);
    if (!simt_launch(self->user, grid, block, args))
        return 0;
    fake_complain("%s: %s", self->name, simt_error());
    return 1;
}

__attribute__((constructor)) static void use_simulator(void)
{
    static const char *const names[] = {"fst_begin",        "fst_update",       "fst_unscale",
                                        "fst_norm",         "fst_scale",        "fst_clamp",
                                        "fst_accumulate",   "fst_loss_scale",   "fst_image",
                                        "fst_image_smooth", "fst_cross_entropy"};
    enum { COUNT = sizeof names / sizeof names[0] };
    static fake_cuda_kernel kernels[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        const simt_kernel *kernel = simt_find(names[i]);
        if (!kernel)
            abort();
        kernels[i] = (fake_cuda_kernel){names[i], kernel->launch_size, simulate, kernel};
    }
    fake_cuda_use(kernels, COUNT);
}
