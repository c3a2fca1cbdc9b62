/* Binds the states of a parameter, which lie in optimizer.state. */
#include "py/step/bind.h"
#include "py/torch/quiet.h"
#include "rules/codes.h"

/* Finds the position of each parameter's entry in optimizer.state. Runs at most once per step. */
static void rescan_state(fst_binding *at)
{
    fst_step_plan *self = at->self;
    Py_ssize_t next = 0, here = 0;
    PyObject *key, *value;
    size_t guess = 0;
    at->rescanned = 1;
    for (size_t i = 0; i < self->param_count; i++)
        self->params[i].state_at = -1;
    for (; PyDict_Next(at->state, &next, &key, &value); here = next)
        for (size_t tried = 0; tried < self->param_count; tried++, guess++) {
            fst_param *param = &self->params[guess % self->param_count];
            if (param->param == key) {
                param->state_at = here;
                break;
            }
        }
}

PyObject *fst_state_of(fst_binding *at, const fst_param *param, PyObject *object)
{
    PyObject *key = NULL, *value = NULL;
    fst_tensors *tensors = &at->module->tensors;
    if (at->again)
        return fst_bind_found(at);
    if (PyDict_Size(at->state) == 0)
        return NULL;
    for (int again = 0; again < 2; again++) {
        Py_ssize_t position = param->state_at;
        if (position >= 0 && PyDict_Next(at->state, &position, &key, &value) && key == object)
            return PyDict_Check(value) ? fst_bind_hold(at->self, Py_NewRef(value)) : NULL;
        if (!at->rescanned)
            rescan_state(at);
    }
    /* slow, as torch hashes tensors in Python; only for parameters that are new or listed twice */
    const int paused = fst_quiet_pause(tensors);
    value = PyDict_GetItemWithError(at->state, object);
    Py_XINCREF(value);
    fst_quiet_resume_after_python(tensors, paused);
    if (value && !PyDict_Check(value))
        Py_CLEAR(value);
    return value ? fst_bind_hold(at->self, value) : NULL;
}

/* Writes what errors call the state of that name. Returns 0, or -1 with a Python error. */
static int name_role(PyObject *name, char role[64])
{
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes)
        return -1;
    PyOS_snprintf(role, 64, "state '%s'", PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return 0;
}

int fst_state_refuse(const fst_binding *at, PyObject *name, const fst_problem *problem)
{
    char role[64];
    return name_role(name, role) ? -1 : fst_bind_problem(at, role, problem);
}

int fst_state_check_inference(const fst_binding *at, PyObject *name, PyObject *object)
{
    fst_problem problem;
    if (at->again || fst_record_counter(&at->module->records, object))
        return 0;
    at->self->traceable = 0; /* the next step may not be in inference mode */
    const int frozen = fst_step_is_frozen(at->module, object);
    if (frozen <= 0)
        return frozen;
    fst_problem_set(&problem, "inference", FST_INFERENCE);
    return fst_state_refuse(at, name, &problem);
}

/* Reads the step counter, or number k - 1 beside it. Returns 0, or -1 with a Python error, which
 * says what can be read. */
static int view_counter(const fst_binding *at, unsigned k, PyObject *name, PyObject *object,
                        fst_view *view)
{
    fst_problem problem;
    const int bad = k == 0 ? fst_tensor_counter(&at->module->tensors, object, view, &problem)
                           : fst_tensor_view(&at->module->tensors, object, view, &problem);
    if (!bad && fst_view_count(view) == 1)
        return 0;
    if (!bad || !strcmp(problem.kind, "type") || !strcmp(problem.kind, "dtype"))
        fst_problem_set(&problem, "dtype",
                        "is not a one-element tensor of type float32, float64, bfloat16%s",
                        k == 0 ? ", float16, int64, int32, int16, int8 or uint8" : " or float16");
    return fst_state_refuse(at, name, &problem);
}

/* Binds the step counter, or number k - 1 beside it. Returns 1; 0 if it must be moved to the
 * parameter's device first, as torch keeps it in CPU memory unless `fused` or `capturable` is set,
 * or become one that kernels count in; -1 with a Python error. */
