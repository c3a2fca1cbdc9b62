/* rules_check.cu - every rule, conversion and formula of csrc/rules and csrc/base/portable.h on the
 * device: the least that proves them to be in the common subset of C11 and CUDA C. Never shipped: a
 * test compiles it to PTX and looks for fused instructions, which would round differently from the
 * CPU. */
#include "rules/loss_scale.h"
#include "rules/rules.h"
#include "rules/tree.h"

#define CHECK_RULE(name, states, real, suffix)                                              \
    extern "C" __global__ void check_##name##_##suffix(real *p, const real *g, real *state, \
                                                       const double *hyper, double step)    \
    {                                                                                       \
        const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;                     \
        name##_args_##suffix args;                                                          \
        real s[states + 1];                                                                 \
        for (int k = 0; k < states; k++)                                                    \
            s[k] = state[i * states + k];                                                   \
        name##_fold_##suffix(&args, hyper, step);                                           \
        p[i] = name##_rule_##suffix(p[i], g[i], s, &args);                                  \
        for (int k = 0; k < states; k++)                                                    \
            state[i * states + k] = s[k];                                                   \
    }

#define RULE(name, states, hyper) CHECK_RULE(name, states, float, f32)
#include "rules/rules.def"
#undef RULE

#define RULE(name, states, hyper) CHECK_RULE(name, states, double, f64)
#include "rules/rules.def"
#undef RULE

extern "C" __global__ void check_conversions(const uint16_t *halves, float *values, uint16_t *back)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    values[2 * i] = fst_bf16_to_f32(halves[i]);
    values[2 * i + 1] = fst_f16_to_f32(halves[i]);
    back[2 * i] = fst_f32_to_bf16(values[2 * i + 1]);
    back[2 * i + 1] = fst_f32_to_f16(values[2 * i]);
}

extern "C" __global__ void check_loss_scale(float *scale, int32_t *tracker, int32_t *hysteresis,
                                            const float *found_inf, fst_loss_scale_args args,
                                            double *norm, double max_norm)
{
    fst_loss_scale_update(scale, tracker, hysteresis, *found_inf, &args);
    *norm = fst_clip_coefficient(*norm, max_norm);
}

extern "C" __global__ void check_tree(double *lanes)
{
    const double other = lanes[threadIdx.x + FST_LANES / 2];
    lanes[threadIdx.x] = fst_tree_max(lanes[threadIdx.x], other);
    lanes[threadIdx.x + FST_LANES / 2] = fst_tree_min(lanes[threadIdx.x], other);
}
