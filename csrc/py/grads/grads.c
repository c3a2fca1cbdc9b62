/* Functions on the gradients of a list of parameters in CPU memory. With small tensors most of
 * the time goes into asking torch for gradients and their addresses. A gradient like one that
 * torch was asked about is therefore read from torch's records. */
#include "core/passes.h"
#include "py/grads/tensor_lists.h"
#include "py/torch/quiet.h"
#include "py/torch/tensor_record_read.h"
#include "py/grads/unscaled.h"
#include "rules/loss_scale.h"

/* The gradients of a call. */
typedef struct {
    fst_list list; /* its items are the parameters */
    const void **records;
    size_t record_count;
    PyObject *asked;      /* the other gradients, a list that keeps them alive */
    Py_ssize_t *index_of; /* the indices of their parameters */
    int64_t total;        /* elements */
    int found;            /* whether there is any gradient */
} grads;

static void grads_free(grads *g)
{
    fst_list_free(&g->list);
    PyMem_Free(g->records);
    PyMem_Free(g->index_of);
    Py_XDECREF(g->asked);
}

/* Prefetches the way from a parameter to its gradient, which has five steps, all evicted from
 * the cache between two calls. Each step is prefetched a few parameters after the one before. */
static void fetch_ahead(const fst_module *state, const grads *g, Py_ssize_t index)
{
    for (int step = 0; step < FST_STEPS_TO_GRAD; step++) {
        index += 3;
        if (index >= g->list.count)
            return;
        PyObject *param = PyTuple_GetItem(g->list.items, index);
        if (fst_tensor_is_plain(&state->tensors, param))
            fst_record_fetch_grad(&state->records, param, FST_STEPS_TO_GRAD - 1 - step);
    }
    if (index + 3 < g->list.count)
        __builtin_prefetch(PyTuple_GetItem(g->list.items, index + 3));
}

/* Adds the gradient of a parameter by its record. Returns 1, 0 if torch has to be asked, -1 with
 * a Python error. */
static int add_record(fst_module *state, grads *g, PyObject *param)
{
    if (!fst_tensor_is_plain(&state->tensors, param))
        return 0;
    const void *impl = fst_record_grad(&state->records, fst_record_of(&state->records, param));
    void *data;
    fst_status status = {0};
    if (!impl)
        return 0;
    if (impl == state->forms.none)
        return 1;
    const fst_form *form = fst_forms_find(&state->records, &state->forms, impl, &data);
    if (!form)
        return 0;
    fst_operand *op = fst_plan_add(&g->list.plan, form->count, 0, &status);
    if (!op)
        return fst_raise_int(&status);
    *op = (fst_operand){.data = data, .dtype = form->dtype};
    g->list.dtypes |= 1u << form->dtype;
    g->records[g->record_count++] = impl;
    g->total += form->count;
    g->found = 1;
    return 1;
}

/* Binds gradient `i` of those that torch was asked for. */
static int add_grad(fst_module *state, grads *g, Py_ssize_t i, int written)
{
    fst_view view;
    fst_problem problem;
    PyObject *grad = PyList_GetItem(g->asked, i);
    const Py_ssize_t index = g->index_of[i];
    if (!grad)
        return -1;
    if (fst_tensor_view(&state->tensors, grad, &view, &problem) ||
        fst_list_add(&g->list, index, &view, written, &problem)) {
        PyErr_Format(PyExc_TypeError, "the gradient of parameter %zd %s", index, problem.detail);
        return -1;
    }
    g->total += fst_view_count(&view);
    fst_forms_learn(&state->records, &state->forms, grad, &view);
    return 0;
}

/* Asks torch for the gradient of parameter `index`. */
static int add_asked(fst_module *state, grads *g, Py_ssize_t index, PyObject *param, int written)
{
    PyObject *grad = fst_tensor_grad(&state->tensors, param);
    if (!grad)
        return -1;
    if (grad == Py_None && state->records.known && !state->tensors.ran_python)
        state->forms.none = fst_record_grad(&state->records, fst_record_of(&state->records, param));
    int failed = 0;
    if (grad != Py_None) {
        const Py_ssize_t place = PyList_Size(g->asked);
        g->found = 1;
        g->index_of[place] = index;
        failed = PyList_Append(g->asked, grad) || add_grad(state, g, place, written);
    }
    Py_DECREF(grad);
    return failed ? -1 : 0;
}

static int bind_once(fst_module *state, grads *g, PyObject *params, int written, int use_records)
{
    *g = (grads){.asked = PyList_New(0)};
    if (fst_list_start(&g->list, params, FST_HOST) || !g->asked)
        return -1;
    const Py_ssize_t count = g->list.count;
    g->records = PyMem_Calloc((size_t)count + 1, sizeof *g->records);
    g->index_of = PyMem_Calloc((size_t)count + 1, sizeof *g->index_of);
    if (!g->records || !g->index_of) {
        PyErr_NoMemory();
        return -1;
    }
    state->tensors.ran_python = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *param = PyTuple_GetItem(g->list.items, i);
        if (use_records)
            fetch_ahead(state, g, i);
        const int added = use_records ? add_record(state, g, param) : 0;
        if (added < 0 || (!added && add_asked(state, g, i, param, written)))
            return -1;
    }
    return 0;
}

/* Binds these gradients again, as Python code may have moved their memory. */
static int bind_again(fst_module *state, grads *g, int written)
{
    const Py_ssize_t count = PyList_Size(g->asked);
    fst_list_restart(&g->list);
    g->total = 0;
    state->tensors.ran_python = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (add_grad(state, g, i, written))
            return -1;
    return 0;
}

