/* Binding: one loop over all parameters that reads every address anew. Only what changed is
 * looked at more closely. */
#include "py/step/bind.h"
#include "py/torch/quiet.h"

enum { FETCH_AHEAD = 4 }; /* parameters */

/* Whether the states of the parameter at hand are new; -1 with a Python error. */
static int is_fresh(fst_binding *at)
{
    int64_t pair[2]; /* group and index */
    if (!at->fresh || at->fresh_at >= PyList_Size(at->fresh))
        return 0;
    if (fst_bind_ints(PyList_GetItem(at->fresh, at->fresh_at), pair, 2))
        return -1;
    const int fresh = pair[0] == at->group && pair[1] == at->index;
    at->fresh_at += fresh;
    return fresh;
}

static int note_missing(const fst_binding *at)
{
    PyObject *pair = Py_BuildValue("nn", at->group, at->index);
    const int failed = !pair || PyList_Append(at->missing, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* The part of the device that a parameter lies on. */
static fst_step_part *enter_part(fst_binding *at, PyObject *object, int device)
{
    fst_problem problem;
    if (!at->part || at->part->device != device)
        at->part = fst_step_part_on(at->self, device);
    if (!at->part || device == FST_HOST || at->part->counter_count)
        return at->part;
    at->part->sample = object;
    if (!fst_tensor_stream(&at->module->tensors, object, device, &at->part->stream, &problem))
        return at->part;
    fst_bind_problem(at, "parameter", &problem);
    return NULL;
}

/* Traces the parameter at hand; its states follow. */
static void trace_param(fst_binding *at, const fst_param *param, PyObject *object, PyObject *local,
                        const fst_view *view, PyObject *grad, const fst_view *grad_view,
                        int64_t span)
{
    fst_step_plan *self = at->self;
    const fst_record_layout *layout = &at->module->records;
    self->traceable = self->traceable && (param->flat || self->is_factored);
    at->trace = fst_trace_param(layout, self, at->param_count, local, view, grad, grad_view);
    if (at->trace && object != local)
        fst_trace_dtensor(layout, self, at->trace, at->param_count, object);
    if (at->trace) {
        at->trace->span = (int32_t)span;
        at->trace->part = (int16_t)(at->part - self->parts);
    }
}

/* Lists what the step writes of a parameter, whose version counters it moves. A DTensor has one,
 * and so has its local tensor. */
static int note_written(fst_binding *at, PyObject *local, PyObject *object)
{
    return fst_bind_written(at->self, local) ||
           (object != local && fst_bind_written(at->self, object));
}

static int note_grad(fst_step_plan *self, PyObject *grad)
{
    return fst_bind_note(&self->grads, &self->grad_count, &self->grad_capacity, grad);
}

/* Reads a parameter and its gradient. Returns 1, FST_UNSETTLED if Adafactor leaves them to torch,
 * or -1 with a Python error. */
static int view_both(fst_binding *at, PyObject *param, PyObject *grad, fst_view views[2])
{
    PyObject *objects[] = {param, grad};
    fst_problem problem;
    unsigned which;
    const int bad = fst_tensor_views(&at->module->tensors, objects, 2, views, &which, &problem);
    if (at->self->is_factored)
        return bad || views[0].device != FST_HOST || views[1].device != FST_HOST ||
                       views[0].dtype != views[1].dtype
                   ? FST_UNSETTLED
                   : 1;
    return bad ? fst_bind_problem(at, which ? "gradient" : "parameter", &problem) : 1;
}

/* Adds the span of a parameter, unless it is empty. *ops becomes its operands. Returns 0, or -1
 * with a Python error. */
static int add_span(fst_binding *at, const fst_param *param, fst_counter *counter,
                    fst_operand **ops)
{
    fst_step_plan *self = at->self;
    fst_status status = {0};
    fst_problem problem;
    if (param->count == 0 && self->is_factored) {
        fst_problem_set(&problem, "empty", "has no elements");
        return fst_bind_problem(at, "parameter", &problem);
    }
    if (param->count == 0)
        return 0;
    *ops = fst_plan_add_part(&at->part->plan, at->shard.begin, param->count, 0, &status);
    if (!*ops)
        return fst_raise_int(&status);
    counter->span = (int64_t)at->part->plan.span_count - 1;
    self->total += at->part->device == FST_HOST ? param->count : 0;
    self->written_total += param->count;
    return 0;
}

/* Binds one parameter and its gradient, straight into the operands of a new span. Returns as
 * fst_bind_states() does. */
static int bind_param(fst_binding *at, fst_param *param, PyObject *object, PyObject *whole_grad)
{
    fst_step_plan *self = at->self;
    fst_operand of_empty[FST_OP_COUNT], *ops = of_empty;
    fst_view views[2];
    fst_problem problem;
    PyObject *local = object, *grad = whole_grad;
    if (fst_bind_local(at, param, FST_IS_PARAM, &local) ||
        fst_bind_local(at, param, FST_IS_GRAD, &grad))
        return -1;
    const int viewed = view_both(at, local, grad, views);
    if (viewed != 1)
        return viewed;
    const fst_view view = views[0], grad_view = views[1];
    param->record = view.shape;
    param->grad = grad;
    param->grad_record = grad_view.shape;
    self->has_fp16 |= grad_view.dtype == FST_F16;
    if ((param->param != object || !fst_param_fits(param, &view)) &&
        fst_param_learn(param, &self->old_pins, object, &view, self->is_factored, &problem))
        return fst_bind_problem(at, "parameter", &problem);
    if (fst_bind_shard(at, param, object))
        return -1;
    fst_step_part *part = enter_part(at, local, view.device);
    if (!part || fst_reserve(&part->counters, &part->counter_capacity, part->counter_count,
                             sizeof *part->counters))
        return -1;
    fst_counter *counter = &part->counters[part->counter_count];
    *counter = (fst_counter){.group = (uint32_t)at->group, .value = 2.0, .span = -1};
    counter->index = (uint32_t)at->index;
    counter->param = at->shard.param;
    counter->wide = view.dtype == FST_F64;
    if (add_span(at, param, counter, &ops) ||
        fst_bind_operand(at, param, "parameter", &view, 1, &ops[FST_OP_PARAM]) ||
        fst_bind_operand(at, param, "gradient", &grad_view, at->write_grads, &ops[FST_OP_GRAD]))
        return -1;
    trace_param(at, param, object, local, &view, grad, &grad_view, counter->span);
    const int found = self->is_factored
                          ? fst_factored_bind_states(at, param, object, view.dtype, counter)
                          : fst_bind_states(at, param, object, view.dtype, ops, counter);
    if (found != 1)
        return found;
    const int fresh = is_fresh(at);
    if (fresh < 0)
        return -1;
    if (fresh)
        counter->value = 1.0;
    part->counter_count++;
    part->number_count += self->groups[at->group].number_count;
    if (note_written(at, local, object) || note_grad(self, grad))
        return -1;
    return grad != whole_grad && note_grad(self, whole_grad) ? -1 : 1;
}

/* Finds the parameter at hand and its gradient. The step holds a reference to both. Returns 0,
 * or -1 with a Python error. */
static int find_param(fst_binding *at, PyObject *params, PyObject **object, PyObject **grad)
{
    if (at->again) {
        *object = fst_bind_found(at);
        *grad = *object ? fst_bind_found(at) : NULL;
        return *grad ? 0 : -1;
    }
    if (at->index >= PyList_Size(params)) {
        fst_bind_raise_changed(at);
        return -1;
    }
    *object = PyList_GetItem(params, at->index);
    if (!fst_bind_hold(at->self, Py_NewRef(*object)))
        return -1;
    *grad = fst_tensor_grad(&at->module->tensors, *object);
    return *grad && fst_bind_hold(at->self, *grad) ? 0 : -1;
}

/* Whether the parameter at hand and its gradient can be bound, or Python has to look at them
 * first; -1 with a Python error. */
static int is_settled(const fst_binding *at, PyObject *object, PyObject *grad)
{
    const fst_tensors *tensors = &at->module->tensors;
    if (at->self->is_factored)
        return fst_tensor_is_plain(tensors, object) && fst_tensor_is_plain(tensors, grad);
    return at->again ||
           fst_step_is_settled(tensors, at->self, at->param_count, object, grad, FST_SETTLED_GRAD);
}

/* Binds the parameter at hand, which has a gradient, or lists it as one that cannot be bound yet.
 */
static int bind_or_list(fst_binding *at, PyObject *object, PyObject *grad)
{
    fst_step_plan *self = at->self;
    const int settled = is_settled(at, object, grad);
    const int found =
        settled > 0 ? bind_param(at, &self->params[at->param_count], object, grad) : settled;
    if (found < 0)
        return -1;
    if (settled == 0 || found == FST_UNSETTLED)
        return fst_step_list_unsettled(self, at->group, at->index);
    return found ? 0 : note_missing(at);
}

static int bind_group(fst_binding *at, PyObject *params)
{
    fst_step_plan *self = at->self;
    fst_tensors *tensors = &at->module->tensors;
    const Py_ssize_t count = self->groups[at->group].size;
    for (at->index = 0; at->index < count; at->index++, at->param_count++) {
        PyObject *object, *grad;
        if (at->param_count + FETCH_AHEAD < self->param_count)
            fst_param_fetch(&self->params[at->param_count + FETCH_AHEAD]);
        if (find_param(at, params, &object, &grad))
            return -1;
        at->ran_python |= tensors->ran_python;
        tensors->ran_python = 0;
        const int is_dtensor = fst_tensor_is_dtensor(tensors, object);
        if (!is_dtensor && !fst_tensor_is_plain(tensors, object))
            self->traceable = 0; /* only tensors have records */
        self->has_dtensors |= is_dtensor;
        if (grad == Py_None)
            fst_trace_idle(&at->module->records, self, at->param_count, object);
        else if (bind_or_list(at, object, grad))
            return -1;
        if (fst_bind_end_found(at))
            return -1;
        if (tensors->ran_python)
            self->traceable = 0; /* Python ran between torch's answer and the look at the record */
    }
    return 0;
}

/* Binds all groups; 0, or -1 with a Python error. */
static int bind_groups(fst_binding *at, PyObject *param_lists)
{
    int failed = 0;
    for (; !failed && (size_t)at->group < at->self->group_count; at->group++) {
        PyObject *params = PyList_GetItem(param_lists, at->group);
        if (!params)
            return -1;
        Py_INCREF(params);
        failed = bind_group(at, params);
        Py_DECREF(params);
    }
    return failed;
}

/* Makes one entry per parameter. Where their number has changed all are learnt again. */
static int count_params(fst_step_plan *self, PyObject *param_lists)
{
    size_t count = 0;
    for (size_t g = 0; g < self->group_count; g++) {
        PyObject *params = PyList_GetItem(param_lists, (Py_ssize_t)g);
        if (params && !PyList_Check(params)) {
            PyErr_Format(PyExc_TypeError, "the parameters of group %zu are not a list", g);
            return -1;
        }
        const Py_ssize_t size = params ? PyList_Size(params) : -1;
        if (size < 0)
            return -1;
        self->groups[g].size = size;
        count += (size_t)size;
    }
    if (count == self->param_count)
        return 0;
    fst_params_free(self);
    self->params = PyMem_Calloc(count + 1, sizeof *self->params);
    if (!self->params) {
        PyErr_NoMemory();
        return -1;
    }
    self->param_count = count;
    return 0;
}

static PyObject *bind_all(fst_binding at, PyObject *param_lists)
{
    fst_step_plan *self = at.self;
    at.missing = PyList_New(0);
    Py_CLEAR(self->unsettled);
    self->traced = 0; /* a failed bind leaves nothing bound */
    fst_step_unbind(self);
    self->bindings++;
    self->has_dtensors = self->has_fp16 = 0;
    self->total = self->written_total = 0;
    for (size_t i = 0; i < self->part_count; i++)
        fst_plan_begin(&self->parts[i].plan);
    if (!at.missing || (!at.again && count_params(self, param_lists)))
        goto error;
    fst_trace_begin(&at.module->records, self, at.again);
    if (bind_groups(&at, param_lists))
        goto error;
    if (PyList_Size(at.missing) == 0 && !self->unsettled)
        fst_trace_end(&at.module->records, self, at.write_grads);
    at.module->tensors.ran_python |= at.ran_python;
    return at.missing;
error:
    Py_XDECREF(at.missing);
    return NULL;
}

/* Whether all that was bound is unchanged although Python code has run. */
static int is_still_so(const fst_binding *at, PyObject *param_lists)
{
    fst_step_plan *self = at->self;
    const uint64_t moves = self->moves;
    return fst_trace_follow(at->module, self, param_lists, at->state, at->write_grads) &&
           moves == self->moves;
}

/* Whether addresses may be out of date because Python code has run since the first was read. */
static int must_bind_again(const fst_binding *at, PyObject *param_lists)
{
    if (!at->module->tensors.ran_python || at->again + 1 >= FST_ATTEMPTS)
        return 0;
    return !is_still_so(at, param_lists);
}

/* Asks about streams on which no step has run so far. Returns 0, or -1 with a Python error. */
static int note_streams(fst_module *module, const fst_step_plan *self)
{
    fst_problem problem;
    for (size_t i = 0; i < self->part_count; i++) {
        const fst_step_part *part = &self->parts[i];
        if (part->device != FST_HOST && part->counter_count &&
            fst_stream_note(&module->tensors, part->device, part->stream, &problem))
            return fst_step_raise(module, part->counters->group, part->counters->index, "parameter",
                                  problem.kind, problem.detail);
    }
    return 0;
}

/* Finds torch's records of the tensors that the step writes, up to the first without one. Records
 * stay valid as long as what is bound does. Returns 0, or -1 with a Python error. */
static int count_written(const fst_module *module, fst_step_plan *self)
{
    while (self->counted_count < self->written_count) {
        const void *impl = fst_record_counted(&module->records, self->written[self->counted_count]);
        if (!impl)
            return 0;
        if (fst_reserve(&self->counted, &self->counted_capacity, self->counted_count,
                        sizeof *self->counted))
            return -1;
        self->counted[self->counted_count++] = impl;
    }
    return 0;
}

PyObject *fst_step_bind(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                        PyObject *state, PyObject *fresh, int write_grads)
{
    fst_binding at = {.module = module, .self = self, .state = state, .write_grads = write_grads};
    at.held_at = self->held_count;
    int checked = 0, inference = 0;
    at.fresh = fresh == Py_None ? NULL : fresh;
    PyObject *missing;
    for (;;) {
        module->tensors.ran_python = 0;
        missing = bind_all(at, param_lists);
        if (!missing || PyList_Size(missing) > 0 || self->unsettled)
            break;
        if (must_bind_again(&at, param_lists)) {
            at.again++;
        } else {
            module->tensors.ran_python = 0;
            if (count_written(module, self) || note_streams(module, self))
                Py_CLEAR(missing);
            else if (!checked)
                inference = fst_step_check_inference(module, self, param_lists);
            checked = 1;
            if (inference)
                self->traced = 0; /* the next step may run outside of inference mode */
            if (inference < 0)
                Py_CLEAR(missing);
            if (!missing || !module->tensors.ran_python)
                break;
            at.again = 0; /* what was run here may have replaced anything: find all of it anew */
            at.held_at = self->held_count;
        }
        Py_DECREF(missing);
    }
    self->is_long = self->total > FST_SHORT_STEP;
    return missing;
}
