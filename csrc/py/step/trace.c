/* Recognizes a step that is like the one before: nothing but the gradients' memory has changed,
 * and what is bound stays valid. */
#include "py/step/bind.h"

#include "py/torch/quiet.h"
#include "py/torch/tensor_record_read.h"

enum { FETCH_AHEAD = 6 }; /* parameters */

void fst_trace_free(fst_step_plan *self)
{
    self->traced = 0;
    PyMem_Free(self->traces);
    PyMem_Free(self->traced_states);
    PyMem_Free(self->traced_dtensors);
    self->traced_dtensors = NULL;
    self->traced_dtensor_capacity = 0;
    self->traces = NULL;
    self->traced_states = NULL;
    self->trace_capacity = self->traced_state_capacity = 0;
}

/* Returns an array of at least `wanted` elements, the old one if it is large enough. Its
 * contents are lost. */
static void *make_room(void *array, size_t *capacity, size_t wanted, size_t size)
{
    if (*capacity >= wanted && array)
        return array;
    PyMem_Free(array);
    array = PyMem_Calloc(wanted + 1, size);
    *capacity = array ? wanted : 0;
    return array;
}

void fst_trace_begin(const fst_record_layout *layout, fst_step_plan *self, int again)
{
    size_t states = 0;
    self->traceable = layout->known && !again && self->param_count <= INT32_MAX;
    if (!self->traceable)
        return;
    for (size_t g = 0; g < self->group_count; g++)
        states += (size_t)self->groups[g].size * self->groups[g].key_count;
    self->traced_state_count = 0;
    self->traces =
        make_room(self->traces, &self->trace_capacity, self->param_count, sizeof *self->traces);
    self->traced_states = make_room(self->traced_states, &self->traced_state_capacity, states,
                                    sizeof *self->traced_states);
    self->traceable = self->traces && self->traced_states && states <= UINT32_MAX;
}

/* Where CPython keeps a dictionary's entries. The address is only prefetched, so another layout
 * costs time and nothing else. */
static const void *entries_of(PyObject *dict)
{
    return ((const void *const *)dict)[4];
}

fst_trace *fst_trace_param(const fst_record_layout *layout, fst_step_plan *self, size_t index,
                           PyObject *object, const fst_view *view, PyObject *grad,
                           const fst_view *grad_view)
{
    if (!self->traceable)
        return NULL;
    fst_trace *trace = &self->traces[index];
    *trace = (fst_trace){.type = Py_TYPE(object),
                         .has_grad = 1,
                         .pinned = 1,
                         .states = (uint32_t)self->traced_state_count};
    self->traceable = fst_record_take(layout, object, view, &trace->param, &trace->hash) &&
                      fst_moving_take(layout, grad, grad_view, &trace->grad);
    if (!self->traceable)
        return NULL;
    trace->meta = fst_record_meta(layout, trace->param.impl);
    return trace;
}

void fst_trace_idle(const fst_record_layout *layout, fst_step_plan *self, size_t index,
                    PyObject *object)
{
    if (!self->traceable)
        return;
    const void *impl = fst_record_of(layout, object);
    self->traceable = impl != NULL;
    if (impl)
        self->traces[index] = (fst_trace){
            .param = {.object = object, .impl = impl},
            .type = Py_TYPE(object),
            .grad.impl = fst_record_grad(layout, impl),
            .meta = fst_record_meta(layout, impl),
        };
}

void fst_trace_dict(fst_trace *trace, PyObject *dict, Py_ssize_t state_at, unsigned key_count)
{
    trace->key_count = (uint8_t)key_count;
    trace->dict = dict;
    trace->entries = entries_of(dict);
    trace->state_at = state_at;
}

void fst_trace_state(const fst_record_layout *layout, fst_step_plan *self, fst_trace *trace,
                     const PyObject *key, PyObject *value, const fst_view *view, int pinned)
{
    if (!self->traceable)
        return;
    fst_traced_state *state = &self->traced_states[self->traced_state_count++];
    state->key = key;
    trace->pinned = trace->pinned && pinned;
    self->traceable = key && fst_record_take(layout, value, view, &state->value, &trace->hash);
}

/* Whether a rule without a step counter is at its first step, which the next step is not like. */
static int is_first(const fst_step_part *part)
{
    for (size_t i = 0; i < part->counter_count; i++)
        if (!part->counters[i].at.data && part->counters[i].value != 2.0)
            return 1;
    return 0;
}

