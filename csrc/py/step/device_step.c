/* The step of the parameters on one CUDA device. It launches kernels and does not wait for the
 * device. */
#include <stdlib.h>

#include "gpu/launch.h"
#include "py/step/step_plan.h"
#include "py/torch/arrays.h"
#include "rules/codes.h"

/* Finds a group's learning rate in the device's memory. Returns 0, or -1 with a Python error. */
static int find_lr(fst_module *module, PyObject *lrs, int device, size_t index,
                   fst_device_scalar *out)
{
    fst_number_place lr;
    fst_problem problem;
    PyObject *key = PyLong_FromLong(device);
    PyObject *object = key ? PyDict_GetItemWithError(lrs, key) : NULL;
    Py_XDECREF(key);
    if (!object) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "group %zu has no lr for device %d", index, device);
        return -1;
    }
    if (fst_tensor_scalar(&module->tensors, object, device, &lr, &problem)) {
        PyErr_Format(PyExc_RuntimeError, "lr of group %zu %s", index, problem.detail);
        return -1;
    }
    *out = fst_device_scalar_of(&lr);
    return 0;
}

/* Lists the hyper-parameters of every group. A learning rate that is a CUDA tensor is read by
 * the kernel. */
static int list_groups(fst_module *module, const fst_step_plan *self, fst_step_part *part)
{
    for (size_t i = 0; i < self->group_count; i++) {
        const fst_group *group = &self->groups[i];
        if (fst_reserve(&part->groups, &part->group_capacity, i, sizeof *part->groups))
            return -1;
        fst_device_group *out = &part->groups[i];
        memset(out, 0, sizeof *out);
        memcpy(out->hyper, group->hyper, sizeof group->hyper);
        if (group->lr != Py_None && find_lr(module, group->lr, part->device, i, &out->lr))
            return -1;
    }
    return 0;
}

/* Says where the scales of states in codes lie. */
static void describe_scales(const fst_plan *plan, const fst_counter *counter, fst_device_span *span)
{
    const fst_span *of = &plan->spans[counter->span];
    const fst_operand *op = &plan->operands[(size_t)counter->span * plan->width + FST_OP_STATE];
    for (unsigned k = 0; k < FST_MAX_STATES; k++)
        if (op[k].scales) {
            span->row = op[k].row;
            span->scale_count = fst_scale_count(of->begin + of->count, op[k].row) -
                                fst_scales_before(of->begin, op[k].row);
            span->scales = (uint64_t)(uintptr_t)op[k].scales -
                           k * (uint64_t)span->scale_count * sizeof(uint16_t);
        }
}

static void describe_span(const fst_step_plan *self, const fst_plan *plan,
                          const fst_counter *counter, const fst_tensor_number *numbers,
                          fst_device_span *span)
{
    const fst_group *group = &self->groups[counter->group];
    memset(span, 0, sizeof *span);
    span->step = fst_device_scalar_of(&counter->at);
    /* 0 where it is not read, so that the tables stay the same after a first step */
    span->value = counter->at.data ? 0.0 : counter->value;
    span->group = counter->group;
    span->rule = (int32_t)group->rule;
    span->maximize = group->maximize;
    span->wide = counter->wide;
    span->noisy = group->noisy;
    span->noise = fst_group_noise(group, 0, counter->param);
    for (unsigned k = 0; k < group->number_count; k++)
        span->numbers[k] = (fst_device_number){.data = (uint64_t)(uintptr_t)numbers[k].at.data,
                                               .dtype = (int32_t)numbers[k].at.dtype,
                                               .negated = numbers[k].at.negated};
    if (counter->span >= 0)
        describe_scales(plan, counter, span);
}

