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

static int same_key(const fst_args_key *key, uint32_t group, double step, const fst_numbers *held)
{
    return key->group == group && key->step == step &&
           (!held || !memcmp(&key->held, held, sizeof *held));
}

/* Finds the rule's arguments for a group, a step count, numbers (NULL: the rule has none) and a
 * precision among the last 64, or adds them. Returns 0, or -1 with a Python error. */
static int find_args(fst_step_part *part, const fst_group *groups, uint32_t group, double step,
                     const fst_numbers *held, int wide, double coefficient, uint32_t *index)
{
    for (size_t back = 0; back < part->arg_count && back < 64; back++) {
        const size_t i = part->arg_count - 1 - back;
        if (same_key(&part->arg_keys[i], group, step, held) && part->args[i].wide == wide) {
            *index = (uint32_t)i;
            return 0;
        }
    }
    size_t capacity = part->arg_capacity;
    if (fst_reserve(&part->args, &capacity, part->arg_count, sizeof *part->args) ||
        fst_reserve(&part->arg_keys, &part->arg_capacity, part->arg_count, sizeof *part->arg_keys))
        return -1;
    fst_update_args *args = &part->args[part->arg_count];
    args->rule = groups[group].rule;
    args->wide = wide;
    args->clip_coefficient = coefficient;
    args->sign = groups[group].maximize ? -1.0 : 1.0;
    fst_args_key *key = &part->arg_keys[part->arg_count];
    *key = (fst_args_key){.step = step, .group = group};
    if (held) {
        double hyper[FST_MAX_HYPER];
        memcpy(hyper, groups[group].hyper, sizeof hyper);
        key->held = *held;
        key->next = fst_rule_next_numbers(args->rule, *held, hyper, step);
        fst_rule_fill_args(args, hyper, step);
    } else {
        fst_rule_fill_args(args, groups[group].hyper, step);
    }
    *index = (uint32_t)part->arg_count++;
    return 0;
}

/* Reads the numbers of a parameter, and remembers them to undo the step. */
static fst_numbers read_numbers(fst_tensor_number *numbers, unsigned count, const fst_counter *c)
{
    fst_numbers held = {.wide_step = c->dtype == FST_F64};
    for (unsigned k = 0; k < count; k++) {
        const fst_view view = {
            .data = numbers[k].data, .dtype = numbers[k].dtype, .negated = numbers[k].negated};
        held.value[k] = numbers[k].before = fst_scalar_number(&view);
        held.dtype[k] = (int32_t)numbers[k].dtype;
    }
    return held;
}

static void write_number(const fst_tensor_number *number, double value)
{
    const fst_view view = {
        .data = number->data, .dtype = number->dtype, .negated = number->negated};
    fst_scalar_write(&view, value);
}

/* Puts the counters and the numbers of the first `count` parameters back. */
static void take_back(const fst_step_part *part, size_t count, size_t numbers)
{
    while (numbers-- > 0)
        write_number(&part->numbers[numbers], part->numbers[numbers].before);
    while (count-- > 0)
        fst_counter_write(&part->counters[count], part->counters[count].before);
}

/* Gives the span of a parameter with numbers its arguments, and moves the numbers. */
static int fill_with_numbers(fst_step_part *part, const fst_group *groups, const fst_counter *c,
                             double step, fst_tensor_number *numbers, double coefficient)
{
    const fst_group *group = &groups[c->group];
    const fst_numbers held = read_numbers(numbers, group->number_count, c);
    fst_numbers next;
    if (c->span >= 0) {
        uint32_t index;
        if (find_args(part, groups, c->group, step, &held, c->wide, coefficient, &index))
            return -1;
        part->plan.spans[c->span].args = index;
        next = part->arg_keys[index].next;
    } else {
        double hyper[FST_MAX_HYPER];
        memcpy(hyper, group->hyper, sizeof hyper);
        next = fst_rule_next_numbers(group->rule, held, hyper, step);
    }
    for (unsigned k = 0; k < group->number_count; k++)
        write_number(&numbers[k], next.value[k]);
    return 0;
}

/* Gives the span of a parameter its arguments. */
static int fill_args(fst_step_part *part, const fst_group *groups, const fst_counter *c,
                     double step, double coefficient)
{
    if (c->span < 0)
        return 0;
    return find_args(part, groups, c->group, step, NULL, c->wide, coefficient,
                     &part->plan.spans[c->span].args);
}

/* Advances every step counter and every number, and gives every span its arguments. Without memory
 * they go back, and -1 is returned. */
