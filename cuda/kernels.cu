/* kernels.cu - all kernels, and the code that they share for float and for double.
 *
 * base/device.h describes each kernel and its arguments. The results are those of csrc/cpu, bit
 * for bit. */
#include "rules/loss_scale.h"
#include "rules/rules.h"
#include "all_types.h"
#include "code_walk.h"
#include "fold_sums.h"
#include "image_kernel.h"
#include "loss_kernel.h"
#include "quick_math.h"

enum { FST_ARGS_FIT = 1 / (sizeof(fst_rule_args) <= FST_DEVICE_ARGS) };

#define REAL float
#define FST_T(name) name##_f32
#define FST_QUICK(name) name##_quick
#define HELD FST_T(HELD)
#include "update_chunk.h"
#undef FST_QUICK
#include "reduce_chunk.h"
#undef HELD
#undef REAL
#undef FST_T

#define REAL double
#define FST_T(name) name##_f64
#define FST_QUICK FST_T
#define HELD FST_T(HELD)
#include "update_chunk.h"
#undef FST_QUICK
#include "reduce_chunk.h"
#undef HELD
#undef REAL
#undef FST_T

#define FST_LAST_KNOWN FST_RULE_lion     /* of the rules in rules.def that have such loops */
#define FST_LAST_LOOSE FST_RULE_momentum /* the same, for gradients that are not aligned */
#define FST_TYPED_AS(name, type) name##_##type
#define FST_TYPED(name, type) FST_TYPED_AS(name, type)
#include "apply_known.h"
#define MASTERS 0
#define FST_K(name) name##_fp32
#define PARAM of_f32
#define PARAM_ITEMS 4
#define STATE of_f32
#define STATE_ITEMS 4
#include "update_known.h"
#undef FST_K
#undef STATE
#undef STATE_ITEMS
#define FST_K(name) name##_fp32_beside_bf16
#define STATE of_bf16
#define STATE_ITEMS 8
#include "update_known.h"
#undef FST_K
#undef PARAM
#undef PARAM_ITEMS
#define FST_K(name) name##_16
#define PARAM of_bf16
#define OR_PARAM of_f16
#define OR_STATE of_f16
#define PARAM_ITEMS 8
#include "update_known.h"
#undef FST_K
#undef STATE
#undef STATE_ITEMS
#undef OR_STATE
#define FST_K(name) name##_16_beside_fp32
#define STATE of_f32
#define OR_STATE of_f32
#define STATE_ITEMS 4
#include "update_known.h"
#undef FST_K
#undef MASTERS
#define MASTERS 1
#define FST_K(name) name##_16_with_masters
#include "update_known.h"
#undef FST_K
#undef PARAM
#undef OR_PARAM
#undef PARAM_ITEMS
#undef STATE
#undef OR_STATE
#undef STATE_ITEMS
#undef MASTERS

/* Whether a span's parameter and gradient have one type, its states one, and its master, if it has
 * one, fp32. */
FST_DEVICE int fst_is_known(const fst_device_operand *op, int32_t param, int32_t state)
{
    const fst_device_operand *master = &op[FST_OP_MASTER];
    int known = op[FST_OP_PARAM].dtype == param && op[FST_OP_GRAD].dtype == param &&
                (!master->data || master->dtype == FST_F32);
    FST_UNROLL
    for (unsigned k = FST_OP_STATE; k < FST_OP_COUNT; k++)
        known = known && (!op[k].data || op[k].dtype == state);
    return known;
}

FST_DEVICE uint32_t update_most_f32(const fst_share *share, const fst_device_operand *op,
                                    const fst_step_f32 *step, int write_grad, uint64_t *unsure)
{
    const int masters = op[FST_OP_MASTER].data != 0;
    if (step->noisy)
        return 0;
    if (!masters && fst_is_known(op, FST_F32, FST_F32))
        return update_known_fp32(share, op, step, write_grad, unsure);
    if (!masters && (fst_is_known(op, FST_BF16, FST_BF16) || fst_is_known(op, FST_F16, FST_F16)))
        return update_known_16(share, op, step, write_grad, unsure);
    if (!masters && fst_is_known(op, FST_F32, FST_BF16))
        return update_known_fp32_beside_bf16(share, op, step, write_grad, unsure);
    if (!fst_is_known(op, FST_BF16, FST_F32) && !fst_is_known(op, FST_F16, FST_F32))
        return 0;
    return masters ? update_known_16_with_masters(share, op, step, write_grad, unsure)
                   : update_known_16_beside_fp32(share, op, step, write_grad, unsure);
}