static int bind_counter(const fst_binding *at, fst_param *param, unsigned k, PyObject *name,
                        PyObject *object, fst_counter *counter, fst_view *view)
{
    fst_step_part *part = at->part;
    if (view_counter(at, k, name, object, view) || fst_state_check_inference(at, name, object))
        return -1;
    if (at->module->tensors.ran_python && /* which may have moved it */
        view_counter(at, k, name, object, view))
        return -1;
    const int counts = view->dtype == FST_F32 || view->dtype == FST_F64;
    if (view->device != part->device || (part->device != FST_HOST && k == 0 && !counts))
        return 0;
    fst_param_note_state(&at->module->tensors, param, &at->self->old_pins, k, object, view);
    if (k > 0) {
        const size_t place = part->number_count + k - 1;
        if (fst_reserve(&part->numbers, &part->number_capacity, place, sizeof *part->numbers))
            return -1;
        part->numbers[place] = (fst_tensor_number){.at = fst_view_number(view)};
    } else {
        counter->at = fst_view_number(view);
    }
    return 1;
}

void fst_state_trace(const fst_binding *at, const fst_param *param, unsigned k, const PyObject *key,
                     PyObject *whole, PyObject *value, const fst_view *view)
{
    if (at->trace)
        fst_trace_state(&at->module->records, at->self, at->trace, key, value, view,
                        param->states[k].pin != NULL);
    if (at->trace && whole != value)
        fst_trace_dtensor_state(&at->module->records, at->self, at->trace, k, whole);
}

int fst_state_written(fst_binding *at, PyObject *value, PyObject *whole)
{
    const void *counter = fst_record_counter(&at->module->records, value);
    if (whole != value && fst_bind_written(at->self, whole)) /* a DTensor has its own */
        return -1;
    if (counter && counter == at->counter)
        return 0;
    at->counter = counter;
    return fst_bind_written(at->self, value);
}

/* Whether two names are the same: 1, 0, or -1 with a Python error. Runs no Python code. */
static int same_name(PyObject *a, PyObject *b)
{
    if (a == b)
        return 1;
    const int order = PyUnicode_Compare(a, b);
    return order == -1 && PyErr_Occurred() ? -1 : order == 0;
}

/* Looks a state up by name in a dictionary with keys that are not str, whose comparison may run
 * Python code. Returns a new reference, or NULL. */
static PyObject *ask_for_state(fst_tensors *tensors, PyObject *state, PyObject *wanted)
{
    const int paused = fst_quiet_pause(tensors);
    PyObject *value = PyDict_GetItemWithError(state, wanted);
    Py_XINCREF(value);
    fst_quiet_resume_after_python(tensors, paused);
    return value;
}

/* Finds a state by name. Returns a new reference, or NULL. Where it is the next entry of the
 * dictionary, as usual, *key becomes its key, borrowed; else NULL. */
static PyObject *next_state(fst_tensors *tensors, PyObject *state, Py_ssize_t *position,
                            PyObject *wanted, PyObject **key)
{
    PyObject *value, *name;
    int same = 0, foreign = 0;
    if (PyDict_Next(state, position, key, &value) && PyUnicode_CheckExact(*key))
        same = same_name(*key, wanted);
    if (same)
        return same > 0 ? Py_NewRef(value) : NULL;
    *key = NULL;
    for (Py_ssize_t at = 0; !same && PyDict_Next(state, &at, &name, &value);)
        if (PyUnicode_CheckExact(name))
            same = same_name(name, wanted);
        else
            foreign = 1;
    if (same)
        return same > 0 ? Py_NewRef(value) : NULL;
    return foreign ? ask_for_state(tensors, state, wanted) : NULL;
}

PyObject *fst_state_find(fst_binding *at, PyObject *state, Py_ssize_t *position, PyObject *wanted,
                         PyObject **key)
{
    *key = NULL;
    if (at->again)
        return fst_bind_found(at);
    PyObject *value = next_state(&at->module->tensors, state, position, wanted, key);
    return value ? fst_bind_hold(at->self, value) : NULL;
}

