/* Functions on the gradients of a list of parameters in CPU memory. Of small tensors most of the
 * time goes into asking for gradients and their memory: those that are like one that torch was
 * asked about are read from torch's records. */
#include "core/passes.h"
#include "py/lists.h"
#include "py/plan.h"
#include "py/record_read.h"
#include "py/unscaled.h"
#include "rules/loss_scale.h"

/* Gradients of a call. */
typedef struct {
    fst_list list; /* its items are the parameters */
    const void **records;
    size_t record_count;
    PyObject *asked; /* list of the other gradients, which it keeps alive */
    int64_t total;   /* elements */
    int found;       /* whether there is any gradient */
} grads;

static void grads_free(grads *g)
{
    fst_list_free(&g->list);
    PyMem_Free(g->records);
    Py_XDECREF(g->asked);
}

/* Whether it is a tensor without Python code of its own. */
static int is_plain(const fst_module *state, PyObject *param)
{
    const PyObject *type = (const PyObject *)Py_TYPE(param);
    return type == state->tensors.parameter_type || type == state->tensors.tensor_type;
}

/* A parameter leads to its gradient in five steps, and between two calls all of them leave the
 * cache: each is asked for when the one before it should have come. */
static void fetch_ahead(const fst_module *state, const grads *g, Py_ssize_t index)
{
    for (int step = 0; step < FST_STEPS_TO_GRAD; step++) {
        index += 3;
        if (index >= g->list.count)
            return;
        PyObject *param = PyTuple_GetItem(g->list.items, index);
        if (is_plain(state, param))
            fst_record_fetch_grad(&state->records, param, FST_STEPS_TO_GRAD - 1 - step);
    }
    if (index + 3 < g->list.count)
        __builtin_prefetch(PyTuple_GetItem(g->list.items, index + 3));
}

/* 1 if the gradient was read from its record, 0 if torch has to be asked, -1 with a Python error.
 */
static int add_record(fst_module *state, grads *g, PyObject *param)
{
    if (!is_plain(state, param))
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

/* Asks torch for the gradient of parameter `index`. */
static int add_asked(fst_module *state, grads *g, Py_ssize_t index, PyObject *param, int written)
{
    fst_view view;
    fst_problem problem;
    PyObject *grad = fst_tensor_grad(&state->tensors, param);
    int failed = !grad;
    if (grad == Py_None && state->records.known && !state->tensors.ran_python)
        state->forms.none = fst_record_grad(&state->records, fst_record_of(&state->records, param));
    if (grad && grad != Py_None) {
        g->found = 1;
        failed = PyList_Append(g->asked, grad);
        if (!failed && (fst_tensor_view(&state->tensors, grad, &view, &problem) ||
                        fst_list_add(&g->list, index, &view, written, &problem))) {
            PyErr_Format(PyExc_TypeError, "the gradient of parameter %zd %s", index,
                         problem.detail);
            failed = 1;
        }
        if (!failed) {
            g->total += fst_view_count(&view);
            fst_forms_learn(&state->records, &state->forms, grad, &view);
        }
    }
    Py_XDECREF(grad);
    return failed ? -1 : 0;
}

static int bind_once(fst_module *state, grads *g, PyObject *params, int written, int use_records)
{
    *g = (grads){.asked = PyList_New(0)};
    if (fst_list_start(&g->list, params, FST_HOST) || !g->asked)
        return -1;
    const Py_ssize_t count = g->list.count;
    g->records = PyMem_Calloc((size_t)count + 1, sizeof *g->records);
    if (!g->records) {
        PyErr_NoMemory();
        return -1;
    }
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

/* A gradient that was read from its record is alive as long as no Python code runs: a call that
 * releases the GIL, or met Python code on its way, asks for all of them instead. */
static int bind(fst_module *state, grads *g, PyObject *params, int written)
{
    fst_status status = {0};
    const int use_records = state->records.known && state->records.move;
    state->tensors.ran_python = 0;
    int failed = bind_once(state, g, params, written, use_records);
    if (!failed && g->record_count && (g->total > FST_SHORT_STEP || state->tensors.ran_python)) {
        grads_free(g);
        failed = bind_once(state, g, params, written, 0);
    }
    if (!failed && fst_plan_seal(&g->list.plan, 0, (unsigned)written, &status))
        failed = fst_raise_int(&status);
    return failed;
}

static PyThreadState *release(const grads *g)
{
    return g->record_count ? NULL : PyEval_SaveThread();
}

static void acquire(PyThreadState *released)
{
    if (released)
        PyEval_RestoreThread(released);
}

/* Tells autograd that the gradients were written; a new list of those that Python has to tell it
 * of.
 */
static PyObject *moved(fst_module *state, grads *g)
{
    fst_record_move_versions(&state->records, g->records, g->record_count);
    return Py_NewRef(g->asked);
}

/* unscale_grads(params, factor, allow_fp16): see _C.pyi. */
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
            PyThreadState *released = release(&g);
            (measure_only ? fst_measure : fst_unscale)(&g.list.plan, 0, factor, &out, &status);
            acquire(released);
            if (!status.code && !measure_only)
                fst_unscaled_keep(&state->unscaled, &g.list.plan, g.asked);
            result = status.code ? fst_raise(&status)
                                 : Py_BuildValue("iNN", g.found, PyBool_FromLong(out.nonfinite),
                                                 measure_only ? PyList_New(0) : moved(state, &g));
        }
    }
    grads_free(&g);
    return result;
}

/* What clip_grads was asked for, and what it has found and done. */
typedef struct {
    double p, max_norm;
    int only_finite;
    double norm;
    int written;
} clipping;

static fst_code clip(fst_plan *plan, const double *expected, clipping *c, fst_status *status)
{
    const int may_expect = expected && c->p == 2.0 && !c->only_finite;
    if (may_expect &&
        fst_clip_expected(plan, 0, expected, c->max_norm, &c->norm, &c->written, status))
        return status->code;
    if (c->written)
        return FST_OK;
    if (fst_total_norm(plan, 0, c->p, &c->norm, status))
        return status->code;
    if (c->only_finite && !isfinite(c->norm))
        return FST_OK;
    const double factor = fst_clip_coefficient(c->norm, c->max_norm);
    c->written = !(factor >= 1.0);
    return c->written ? fst_scale(plan, 0, factor, status) : FST_OK;
}

/* clip_grads(params, p, max_norm, only_finite): see _C.pyi. */
PyObject *fst_py_clip_grads(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *params, *result = NULL;
    clipping c = {.written = 0};
    grads g;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "Oddp", &params, &c.p, &c.max_norm, &c.only_finite))
        return NULL;
    if (!bind(state, &g, params, 1)) {
        double *expected = fst_unscaled_take(&state->unscaled, &g.list.plan, g.asked);
        PyThreadState *released = release(&g);
        clip(&g.list.plan, expected, &c, &status);
        acquire(released);
        PyMem_Free(expected);
        if (status.code)
            fst_raise(&status);
        else
            result = Py_BuildValue("diIN", c.norm, g.found, g.list.dtypes,
                                   c.written ? moved(state, &g) : PyList_New(0));
    }
    grads_free(&g);
    return result;
}
