/* The step of Adafactor on a bound plan. A parameter's span, with its gradient, is followed by
 * those of its row and its column, or of its variance. */
#include <math.h>

#include "core/factored_step.h"
#include "py/step/step_plan.h"
#include "py/torch/arrays.h"
#include "py/torch/quiet.h"

/* The end of the spans of parameter `i`. */
static size_t end_of(const fst_step_part *part, size_t i)
{
    return i + 1 < part->counter_count ? (size_t)part->counters[i + 1].span : part->plan.span_count;
}

/* Fills what is computed of parameter `i`, but for the numbers of the step. */
static void fill(const fst_step_part *part, size_t i, fst_factored *f)
{
    const size_t first = (size_t)part->counters[i].span;
    const fst_span *spans = part->plan.spans + first;
    const fst_operand *ops = part->plan.operands + first * FST_OP_COUNT;
    const int is_vector = end_of(part, i) - first == 2;
    *f = (fst_factored){
        .param = ops[FST_OP_PARAM],
        .grad = ops[FST_OP_GRAD],
        .row = ops[FST_OP_COUNT + FST_OP_PARAM],
        .count = spans->count,
        .batch = 1,
        .rows = 1,
        .cols = 1,
        .kind = is_vector ? FST_FACTORED_VECTOR : FST_FACTORED_WHOLE,
    };
    if (is_vector)
        return;
    f->col = ops[2 * FST_OP_COUNT + FST_OP_PARAM];
    f->rows = f->count / spans[2].count;
    f->cols = f->count / spans[1].count;
    f->batch = spans[1].count / f->rows;
}

static int leave(fst_step_plan *self, const fst_counter *c)
{
    return fst_step_list_unsettled(self, c->group, c->index);
}

/* Leaves the parameters whose written memory overlaps to torch. Those that overlap an earlier one
 * are in later rounds than the first. */
static int leave_shared(fst_step_plan *self)
{
    const fst_step_part *part = &self->parts[0];
    const fst_plan *plan = &part->plan;
    for (size_t c = plan->rounds[1]; c < plan->chunk_count; c++)
        for (size_t i = 0; plan->chunks[c].begin == 0 && i < part->counter_count; i++)
            for (size_t span = (size_t)part->counters[i].span; span < end_of(part, i); span++)
                if (fst_extents_meet(plan->written[plan->chunks[c].span], plan->written[span]) &&
                    leave(self, &part->counters[i]))
                    return -1;
    return 0;
}

/* Computes the numbers of the step. Comparisons treat NaN as Python's min() does. */
static int set_numbers(const fst_module *module, fst_step_plan *self)
{
    fst_step_part *part = &self->parts[0];
    uint32_t last = UINT32_MAX;
    double last_step = 0.0, weight = 0.0, rho = 0.0;
    for (size_t i = 0; i < part->counter_count; i++) {
        fst_counter *c = &part->counters[i];
        const fst_group *group = &self->groups[c->group];
        const double *hyper = group->hyper, lr = hyper[0], weight_decay = hyper[5];
        const double step = fst_counter_next(c);
        fst_factored *f = &self->factored[i];
        if (step <= 0.0)
            return fst_step_raise(module, c->group, c->index, "state 'step'", "value",
                                  "is negative");
        if (c->group != last || step != last_step) {
            const double slow = 1.0 / sqrt(step);
            weight = fst_pow(step, hyper[1]);
            rho = slow < lr ? slow : lr;
            last = c->group;
            last_step = step;
        }
        f->weight = weight;
        f->rho = group->maximize ? rho : -rho;
        f->decay = weight_decay != 0.0 ? 1.0 - lr * weight_decay : 1.0;
        f->floor = hyper[2];
        f->least_scale = hyper[3];
        f->threshold = hyper[4];
    }
    return 0;
}

int fst_factored_prepare(fst_module *module, fst_step_plan *self)
{
    fst_step_part *part = &self->parts[0];
    fst_status status = {0};
    if (fst_plan_seal(&part->plan, FST_OP_PARAM, 1, &status))
        return fst_raise_int(&status);
    if (part->plan.round_count > 1 && leave_shared(self))
        return -1;
    for (size_t i = 0; i < part->counter_count; i++) {
        if (fst_reserve(&self->factored, &self->factored_capacity, i, sizeof *self->factored))
            return -1;
        fst_factored *f = &self->factored[i];
        fill(part, i, f);
        if (fst_extents_meet(fst_overlap_extent(&f->param, f->count),
                             fst_overlap_extent(&f->grad, f->count)) &&
            leave(self, &part->counters[i]))
            return -1;
    }
    return self->unsettled ? 0 : set_numbers(module, self);
}

int fst_factored_run(fst_module *module, fst_step_plan *self)
{
    const fst_step_part *part = &self->parts[0];
    fst_status status = {0};
    fst_released_gil released = {.thread = NULL};
    if (self->is_long)
        released = fst_quiet_release_gil(&module->tensors);
    fst_factored_step(self->factored, part->counter_count, &status);
    if (self->is_long)
        fst_quiet_acquire_gil(&module->tensors, released);
    if (status.code)
        return fst_raise_int(&status);
    for (size_t i = 0; i < part->counter_count; i++)
        fst_counter_write(&part->counters[i], fst_counter_next(&part->counters[i]));
    return 0;
}