static int fill_all_args(fst_step_part *part, const fst_group *groups, double coefficient)
{
    size_t at = 0; /* the numbers of the parameter at hand */
    part->arg_count = 0;
    for (size_t i = 0; i < part->counter_count; i++) {
        fst_counter *c = &part->counters[i];
        const unsigned count = groups[c->group].number_count;
        float *plain = c->dtype == FST_F32 && !c->negated ? c->data : NULL; /* saves two calls */
        if (plain)
            c->before = (double)*plain;
        const double step = plain ? c->before + 1.0 : fst_counter_next(c);
        if (count ? fill_with_numbers(part, groups, c, step, &part->numbers[at], coefficient)
                  : fill_args(part, groups, c, step, coefficient)) {
            take_back(part, i, at);
            return -1;
        }
        at += count;
        if (plain)
            *plain = (float)step;
        else
            fst_counter_write(c, step);
    }
    return 0;
}

static int run_measure(fst_step_part *part, step_work *work, fst_status *status)
{
    if (fst_measure(&part->plan, FST_OP_GRAD, work->measure_scale, &work->seen, status))
        return -1;
    work->norm = sqrt(work->seen.square_sum);
    work->skip = work->measure_found_inf && work->seen.nonfinite;
    return 0;
}

/* Runs both passes. A long step releases the GIL. */
static int run_passes(fst_tensors *tensors, fst_step_plan *self, step_work *work,
                      fst_status *status)
{
    fst_step_part *part = &self->parts[0];
    fst_released_gil released = {.thread = NULL};
    if (self->is_long)
        released = fst_quiet_release_gil(tensors);
    int failed = work->measure && run_measure(part, work, status);
    if (self->is_long)
        fst_quiet_acquire_gil(tensors, released);
    if (failed || work->skip || work->only_measure)
        return failed;
    double coefficient = 1.0;
    if (!isnan(work->max_norm))
        coefficient = fst_clip_coefficient(work->norm, work->max_norm);
    if (fill_all_args(part, self->groups, coefficient))
        return -1;
    if (self->is_long)
        released = fst_quiet_release_gil(tensors);
    failed =
        fst_update(&part->plan, part->args, work->inv_scale, work->write_grads, status) != FST_OK;
    if (self->is_long)
        fst_quiet_acquire_gil(tensors, released);
    return failed;
}

/* Reads the options for the host. Returns 0, or -1 with a Python error. */
static int read_options(fst_module *module, const fst_step_options *options, step_work *work,
                        fst_view *found, fst_view *norm)
{
    fst_view scale;
    const int clips = !isnan(options->max_norm), apply = options->phase == FST_STEP_APPLY;
    if (fst_step_scalar(module, options, FST_HOST, 0, "grad_scale", &scale) ||
        fst_step_scalar(module, options, FST_HOST, 1, "found_inf", found) ||
        fst_step_scalar(module, options, FST_HOST, 2, "norm", norm))
        return -1;
    if ((options->measure_found_inf && !found->data) || (apply && clips && !norm->data)) {
        PyErr_SetString(PyExc_ValueError, "expected found_inf and norm to measure or apply");
        return -1;
    }
    const double inv_scale = options->scalars ? fst_inverse_of(&scale) : 1.0 / options->divisor;
    *work = (step_work){
        .inv_scale = inv_scale,
        .measure_scale = options->measure_undivided ? 1.0 : inv_scale,
        .max_norm = options->max_norm,
        .norm = apply && norm->data ? fst_scalar_number(norm) : (double)NAN,
        .measure = !apply && (options->measure_found_inf || clips || options->measure_undivided),
        .measure_found_inf = !apply && options->measure_found_inf,
        .only_measure = options->phase == FST_STEP_MEASURE,
        .write_grads = options->write_grads,
    };
    work->skip = found->data && !work->measure_found_inf && fst_scalar_number(found) != 0.0;
    return 0;
}

int fst_host_step(fst_module *module, fst_step_plan *self, const fst_step_options *options,
                  fst_step_outcome *outcome)
{
    fst_step_part *part = &self->parts[0];
    fst_status status = {0};
    fst_view found, norm;
    step_work work;
    if (read_options(module, options, &work, &found, &norm))
        return -1;
    if (fst_plan_seal(&part->plan, FST_OP_PARAM, work.write_grads ? 2 : 1, &status))
        return fst_raise_int(&status);
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
        fst_scalar_write(&found, 1.0);
    if (work.measure && norm.data)
        fst_scalar_write(&norm, work.norm);
    return 0;
}
