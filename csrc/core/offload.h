/* offload.h - an optimizer's parameters that are updated in host memory: the copies and updates
 * that the engines make. */
#pragma once

#include "core/engines.h"
#include "core/plan.h"
#include "gpu/context.h"
#include "rules/rules.h"

/* A parameter. Its elements, those of its gradient and of both copies lie one after another, in the
 * same order. `param` is an address of the device. */
typedef struct {
    void *param, *host, *host_grad;
    double *sums; /* of the gradient's squares, one for each chunk */
    int64_t count;
    fst_dtype dtype, grad_dtype;
} fst_offload_param;

typedef struct fst_offload fst_offload;

/* `tile` elements are an engine's work at a time; rounded up to whole chunks, of which sums and
 * states in codes are made. */
fst_offload *fst_offload_new(unsigned updaters, int64_t tile, fst_status *status);
void fst_offload_free(fst_offload *offload);

fst_engines *fst_offload_engines(fst_offload *offload);

/* Where parameters lie: on a CUDA device, and the stream that copies them back; NULL: in host
 * memory. */
typedef struct {
    const fst_gpu_device *gpu;
    void *stream;
} fst_offload_home;

/* Makes these the parameters, once nothing moves. Their memory must stay until others are set; that
 * of copies is page-locked for a CUDA device. */
fst_code fst_offload_set(fst_offload *offload, const fst_offload_param *params, size_t count,
                         fst_offload_home home, fst_status *status);

fst_offload_home fst_offload_home_of(const fst_offload *offload);

/* The tiles of a parameter are [first, last). */
void fst_offload_tiles(const fst_offload *offload, size_t param, uint32_t *first, uint32_t *last);

/* Copies a gradient to the host; with a factor that is not NaN the sums are taken too, of the
 * gradient times that. The memory must stay until it was copied. From a CUDA device the caller
 * copies, and `source` is the event behind that. Returns 0 and does nothing if the parameter is
 * under way, or could not be copied back. No two threads may call it at once. */
int fst_offload_arrive(fst_offload *offload, size_t param, void *source, double factor);

/* Checks, before anything is changed, that the spans of a plan can be updated here: their
 * parameters are those of fst_offload_set, or lie elsewhere. */
fst_code fst_offload_check(const fst_offload *offload, const fst_plan *plan, fst_status *status);

/* Allows the update of the spans that fst_offload_check knows, and updates the others at once. The
 * plan may change after that. Their memory must stay until all is back. */
void fst_offload_allow(fst_offload *offload, const fst_plan *plan, const fst_update_args *args,
                       double inv_scale, int write_grad);

/* Lets the copies take as long as over a link of so many bytes per second; 0: as fast as they are.
 * For benchmarks. */
void fst_offload_pace(fst_offload *offload, double in, double out);
