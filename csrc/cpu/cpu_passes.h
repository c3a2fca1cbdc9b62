/* cpu_passes.h - the CPU's passes. Each is one parallel region per round of the work. */
#ifndef FST_CPU_CPU_PASSES_H
#define FST_CPU_CPU_PASSES_H

#include "base/status.h"
#include "cpu/kernels.h"

/* partial[c] = reduction of factor * operand over chunk c. */
fst_code fst_cpu_reduce(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                        fst_norm_kind norm, double power, double factor, double *partial,
                        fst_status *status);

/* The operand times factor, in place; partial[c] = sum of squares of the new values of chunk c;
 * *nonfinite is set to 1 if an old value was infinite or NaN. */
fst_code fst_cpu_unscale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                         double factor, double *partial, int *nonfinite, fst_status *status);

fst_code fst_cpu_scale(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double factor, fst_status *status);

/* partial[c] = sum of squares of the operand over chunk c; where that is expected[c] the chunk is
 * then multiplied by `factor`. */
fst_code fst_cpu_scale_expected(const fst_work *work, const fst_cpu_kernels *kernels,
                                unsigned operand, const double *expected, double factor,
                                double *partial, fst_status *status);

/* Multiplies the operand by `again` in chunks with partial[c] = expected[c], by `factor` in
 * others. */
fst_code fst_cpu_scale_rest(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                            const double *expected, double *partial, double again, double factor,
                            fst_status *status);

fst_code fst_cpu_clamp(const fst_work *work, const fst_cpu_kernels *kernels, unsigned operand,
                       double limit, fst_status *status);

/* Operand 0 of every span += factor * each of its one or two others in turn. With `start` it is
 * overwritten, not read. */
fst_code fst_cpu_accumulate(const fst_work *work, const fst_cpu_kernels *kernels, double factor,
                            int start, fst_status *status);

/* Updates every span; see fst_cpu_kernels.update. `args` is indexed by span.args. Chunks run
 * from last to first: the last ones that the measuring pass read are still in the cache. */
fst_code fst_cpu_update(const fst_work *work, const fst_cpu_kernels *kernels,
                        const fst_update_args *args, double inv_scale, int write_grad,
                        fst_status *status);

#endif