static int seal(grads *g, int written)
{
    fst_status status = {0};
    return fst_plan_seal(&g->list.plan, 0, (unsigned)written, &status) ? fst_raise_int(&status) : 0;
}

/* Binds all gradients, and begins a quiet section in any case. A gradient that was read from its
 * record stays alive only while no Python code runs: a call that releases the GIL, or in which
 * Python code has run, asks torch for all of them instead. */
static int bind(fst_module *state, grads *g, PyObject *params, int written)
{
    const int use_records = state->records.known && state->records.move;
    PyObject *items =
        PySequence_Tuple(params); /* may run Python code; consumes a generator only once */
    fst_quiet_begin(&state->tensors);
    *g = (grads){.found = 0};
    if (!items)
        return -1;
    int failed = bind_once(state, g, items, written, use_records);
    if (!failed && g->record_count && (g->total > FST_SHORT_STEP || state->tensors.ran_python)) {
        const int paused = fst_quiet_pause(&state->tensors);
        grads_free(g); /* may run finalizers */
        fst_quiet_resume(&state->tensors, paused);
        failed = bind_once(state, g, items, written, 0);
    }
    for (int i = 1; !failed && state->tensors.ran_python && i < FST_ATTEMPTS; i++)
        failed = bind_again(state, g, written);
    Py_DECREF(items);
    return failed || seal(g, written) ? -1 : 0;
}

static fst_released_gil release_gil(fst_module *state, const grads *g)
{
    return g->record_count ? (fst_released_gil){.thread = NULL}
                           : fst_quiet_release_gil(&state->tensors);
}

static void acquire_gil(fst_module *state, fst_released_gil released)
{
    if (released.thread)
        fst_quiet_acquire_gil(&state->tensors, released);
}

/* Moves the version counters of the gradients. Returns a new list of those that Python has to
 * move. */
static PyObject *moved(fst_module *state, grads *g)
{
    fst_record_move_versions(&state->records, g->records, g->record_count);
    return Py_NewRef(g->asked);
}

PyObject *fst_py_unscale_grads(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *params, *result = NULL;
    double factor;
    int allow_fp16;
    grads g;
    fst_measurement out = {0};
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Odp", &params, &factor, &allow_fp16))
        return NULL;
    const int measure_only = factor == 1.0 && allow_fp16;
    if (!bind(state, &g, params, !measure_only)) {
        if (!allow_fp16 && g.list.dtypes >> FST_F16 & 1u) {
            PyErr_SetString(PyExc_ValueError, "Attempting to unscale FP16 gradients.");
        } else {
            const fst_released_gil released = release_gil(state, &g);
            (measure_only ? fst_measure : fst_unscale)(&g.list.plan, 0, factor, &out, &status);
            acquire_gil(state, released);
            if (!status.code && !measure_only)
                fst_unscaled_keep(&state->tensors, &state->unscaled, &g.list.plan, g.asked);
            result = status.code ? fst_raise(&status)
                                 : Py_BuildValue("iNN", g.found, PyBool_FromLong(out.nonfinite),
                                                 measure_only ? PyList_New(0) : moved(state, &g));
        }
    }
    fst_quiet_end(&state->tensors);
    grads_free(&g);
    return result;
}

/* The request and the result of clip_grads. */
typedef struct {
    double p, max_norm;
    double norm;
    int written;
} clipping;

static fst_code clip(fst_plan *plan, const double *expected, clipping *c, fst_status *status)
{
    const int may_expect = expected && c->p == 2.0;
    if (may_expect &&
        fst_clip_expected(plan, 0, expected, c->max_norm, &c->norm, &c->written, status))
        return status->code;
    if (c->written)
        return FST_OK;
    if (fst_total_norm(plan, 0, c->p, &c->norm, status))
        return status->code;
    const double factor = fst_clip_coefficient(c->norm, c->max_norm);
    c->written = !(factor >= 1.0);
    return c->written ? fst_scale(plan, 0, factor, status) : FST_OK;
}

/* The chunks' sums of squares that unscale_ measured, or NULL. Asking for versions may run
 * Python code; gradients are then bound again, and the sums are not used. *failed becomes 1 with
 * a Python error. */
static double *take_expected(fst_module *state, grads *g, int *failed)
{
    state->tensors.ran_python = 0;
    double *expected =
        fst_unscaled_take(&state->tensors, &state->unscaled, &g->list.plan, g->asked);
    if (!state->tensors.ran_python)
        return expected;
    PyMem_Free(expected);
    *failed = bind_again(state, g, 1) || seal(g, 1);
    return NULL;
}

PyObject *fst_py_clip_grads(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *params, *result = NULL;
    clipping c = {.written = 0};
    grads g;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Odd", &params, &c.p, &c.max_norm))
        return NULL;
    if (!bind(state, &g, params, 1)) {
        int failed = 0;
        double *expected = take_expected(state, &g, &failed);
        if (!failed) {
            const fst_released_gil released = release_gil(state, &g);
            clip(&g.list.plan, expected, &c, &status);
            acquire_gil(state, released);
        }
        PyMem_Free(expected);
        if (status.code)
            fst_raise(&status);
        else if (!failed)
            result = Py_BuildValue("diIN", c.norm, g.found, g.list.dtypes,
                                   c.written ? moved(state, &g) : PyList_New(0));
    }
    fst_quiet_end(&state->tensors);
    grads_free(&g);
    return result;
}