/* Whether a parameter of this type has a master; -1 with a Python error for one that cannot have a
 * remainder. */
static int has_master(const fst_binding *at, const fst_group *group, fst_dtype of_param)
{
    fst_problem problem;
    if (!group->has_remainder || of_param != FST_F16)
        return group->has_master && (of_param == FST_BF16 || of_param == FST_F16);
    fst_problem_set(&problem, "dtype",
                    "is float16, and master_weights=\"remainder16\" is for bfloat16: use "
                    "\"fp32\"");
    return fst_bind_problem(at, "parameter", &problem);
}

/* How many of a group's states come before those of the parameter's shape: the step counter and
 * the numbers beside it. */
static unsigned counters_of(const fst_group *group)
{
    return (unsigned)group->has_step + group->number_count;
}

enum { SCALES = FST_OP_COUNT };

/* The operand that a state is, or SCALES. */
static unsigned operand_of(const fst_group *group, unsigned k)
{
    const unsigned behind = group->key_count - 1 - k;
    if (group->has_master && behind == 0)
        return FST_OP_MASTER;
    if (group->codes_from && behind == (unsigned)group->has_master)
        return SCALES;
    return FST_OP_STATE + k - counters_of(group);
}

/* Whether a state is known to be divided as its parameter is; -1 with a Python error. A step
 * counter is the same on all ranks, and scales are those of this rank's codes. */
static int is_settled(const fst_binding *at, unsigned k, PyObject *param, PyObject *state)
{
    const fst_group *group = &at->self->groups[at->group];
    if (at->again || k < counters_of(group) || operand_of(group, k) == SCALES)
        return 1;
    return fst_step_is_settled(&at->module->tensors, at->self, at->param_count, param, state,
                               FST_SETTLED_STATE + k);
}

/* Whether the parameter at hand does without a state: a master, or scales. */
static int is_left_out(const fst_binding *at, int keeps_master, unsigned k)
{
    const fst_group *group = &at->self->groups[at->group];
    const unsigned which = k < counters_of(group) ? FST_OP_STATE : operand_of(group, k);
    return (which == FST_OP_MASTER && !keeps_master) || (which == SCALES && !at->shard.coded);
}

/* Whether a state of the parameter's shape may have such a type. */
static int is_for_states(const fst_view *view, int codes)
{
    return view->dtype < FST_DTYPE_COUNT || (codes && fst_is_code(view->dtype));
}

/* Reads a state of the parameter's shape, which may be in codes. Returns 0, or -1 with `problem`
 * filled: it is none, or a master of another type than the group's. */
static int view_state(const fst_binding *at, PyObject *value, int is_master, fst_view *view,
                      fst_problem *problem)
{
    const fst_group *group = &at->self->groups[at->group];
    const int halves = is_master && group->has_remainder;
    const int codes = !is_master && at->shard.coded;
    const int wanted = halves ? FST_I16 : FST_F32;
    if (fst_tensor_counter(&at->module->tensors, value, view, problem))
        return -1;
    if (!halves && !is_for_states(view, codes))
        return fst_problem_set(problem, "dtype", "is not of type float32, float64, bfloat16%s",
                               codes ? ", float16, int8 or uint8" : " or float16");
    if (!is_master || ((int)view->dtype == wanted && !(halves && view->negated)))
        return 0;
    return fst_problem_set(problem, "dtype", "is not of type %s", halves ? "int16" : "float32");
}

/* Binds the scales, a row per state, of the states that are in codes. Returns 0, or -1 with a
 * Python error. */
