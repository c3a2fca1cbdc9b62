/* The step of the parameters in CPU memory. */
#include "core/passes.h"
#include "py/step/step_plan.h"
#include "py/torch/arrays.h"
#include "py/torch/quiet.h"
#include "rules/loss_scale.h"

/* The request of a step as the passes read it, and what they find. */
typedef struct {
    double inv_scale, max_norm, norm;
    double measure_scale; /* what the gradients are multiplied by when they are measured */
    int measure, measure_found_inf, write_grads, skip, only_measure;
    fst_measurement seen;
} step_work;

/* Gives a span the rule's arguments for a group, a step count, numbers (NULL: the rule has none)
 * and a precision: the same among the last 64, or new ones, as always for noise. Returns 0, or -1
 * with a Python error. */
static int give_args(fst_step_part *part, const fst_group *group, const fst_counter *c, double step,
                     const fst_numbers *held, double coefficient)
{
    uint32_t *index = &part->plan.spans[c->span].args;
    for (size_t back = 1; !group->noisy && back <= part->arg_count && back <= 64; back++) {
        const size_t i = part->arg_count - back;
        const fst_args_key *key = &part->arg_keys[i];
        if (key->group == c->group && key->step == step && part->args[i].wide == c->wide &&
            (!held || !memcmp(&key->held, held, sizeof *held))) {
            *index = (uint32_t)i;
            return 0;
        }
    }
    size_t capacity = part->arg_capacity;
    if (fst_reserve(&part->args, &capacity, part->arg_count, sizeof *part->args) ||
        fst_reserve(&part->arg_keys, &part->arg_capacity, part->arg_count, sizeof *part->arg_keys))
        return -1;
    fst_update_args *args = &part->args[part->arg_count];
    args->rule = group->rule;
    args->wide = c->wide;
    args->clip_coefficient = coefficient;
    args->sign = group->maximize ? -1.0 : 1.0;
    args->noisy = group->noisy;
    args->noise = fst_group_noise(group, fst_noise_step(step), c->param);
    fst_args_key *key = &part->arg_keys[part->arg_count];
    *key = (fst_args_key){.step = step, .group = c->group};
    double hyper[FST_MAX_HYPER];
    memcpy(hyper, group->hyper, sizeof hyper);
    if (held) {
        key->held = *held;
        key->next = fst_rule_next_numbers(group->rule, *held, hyper, step);
    }
    fst_rule_fill_args(args, hyper, step);
    *index = (uint32_t)part->arg_count++;
    return 0;
}

/* Reads the numbers of a parameter, and remembers them to undo the step. */
static fst_numbers read_numbers(fst_tensor_number *numbers, unsigned count, const fst_counter *c)
{
    fst_numbers held = {.wide_step = c->at.dtype == FST_F64};
    for (unsigned k = 0; k < count; k++) {
        held.value[k] = numbers[k].before = fst_number_read(&numbers[k].at);
        held.dtype[k] = (int32_t)numbers[k].at.dtype;
    }
    return held;
}

/* Puts the counters and the numbers of the first `count` parameters back. */
static void take_back(const fst_step_part *part, size_t count, size_t numbers)
{
    while (numbers-- > 0)
        fst_number_write(&part->numbers[numbers].at, part->numbers[numbers].before);
    while (count-- > 0)
        fst_counter_write(&part->counters[count], part->counters[count].before);
}

/* Gives the span of a parameter with numbers its arguments, and moves the numbers. */
static int move_numbers(fst_step_part *part, const fst_group *group, const fst_counter *c,
                        double step, fst_tensor_number *numbers, double coefficient)
{
    const fst_numbers held = read_numbers(numbers, group->number_count, c);
    fst_numbers next;
    if (c->span >= 0) {
        if (give_args(part, group, c, step, &held, coefficient))
            return -1;
        next = part->arg_keys[part->plan.spans[c->span].args].next;
    } else {
        double hyper[FST_MAX_HYPER];
        memcpy(hyper, group->hyper, sizeof hyper);
        next = fst_rule_next_numbers(group->rule, held, hyper, step);
    }
    for (unsigned k = 0; k < group->number_count; k++)
        fst_number_write(&numbers[k].at, next.value[k]);
    return 0;
}

/* Advances every step counter and every number, and gives every span its arguments. Without memory
 * they go back, and -1 is returned. */
static int advance(fst_step_part *part, const fst_group *groups, double coefficient)
{
    size_t at = 0; /* the numbers of the parameter at hand */
    part->arg_count = 0;
    for (size_t i = 0; i < part->counter_count; i++) {
        fst_counter *c = &part->counters[i];
        const fst_group *group = &groups[c->group];
        /* saves two calls */
        float *plain = c->at.dtype == FST_F32 && !c->at.negated ? c->at.data : NULL;
        if (plain)
            c->before = (double)*plain;
        const double step = plain ? c->before + 1.0 : fst_counter_next(c);
        int failed = 0;
        if (group->number_count)
            failed = move_numbers(part, group, c, step, &part->numbers[at], coefficient);
        else if (c->span >= 0)
            failed = give_args(part, group, c, step, NULL, coefficient);
        if (failed) {
            take_back(part, i, at);
            return -1;
        }
        at += group->number_count;
        if (plain)
            *plain = (float)step;
        else
            fst_counter_write(c, step);
    }
    return 0;
}

