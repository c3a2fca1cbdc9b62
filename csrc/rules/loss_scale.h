/* loss_scale.h - the dynamic loss scale of mixed precision training (Micikevicius et al. 2018,
 * arXiv:1710.03740), as torch.amp.GradScaler updates it, with bounds and hysteresis on top. */
#pragma once

#include "base/portable.h"

typedef struct {
    double growth_factor, backoff_factor;
    double min_scale, max_scale; /* 0 and infinity: no bounds */
    int32_t growth_interval;
    int32_t hysteresis; /* overflows until the scale backs off, counted since it last grew; 1: at
                           once */
} fst_loss_scale_args;

FST_FN void fst_loss_scale_update(float *scale, int32_t *growth_tracker, int32_t *hysteresis_left,
                                  float found_inf, const fst_loss_scale_args *a)
{
    float next = *scale;
    if (found_inf != 0.0f) {
        *growth_tracker = 0;
        if (--*hysteresis_left <= 0)
            next = (float)((double)next * a->backoff_factor);
    } else if (++*growth_tracker == a->growth_interval) {
        const float grown = (float)((double)next * a->growth_factor);
        *growth_tracker = 0;
        *hysteresis_left = a->hysteresis;
        next = grown - grown == 0.0f ? grown : next; /* stays finite */
    }
    next = (double)next < a->min_scale ? (float)a->min_scale : next;
    *scale = (double)next > a->max_scale ? (float)a->max_scale : next;
}

/* min(1, max_norm / (norm + 1e-6)), torch's formula: 0 for an infinite norm, NaN for NaN. */
FST_FN double fst_clip_coefficient(double norm, double max_norm)
{
    const double coefficient = max_norm / (norm + 1e-6);
    return coefficient > 1.0 ? 1.0 : coefficient;
}