static int bind_scales(const fst_binding *at, fst_param *param, unsigned k, PyObject *name,
                       PyObject *object, fst_operand *ops, fst_view *view)
{
    const unsigned states = fst_rules[at->self->groups[at->group].rule].states;
    const uint32_t row = at->shard.row;
    const int64_t before = fst_scales_before(at->shard.begin, row);
    const int64_t count = fst_scale_count(at->shard.begin + param->count, row) - before;
    fst_problem problem;
    if (fst_tensor_view(&at->module->tensors, object, view, &problem))
        return fst_state_refuse(at, name, &problem);
    if (view->device != at->part->device || view->dtype != FST_BF16 || view->ndim != 2 ||
        view->shape[0] < (int64_t)states || view->shape[1] != count ||
        (count && !fst_view_is_packed(view))) {
        fst_problem_set(&problem, "shape", "is not a bfloat16 tensor of %u rows of %lld scales",
                        states, (long long)count);
        return fst_state_refuse(at, name, &problem);
    }
    fst_param_note_state(&at->module->tensors, param, &at->self->old_pins, k, object, view);
    for (unsigned i = 0; i < states; i++)
        if (fst_is_code(ops[FST_OP_STATE + i].dtype)) {
            ops[FST_OP_STATE + i].scales =
                fst_moved_back((uint16_t *)view->data + i * count, before, sizeof(uint16_t));
            ops[FST_OP_STATE + i].row = row;
        }
    return 0;
}

/* Binds a state of the parameter's shape, or the scales. Returns 0, or -1 with a Python error. */
static int bind_shaped(fst_binding *at, fst_param *param, unsigned k, PyObject *name,
                       PyObject *value, fst_operand *ops, fst_counter *counter, fst_view *view)
{
    const unsigned which = operand_of(&at->self->groups[at->group], k);
    fst_problem problem;
    char role[64] = "state";
    if (which == SCALES)
        return bind_scales(at, param, k, name, value, ops, view);
    const int bad = view_state(at, value, which == FST_OP_MASTER, view, &problem);
    if ((bad || view->device != at->part->device || !fst_param_is_packed_in(param, view)) &&
        name_role(name, role))
        return -1;
    if (bad)
        return fst_bind_problem(at, role, &problem);
    fst_operand *op = &ops[which];
    counter->wide |= view->dtype == FST_F64;
    fst_param_note_state(&at->module->tensors, param, &at->self->old_pins, k, value, view);
    if (fst_bind_operand(at, param, role, view, 1, op))
        return -1;
    if (op->layout && fst_is_code(op->dtype)) {
        fst_problem_set(&problem, "shape", "is not laid out in memory as its parameter");
        return fst_state_refuse(at, name, &problem);
    }
    if (op->layout)
        at->self->traceable = 0;
    return 0;
}

int fst_bind_states(fst_binding *at, fst_param *param, PyObject *object, fst_dtype of_param,
                    fst_operand *ops, fst_counter *counter)
{
    const fst_group *group = &at->self->groups[at->group];
    const unsigned counters = counters_of(group);
    const int keeps_master = has_master(at, group, of_param);
    unsigned key_count = group->key_count;
    if (keeps_master < 0)
        return -1;
    for (unsigned k = counters; k < group->key_count; k++)
        key_count -= (unsigned)is_left_out(at, keeps_master, k);
    if (key_count == 0)
        return 1;
    PyObject *state = fst_state_of(at, param, object), *key;
    Py_ssize_t position = 0;
    if (!state)
        return PyErr_Occurred() ? -1 : 0;
    param->dict = state;
    if (at->trace)
        fst_trace_dict(at->trace, state, param->state_at, key_count);
    for (unsigned k = 0; k < group->key_count; k++) {
        if (is_left_out(at, keeps_master, k))
            continue;
        PyObject *wanted = PyTuple_GetItem(group->keys, k);
        PyObject *whole = fst_state_find(at, state, &position, wanted, &key), *value = whole;
        fst_view view;
        if (!value || value == Py_None)
            return PyErr_Occurred() ? -1 : 0;
        const int settled = is_settled(at, k, object, whole);
        if (settled <= 0)
            return settled ? -1 : FST_UNSETTLED;
        if (fst_bind_local(at, param, FST_IS_STATE + k, &value))
            return -1;
        if (k < counters) {
            const int there = bind_counter(at, param, k, wanted, value, counter, &view);
            if (there <= 0)
                return there;
            fst_state_trace(at, param, k, key, whole, value, &view);
            continue;
        }
        if (bind_shaped(at, param, k, wanted, value, ops, counter, &view) ||
            fst_state_written(at, value, whole))
            return -1;
        fst_state_trace(at, param, k, key, whole, value, &view);
    }
    return 1;
}