/* Whether the version counters of all gradients are moved from C. */
static int counts_grads(const fst_record_layout *layout, const fst_step_plan *self)
{
    int counts = !self->has_dtensors; /* of whose gradients only the local tensors are traced */
    for (size_t i = 0; counts && i < self->param_count; i++)
        counts = !self->traces[i].has_grad || fst_record_counts(layout, self->traces[i].grad.impl);
    return counts;
}

void fst_trace_end(const fst_record_layout *layout, fst_step_plan *self, int write_grads)
{
    self->traceable = self->traceable && (self->total <= FST_SHORT_STEP || !self->has_dtensors);
    for (size_t i = 0; i < self->part_count; i++)
        self->traceable = self->traceable && !is_first(&self->parts[i]);
    if (self->traceable)
        self->traced = 1 + (write_grads && counts_grads(layout, self));
}

/* Whether the parameter has the same states in the same dictionary. Adds their records to the
 * hash. */
static int same_states(const fst_module *module, const fst_step_plan *self, const fst_trace *trace,
                       PyObject *object, PyObject *state, uint64_t *hash)
{
    const fst_record_layout *layout = &module->records;
    const fst_traced_state *states = self->traced_states + trace->states;
    const int pinned = trace->pinned && !trace->is_dtensor;
    PyObject *key, *value;
    Py_ssize_t position = trace->state_at;
    if (!PyDict_Next(state, &position, &key, &value) || key != object || value != trace->dict)
        return 0;
    position = 0;
    for (unsigned k = 0; k < trace->key_count; k++) {
        const fst_tensor_record *was = &states[k].value;
        if (!PyDict_Next(trace->dict, &position, &key, &value) || key != states[k].key)
            return 0;
        if (trace->is_dtensor)
            value = fst_trace_same_state(module, self, trace, k, value);
        if (value != was->object || (!pinned && fst_record_of(layout, value) != was->impl))
            return 0;
        fst_record_add(layout, was->impl, hash);
    }
    return 1;
}

/* Whether the gradient with this record is the same, or like it in other memory, to which the span
 * then points. */
static int same_grad(const fst_record_layout *layout, fst_step_plan *self, fst_trace *trace,
                     const void *impl)
{
    uint64_t by = 0;
    if (!impl || !fst_moving_follow(layout, &trace->grad, impl, &by))
        return 0;
    if (by && trace->span >= 0) {
        fst_operand *ops = self->parts[trace->part].plan.operands + trace->span * FST_OP_COUNT;
        ops[FST_OP_GRAD].data = (char *)ops[FST_OP_GRAD].data + (int64_t)by;
        fst_plan_moved(&self->parts[trace->part].plan, FST_OP_GRAD);
        self->moves++;
    }
    return 1;
}

/* A gradient's Python object is not read, as it may be gone; that of a DTensor has to be. */
static int same_param(fst_module *module, fst_step_plan *self, fst_trace *trace, PyObject *object,
                      PyObject *state)
{
    const fst_record_layout *layout = &module->records;
    const void *impl = trace->param.impl;
    PyObject *local = object, *grad = NULL;
    uint64_t hash = 0;
    if ((const void *)Py_TYPE(object) != trace->type ||
        (trace->is_dtensor && !fst_trace_same_dtensor(module, self, trace, &local, &grad)))
        return 0;
    if (local != trace->param.object || fst_record_of(layout, local) != impl)
        return 0;
    if (!trace->has_grad)
        return fst_record_grad(layout, impl) == trace->grad.impl;
    fst_record_add(layout, impl, &hash);
    if (trace->key_count && !same_states(module, self, trace, object, state, &hash))
        return 0;
    return hash == trace->hash &&
           same_grad(layout, self, trace,
                     grad ? fst_record_of(layout, grad) : fst_record_grad(layout, impl));
}

static void fetch_bytes(const void *from, size_t size)
{
    for (size_t at = 0; at < size; at += 64)
        __builtin_prefetch((const char *)from + at);
}

/* Prefetches the records of a parameter some places ahead, and what points to them still
 * earlier. Between two steps the model evicts them from the cache. */