FST_DEVICE uint32_t update_most_f64(const fst_share *share, const fst_device_operand *op,
                                    const fst_step_f64 *step, int write_grad, uint64_t *unsure)
{
    (void)share, (void)op, (void)step, (void)write_grad, (void)unsure;
    return 0;
}

#include "code_tiles.h"

#define REAL float
#define FST_T(name) name##_f32
#define HELD FST_T(HELD)
#include "update_span.h"
#undef HELD
#undef REAL
#undef FST_T

#define REAL double
#define FST_T(name) name##_f64
#define HELD FST_T(HELD)
#include "update_span.h"
#undef HELD
#undef REAL
#undef FST_T

#include "begin.h"
#include "list_kernels.h"

/* The groups of so many warps in the grid. Found anew each time, as registers are few. */
FST_DEVICE uint32_t fst_groups_of_warps(uint32_t warps)
{
    return fst_hidden((int32_t)warps) == 1 ? gridDim.x * FST_WARPS : gridDim.x;
}

/* Updates all chunks from last to first: what `begin` measured last is still in the cache. Where a
 * block would get several chunks, a warp takes each small one, and then the blocks take the others.
 * The next chunk is asked for before the work on this one. */
FST_KERNEL(fst_update, fst_update_launch)
{
    const fst_device_tables *tables = &launch.tables;
    const fst_device_outcome *outcome = fst_outcome_of(tables);
    const fst_device_chunk *chunks = fst_chunks_of(tables) + tables->chunk_first;
    const uint32_t count = tables->chunk_count;
    FST_SHARED(fst_walks, walks);
    const int by_warps = count > gridDim.x, in_memory = tables->chunks >= FST_DEVICE_LAUNCH;
    if (outcome->skip)
        return;
    for (uint32_t warps = by_warps ? 1 : FST_WARPS;; warps = FST_WARPS) { /* of a chunk */
        const uint32_t first = threadIdx.x / FST_WARP / warps * gridDim.x + blockIdx.x;
        uint32_t *const at = &walks->chunk[threadIdx.x];
        for (*at = first; *at < count; *at += fst_groups_of_warps(warps)) {
            const uint32_t i = *at;
            const fst_device_chunk chunk = chunks[count - 1 - i];
            if (in_memory && i + fst_groups_of_warps(warps) < count)
                fst_ask_for(&chunks[count - 1 - i - fst_groups_of_warps(warps)]);
            if (by_warps && (chunk.count <= FST_SMALL) != (warps == 1))
                continue;
            const fst_device_span span = fst_spans_of(tables)[chunk.span];
            if (span.wide)
                update_f64(&launch, &chunk, &span, outcome, warps, walks);
            else
                update_f32(&launch, &chunk, &span, outcome, warps, walks);
        }
        if (warps == FST_WARPS)
            return;
    }
}

FST_KERNEL(fst_loss_scale, fst_loss_scale_launch)
{
    float *scale = (float *)fst_global(launch.scale);
    int32_t *growth_tracker = (int32_t *)fst_global(launch.growth_tracker);
    int32_t *hysteresis_left = (int32_t *)fst_global(launch.hysteresis_left);
    const int counts = launch.hysteresis_left != 0;
    if (blockIdx.x || threadIdx.x)
        return;
    float next = *scale;
    int32_t growth = *growth_tracker, left = counts ? *hysteresis_left : 1;
    fst_loss_scale_args args;
    args.growth_factor = launch.growth_factor;
    args.backoff_factor = launch.backoff_factor;
    args.min_scale = launch.min_scale;
    args.max_scale = launch.max_scale;
    args.growth_interval = launch.growth_interval;
    args.hysteresis = launch.hysteresis;
    fst_loss_scale_update(&next, &growth, &left, (float)fst_scalar_read(&launch.found_inf), &args);
    *scale = next;
    *growth_tracker = growth;
    if (counts)
        *hysteresis_left = left;
}
