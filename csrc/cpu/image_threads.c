#include "cpu/image_threads.h"

#include <stdlib.h>

#include "cpu/image_scratch.h"
#include "cpu/parallel.h"

enum { GRAIN = 1 << 16 }; /* elements of the smallest part worth a thread: some 30 microseconds */

typedef struct {
    const fst_image_batch *batch;
    const fst_cpu_kernels *kernels;
    int failed; /* a thread found no memory */
} image_job;

size_t fst_cpu_image_scratch(const fst_image_batch *batch)
{
    return fst_image_scratch_of(batch, NULL).size;
}

static void run_rows(int64_t begin, int64_t end, void *context)
{
    image_job *job = context;
    void *memory = NULL;
    if (posix_memalign(&memory, FST_IMAGE_ALIGNMENT, fst_cpu_image_scratch(job->batch))) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    job->kernels->image(job->batch, begin, end, memory);
    free(memory);
}

fst_code fst_cpu_image(const fst_image_batch *batch, const fst_cpu_kernels *kernels,
                       fst_status *status)
{
    image_job job = {.batch = batch, .kernels = kernels};
    const int64_t rows = (int64_t)batch->count * batch->height;
    const int64_t row = (int64_t)batch->channels * batch->width;
    if (!row)
        return FST_OK;
    if (fst_parallel_for(rows, GRAIN / row + 1, run_rows, &job, status))
        return status->code;
    if (job.failed)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu bytes to transform images in",
                        fst_cpu_image_scratch(batch));
    return FST_OK;
}