static int by_address(const void *a, const void *b)
{
    const uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

/* The device advances all step counters and numbers in parallel, so no two may be the same
 * tensor. */
static int counters_differ(const fst_step_part *part)
{
    size_t count = 0;
    uint64_t *sorted = PyMem_Malloc((part->counter_count + part->number_count) * sizeof *sorted);
    if (!sorted) {
        PyErr_NoMemory();
        return 0;
    }
    for (size_t i = 0; i < part->counter_count; i++)
        if (part->spans[i].step.data)
            sorted[count++] = part->spans[i].step.data;
    for (size_t i = 0; i < part->number_count; i++)
        sorted[count++] = (uint64_t)(uintptr_t)part->numbers[i].at.data;
    qsort(sorted, count, sizeof *sorted, by_address);
    int differ = 1;
    for (size_t i = 1; i < count; i++)
        differ = differ && sorted[i - 1] != sorted[i];
    PyMem_Free(sorted);
    if (!differ)
        PyErr_SetString(PyExc_RuntimeError,
                        part->number_count ? "two 0-d states, such as state['step'], are one "
                                             "tensor; each parameter needs its own"
                                           : "two parameters share the tensor state['step']; each "
                                             "needs one of its own");
    return differ;
}

/* Lists one entry per span of the plan, in its order, and then one per parameter without
 * elements. */
static int list_spans(const fst_step_plan *self, fst_step_part *part)
{
    if (part->listed == self->bindings)
        return 0;
    size_t only_counts = part->plan.span_count;
    const fst_tensor_number *numbers = part->numbers;
    int moved = part->distinct != part->counter_count;
    while (part->span_capacity < part->counter_count) {
        const size_t before = part->span_capacity;
        if (fst_reserve(&part->spans, &part->span_capacity, before, sizeof *part->spans))
            return -1;
        memset(part->spans + before, 0, (part->span_capacity - before) * sizeof *part->spans);
    }
    for (size_t i = 0; i < part->counter_count; i++) {
        const fst_counter *counter = &part->counters[i];
        fst_device_span *span =
            &part->spans[counter->span >= 0 ? (size_t)counter->span : only_counts++];
        const fst_device_span before = *span;
        describe_span(self, &part->plan, counter, numbers, span);
        moved = moved || span->step.data != before.step.data ||
                memcmp(span->numbers, before.numbers, sizeof before.numbers);
        if (part->number_count)
            numbers += self->groups[counter->group].number_count;
    }
    part->distinct = !moved || counters_differ(part) ? part->counter_count : 0;
    if (part->distinct != part->counter_count)
        return -1;
    part->listed = self->bindings;
    return 0;
}

/* Raises an error of the driver. A launch is for all parameters of the part, so the error names
 * the first one, unless other work may have caused it. Returns -1. */
static int raise_for_step(const fst_module *module, const fst_step_part *part,
                          const fst_status *status)
{
    const fst_counter *first = part->counters;
    if (status->code != FST_DEVICE_FAILED && status->code != FST_UNSUPPORTED)
        return fst_raise_int(status);
    char text[sizeof status->message + 64];
    PyOS_snprintf(text, sizeof text, "%s; in the step of %zu parameters there", status->message,
                  part->counter_count);
    return fst_step_raise(module, first->group, first->index, "parameter", "driver", text);
}

int fst_device_prepare(fst_module *module, fst_step_plan *self, fst_step_part *part,
                       const fst_step_options *options)
{
    fst_status status = {0};
    if (!part->tables && !(part->tables = fst_gpu_tables_new(part->device, &status)))
        return raise_for_step(module, part, &status);
    if (list_groups(module, self, part) || list_spans(self, part))
        return -1;
    if (fst_plan_seal(&part->plan, FST_OP_PARAM, options->write_grads ? 2 : 1, &status))
        return fst_raise_int(&status);
    const fst_work work = fst_plan_work(&part->plan);
    const fst_gpu_rules rules = {
        .spans = part->spans,
        .groups = part->groups,
        .span_count = part->counter_count,
        .group_count = self->group_count,
        .bound = self->bindings,
        .moved = self->moves,
    };
    if (fst_gpu_tables_set(part->tables, &work, &rules, part->stream, &status))
        return raise_for_step(module, part, &status);
    return 0;
}

int fst_device_step(fst_module *module, fst_step_part *part, const fst_step_options *options)
{
    fst_status status = {0};
    fst_step_scalar_set scalars;
    if (fst_step_scalars(module, options, part->device, &scalars))
        return -1;
    if (options->measure_found_inf && !scalars.found_inf.data) {
        PyErr_SetString(PyExc_ValueError, "measure_found_inf needs found_inf");
        return -1;
    }
    const int apply = options->phase == FST_STEP_APPLY;
    const fst_begin_launch begin = {
        .grad_scale = fst_device_scalar_of(&scalars.grad_scale),
        .found_inf = fst_device_scalar_of(&scalars.found_inf),
        /* when applying, the common norm is there already: kernels read it to clip and never
         * write it */
        .norm = apply && isnan(options->max_norm) ? (fst_device_scalar){0}
                                                  : fst_device_scalar_of(&scalars.norm),
        .max_norm = options->max_norm,
        .measure = !apply && (options->measure_found_inf || !isnan(options->max_norm)),
        .measure_found_inf = !apply && options->measure_found_inf,
        .only_measure = options->phase == FST_STEP_MEASURE,
        .has_numbers = part->number_count > 0,
    };
    const fst_update_launch update = {.write_grad = options->write_grads};
    if (fst_gpu_step(part->tables, &begin, begin.only_measure ? NULL : &update, &status))
        return raise_for_step(module, part, &status);
    return 0;
}