/* Runs both passes. A long step releases the GIL. Returns 0, or -1 with `status` filled or a Python
 * error. */
static int run_passes(fst_tensors *tensors, fst_step_plan *self, step_work *work,
                      fst_status *status)
{
    fst_step_part *part = &self->parts[0];
    fst_released_gil released = {.thread = NULL};
    double coefficient = 1.0;
    if (work->measure) {
        if (self->is_long)
            released = fst_quiet_release_gil(tensors);
        fst_measure(&part->plan, FST_OP_GRAD, work->measure_scale, &work->seen, status);
        if (self->is_long)
            fst_quiet_acquire_gil(tensors, released);
        work->norm = sqrt(work->seen.square_sum);
        work->skip = work->measure_found_inf && work->seen.nonfinite;
    }
    if (status->code || work->skip || work->only_measure)
        return status->code ? -1 : 0;
    if (!isnan(work->max_norm))
        coefficient = fst_clip_coefficient(work->norm, work->max_norm);
    if (self->offload && fst_offload_check(fst_offload_of(self->offload), &part->plan, status))
        return -1;
    if (advance(part, self->groups, coefficient))
        return -1;
    if (self->offload) {
        fst_offload_allow(fst_offload_of(self->offload), &part->plan, part->args, work->inv_scale,
                          work->write_grads);
        return 0;
    }
    if (self->is_long)
        released = fst_quiet_release_gil(tensors);
    fst_update(&part->plan, part->args, work->inv_scale, work->write_grads, status);
    if (self->is_long)
        fst_quiet_acquire_gil(tensors, released);
    return status->code ? -1 : 0;
}

/* Reads the options for the host. Returns 0, or -1 with a Python error. */
static int read_options(fst_module *module, const fst_step_options *options, step_work *work,
                        fst_step_scalar_set *scalars)
{
    const int clips = !isnan(options->max_norm), apply = options->phase == FST_STEP_APPLY;
    if (fst_step_scalars(module, options, FST_HOST, scalars))
        return -1;
    const fst_number_place *scale = &scalars->grad_scale, *found = &scalars->found_inf;
    const fst_number_place *norm = &scalars->norm;
    if ((options->measure_found_inf && !found->data) || (apply && clips && !norm->data)) {
        PyErr_SetString(PyExc_ValueError, "expected found_inf and norm to measure or apply");
        return -1;
    }
    double inv_scale = 1.0 / options->divisor;
    if (scale->data)
        inv_scale = 1.0 / fst_number_read(scale);
    if (scale->data && scale->dtype == FST_F32)
        inv_scale = (double)(float)inv_scale; /* as torch rounds it */
    *work = (step_work){
        .inv_scale = inv_scale,
        .measure_scale = options->measure_undivided ? 1.0 : inv_scale,
        .max_norm = options->max_norm,
        .norm = apply && norm->data ? fst_number_read(norm) : (double)NAN,
        .measure = !apply && (options->measure_found_inf || clips || options->measure_undivided),
        .measure_found_inf = !apply && options->measure_found_inf,
        .only_measure = options->phase == FST_STEP_MEASURE,
        .write_grads = options->write_grads,
    };
    work->skip = found->data && !work->measure_found_inf && fst_number_read(found) != 0.0;
    return 0;
}

int fst_host_step(fst_module *module, fst_step_plan *self, const fst_step_options *options,
                  fst_step_outcome *outcome)
{
    fst_step_part *part = &self->parts[0];
    fst_status status = {0};
    fst_step_scalar_set scalars;
    step_work work;
    if (read_options(module, options, &work, &scalars))
        return -1;
    if (fst_plan_seal(&part->plan, FST_OP_PARAM, work.write_grads ? 2 : 1, &status))
        return fst_raise_int(&status);
    if (options->measure_found_inf > 1 && part->plan.round_count > 1) {
        PyErr_SetString(PyExc_ValueError, "parameters or gradients share memory");
        return -1;
    }
    outcome->measured = work.measure && !work.skip;
    if (!work.skip && run_passes(&module->tensors, self, &work, &status)) {
        if (status.code)
            fst_raise(&status);
        return -1;
    }
    outcome->skipped = work.skip;
    outcome->norm = work.norm;
    outcome->square_sum = work.seen.square_sum;
    if (work.measure_found_inf && work.skip)
        fst_number_write(&scalars.found_inf, 1.0);
    if (work.measure && scalars.norm.data)
        fst_number_write(&scalars.norm, work.norm);
    return 0;
}
