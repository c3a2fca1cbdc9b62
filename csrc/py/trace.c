/* A step like the one before: nothing but the gradients' memory may have changed. All that was
 * bound then still stands, and is not bound again. */
#include "py/trace.h"

enum { FETCH_AHEAD = 6 }; /* parameters */

void fst_trace_forget(fst_plan_object *self)
{
    for (size_t g = 0; g < self->traced_group_count; g++)
        Py_DECREF(self->traced_groups[g].keys);
    self->traced_group_count = 0;
    self->traced = 0;
}

void fst_trace_free(fst_plan_object *self)
{
    fst_trace_forget(self);
    PyMem_Free(self->traces);
    PyMem_Free(self->traced_groups);
    self->traces = NULL;
    self->traced_groups = NULL;
    self->trace_capacity = 0;
}

void fst_trace_begin(const fst_record_layout *layout, fst_plan_object *self)
{
    fst_trace_forget(self);
    self->traceable = layout->known && !self->hold_tensors;
    if (!self->traceable || self->trace_capacity >= self->param_count)
        return;
    PyMem_Free(self->traces);
    self->traces = PyMem_Calloc(self->param_count + 1, sizeof *self->traces);
    self->trace_capacity = self->traces ? self->param_count : 0;
    self->traceable = self->traces != NULL;
}

void fst_trace_idle(const fst_record_layout *layout, fst_plan_object *self, size_t index,
                    PyObject *object)
{
    if (!self->traceable)
        return;
    fst_trace *trace = &self->traces[index];
    *trace = (fst_trace){.has_grad = 0};
    self->traceable = fst_record_of(layout, object, &trace->param);
    if (self->traceable)
        trace->no_grad = fst_record_grad(layout, &trace->param);
}

/* Whether a rule without a step counter is at a first step, which the next one is not. */
static int is_first(const fst_share *share)
{
    for (size_t i = 0; i < share->counter_count; i++)
        if (!share->counters[i].data && share->counters[i].value != 2.0)
            return 1;
    return 0;
}

void fst_trace_end(fst_plan_object *self, PyObject *param_lists)
{
    for (size_t i = 0; i < self->share_count; i++)
        self->traceable = self->traceable && !is_first(&self->shares[i]);
    if (!self->traceable)
        return;
    PyMem_Free(self->traced_groups);
    self->traced_groups = PyMem_Calloc(self->group_count + 1, sizeof *self->traced_groups);
    if (!self->traced_groups)
        return;
    for (size_t g = 0; g < self->group_count; g++) {
        const fst_group *group = &self->groups[g];
        self->traced_groups[g] = (fst_traced_group){
            .keys = group->keys,
            .rule = group->rule,
            .size = PyList_Size(PyList_GetItem(param_lists, (Py_ssize_t)g)),
        };
        Py_INCREF(group->keys);
    }
    self->traced_group_count = self->group_count;
    self->traced = 1;
}

static int same_groups(const fst_plan_object *self, PyObject *param_lists)
{
    int same = self->group_count == self->traced_group_count;
    for (size_t g = 0; same && g < self->group_count; g++) {
        const fst_traced_group *before = &self->traced_groups[g];
        same = before->keys == self->groups[g].keys && before->rule == self->groups[g].rule &&
               before->size == PyList_Size(PyList_GetItem(param_lists, (Py_ssize_t)g));
    }
    return same;
}

/* Whether the parameter has the same states, in the same dictionary, as they were. */
static int same_states(const fst_record_layout *layout, const fst_trace *trace, PyObject *state,
                       unsigned key_count)
{
    PyObject *key, *value;
    Py_ssize_t position = trace->state_at;
    if (!PyDict_Next(state, &position, &key, &value) || key != trace->param.object ||
        value != trace->dict)
        return 0;
    position = 0;
    for (unsigned k = 0; k < key_count; k++)
        if (!PyDict_Next(trace->dict, &position, &key, &value) || key != trace->keys[k] ||
            value != trace->states[k].object || !fst_record_holds(layout, &trace->states[k]))
            return 0;
    return 1;
}

/* Whether the gradient is as it was, or like it in other memory, which the span then reads. */
static int same_grad(const fst_record_layout *layout, fst_plan_object *self, fst_trace *trace)
{
    const void *impl = fst_record_grad(layout, &trace->param);
    if (impl == trace->grad.impl && fst_record_is_same(layout, &trace->grad))
        return 1; /* its Python object may have gone: that is not looked at */
    if (!impl || !fst_record_follow(layout, &trace->grad, impl))
        return 0;
    if (trace->span < 0)
        return 1;
    fst_operand *ops = self->shares[trace->share].plan.operands + trace->span * FST_OP_COUNT;
    ops[FST_OP_GRAD].data = (void *)(uintptr_t)trace->grad.data;
    return 1;
}

static int same_param(const fst_record_layout *layout, fst_plan_object *self, fst_trace *trace,
                      PyObject *object, PyObject *state, unsigned key_count)
{
    if (object != trace->param.object)
        return 0;
    if (!trace->has_grad)
        return fst_record_is_of(layout, &trace->param, object) &&
               fst_record_grad(layout, &trace->param) == trace->no_grad;
    return fst_record_holds(layout, &trace->param) && same_grad(layout, self, trace) &&
           (key_count == 0 || same_states(layout, trace, state, key_count));
}

/* Between two steps the model runs and the records leave the cache: those of a parameter further on
 * are asked for early. */
static void fetch(const fst_record_layout *layout, const fst_trace *trace, unsigned key_count)
{
    fst_record_fetch(layout, &trace->param);
    fst_record_fetch(layout, &trace->grad);
    __builtin_prefetch(trace->dict);
    for (unsigned k = 0; k < key_count; k++)
        fst_record_fetch(layout, &trace->states[k]);
}

static int same_params(const fst_record_layout *layout, fst_plan_object *self, PyObject *params,
                       fst_trace *trace, PyObject *state, unsigned key_count)
{
    const Py_ssize_t count = PyList_Size(params);
    for (Py_ssize_t i = 0; i < count; i++, trace++) {
        if (i + FETCH_AHEAD < count)
            fetch(layout, trace + FETCH_AHEAD, key_count);
        if (!same_param(layout, self, trace, PyList_GetItem(params, i), state, key_count))
            return 0;
    }
    return 1;
}

static int find_streams(fst_module *module, fst_plan_object *self)
{
    for (size_t s = 0; s < self->share_count; s++) {
        fst_share *share = &self->shares[s];
        fst_problem problem;
        if (share->device != FST_HOST && share->counter_count &&
            fst_tensor_stream(&module->tensors, share->sample, share->device, &share->stream,
                              &problem))
            return -1;
    }
    return 0;
}

int fst_trace_holds(fst_module *module, fst_plan_object *self, PyObject *param_lists,
                    PyObject *state)
{
    if (!self->traced || self->hold_tensors || !same_groups(self, param_lists))
        return 0;
    module->tensors.ran_python = 0; /* by others, before */
    fst_trace *trace = self->traces;
    for (size_t g = 0; g < self->group_count; g++) {
        PyObject *params = PyList_GetItem(param_lists, (Py_ssize_t)g);
        if (!same_params(&module->records, self, params, trace, state, self->groups[g].key_count))
            return 0;
        trace += self->traced_groups[g].size;
    }
    return !find_streams(module, self) && !module->tensors.ran_python;
}