static void fetch(const fst_record_layout *layout, const fst_step_plan *self,
                  const fst_trace *trace, size_t left, unsigned key_count)
{
    const size_t bytes_of_states = key_count * sizeof *self->traced_states;
    if (left > 2 * FETCH_AHEAD) {
        const fst_trace *later = trace + 2 * FETCH_AHEAD;
        fetch_bytes(later, sizeof *later);
        fetch_bytes((const char *)(self->traced_states + trace->states) +
                        2 * FETCH_AHEAD * bytes_of_states,
                    bytes_of_states);
    }
    if (left <= FETCH_AHEAD)
        return;
    trace += FETCH_AHEAD;
    __builtin_prefetch(trace->param.object);
    __builtin_prefetch(trace->meta);
    if (trace->is_dtensor)
        fst_trace_fetch_dtensors(self, trace, key_count);
    fst_record_fetch(layout, trace->param.impl, trace->param.storage);
    fst_record_fetch(layout, trace->grad.impl, trace->grad.storage);
    if (!key_count || !trace->has_grad)
        return;
    __builtin_prefetch(trace->dict);
    fetch_bytes(trace->entries, 2 * 64);
    for (unsigned k = 0; k < key_count; k++) {
        const fst_tensor_record *value = &self->traced_states[trace->states + k].value;
        if (!trace->pinned || trace->is_dtensor)
            __builtin_prefetch(value->object);
        fst_record_fetch(layout, value->impl, value->storage);
    }
}

static int find_streams(fst_module *module, fst_step_plan *self)
{
    for (size_t s = 0; s < self->part_count; s++) {
        fst_step_part *part = &self->parts[s];
        fst_problem problem;
        if (part->device != FST_HOST && part->counter_count &&
            (fst_tensor_stream(&module->tensors, part->sample, part->device, &part->stream,
                               &problem) ||
             fst_stream_is_new(&module->tensors, part->stream)))
            return -1;
    }
    return 0;
}

/* Holds the parameter, its states and its gradient, whose reading may run Python code. Returns 0,
 * or -1 with a Python error. */
static int hold_param(fst_module *module, fst_step_plan *self, const fst_trace *trace,
                      PyObject *object)
{
    if (!fst_bind_hold(self, Py_NewRef(object)))
        return -1;
    if (!trace->has_grad)
        return 0;
    for (unsigned k = 0; k < trace->key_count; k++)
        if (!fst_bind_hold(self, Py_NewRef(self->traced_states[trace->states + k].value.object)))
            return -1;
    PyObject *grad = fst_tensor_grad(&module->tensors, object);
    return grad && fst_bind_hold(self, grad) ? 0 : -1;
}

int fst_trace_hold(fst_module *module, fst_step_plan *self, PyObject *param_lists)
{
    const fst_trace *trace = self->traces;
    for (size_t g = 0; g < self->group_count; g++) {
        PyObject *params = PyList_GetItem(param_lists, (Py_ssize_t)g);
        for (Py_ssize_t i = 0; i < self->groups[g].size; i++, trace++) {
            if (hold_param(module, self, trace, PyList_GetItem(params, i)))
                return -1;
            if (module->tensors.ran_python)
                return 0;
        }
    }
    return 1;
}

int fst_trace_follow(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                     PyObject *state, int write_grads)
{
    if (self->traced <= write_grads)
        return 0;
    module->tensors.ran_python = 0; /* by others, before */
    fst_trace *trace = self->traces;
    for (size_t g = 0; g < self->group_count; g++) {
        const fst_group *group = &self->groups[g];
        const Py_ssize_t count = group->size;
        PyObject *params = PyList_GetItem(param_lists, (Py_ssize_t)g);
        if (!params || !PyList_Check(params) || PyList_Size(params) != count)
            return 0;
        for (Py_ssize_t i = 0; i < count; i++, trace++) {
            fetch(&module->records, self, trace, (size_t)(count - i), group->key_count);
            if (!same_param(module, self, trace, PyList_GetItem(params, i), state))
                return 0;
        }
    }
    return !find_streams(module, self) && !module->tensors.ran_python;
}

void fst_trace_move_grads(const fst_record_layout *layout, const fst_step_plan *self)
{
    const fst_trace *traces = self->traces;
    for (size_t i = 0; i < self->param_count; i++) {
        if (i + FETCH_AHEAD < self->param_count && traces[i + FETCH_AHEAD].has_grad)
            __builtin_prefetch(
                fst_word_pointer(traces[i + FETCH_AHEAD].grad.impl, layout->at.counter_in_impl));
        if (traces[i].has_grad)
            layout->move(&traces[i].grad.impl);
    }
}
