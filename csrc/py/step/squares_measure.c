/* Measures the sums of squares of one gradient, chunk by chunk. */
#include "core/layout.h"
#include "core/passes.h"
#include "py/step/param.h"
#include "py/torch/quiet.h"
#include "py/step/squares.h"

static size_t chunks_in(int64_t count)
{
    return (size_t)((count + FST_CHUNK - 1) / FST_CHUNK);
}

/* A gradient as a plan of one span, with the chunks that the step's plan will have. */
typedef struct {
    fst_plan plan;
    fst_param param;
    fst_old_pins none; /* it has no states */
    fst_layout *layout;
    const void *data;
    fst_dtype dtype;
    int64_t count;
} measuring;

static void measuring_free(measuring *m)
{
    fst_plan_free(&m->plan);
    fst_param_forget(&m->param, &m->none);
    PyMem_Free(m->layout);
}

/* Binds the gradient. Returns 0, or -1 with `problem` filled; the step will find and report the
 * same problem. */
static int bind(fst_tensors *tensors, measuring *m, PyObject *param, PyObject *grad,
                fst_problem *problem)
{
    PyObject *objects[] = {param, grad};
    fst_view views[2];
    const fst_view *grad_view = &views[1];
    unsigned which;
    fst_status status = {0};
    if (fst_tensor_views(tensors, objects, 2, views, &which, problem) ||
        fst_view_is_on(&views[0], FST_HOST, problem) ||
        fst_view_is_on(grad_view, FST_HOST, problem) ||
        fst_param_learn(&m->param, &m->none, param, &views[0], problem))
        return -1;
    if (!fst_param_has_shape(&m->param, grad_view))
        return fst_problem_set(problem, "shape", "is not of the parameter's shape");
    m->data = grad_view->data;
    m->dtype = grad_view->dtype;
    m->count = m->param.count;
    if (m->count == 0)
        return 0;
    if (!fst_param_is_packed_in(&m->param, grad_view) &&
        fst_view_layout(grad_view, m->param.order_count, m->param.order, 0, &m->layout, problem))
        return -1;
    fst_operand *op = fst_plan_add(&m->plan, m->count, 0, &status);
    if (!op || fst_plan_seal(&m->plan, 0, 0, &status))
        return fst_problem_set(problem, "storage", "%s", status.message);
    op = &m->plan.operands[0];
    *op = (fst_operand){grad_view->data, m->layout, grad_view->dtype};
    return 0;
}

/* Binds again until no Python code has run between the first address and the last. */
static int bind_quietly(fst_tensors *tensors, measuring *m, PyObject *param, PyObject *grad,
                        fst_problem *problem)
{
    for (int i = 0; i < FST_ATTEMPTS; i++) {
        measuring_free(m);
        *m = (measuring){.count = 0};
        fst_plan_init(&m->plan, 1);
        tensors->ran_python = 0;
        if (bind(tensors, m, param, grad, problem))
            return -1;
        if (!tensors->ran_python)
            break;
    }
    return 0;
}

/* Copies the sums into the slot. Returns 0, or -1 with a Python error. */
static int keep(fst_square *slot, const measuring *m, PyObject *grad, int64_t version,
                double inv_scale)
{
    const size_t chunks = chunks_in(m->count);
    PyObject *before = slot->grad;
    if (chunks > slot->capacity) {
        double *moved = PyMem_Realloc(slot->partial, chunks * sizeof *moved);
        if (!moved) {
            slot->grad = NULL;
            Py_XDECREF(before);
            PyErr_NoMemory();
            return -1;
        }
        slot->partial = moved;
        slot->capacity = chunks;
    }
    if (chunks)
        memcpy(slot->partial, m->plan.partial, chunks * sizeof *slot->partial);
    slot->grad = Py_NewRef(grad);
    slot->data = m->data;
    slot->dtype = m->dtype;
    slot->count = m->count;
    slot->version = version;
    slot->inv_scale = inv_scale;
    Py_XDECREF(before); /* may run Python code, which may move the slots */
    return 0;
}

int fst_squares_measure(fst_module *module, fst_squares_object *self, Py_ssize_t index,
                        PyObject *param, PyObject *grad)
{
    const double inv_scale = self->inv_scale;
    measuring m = {.count = 0};
    fst_measurement seen;
    fst_problem problem;
    fst_status status = {0};
    int64_t version;
    int done = 0;
    if (!fst_tensor_version(&module->tensors, grad, &version) &&
        !bind_quietly(&module->tensors, &m, param, grad, &problem)) {
        if (m.count > 0) {
            Py_BEGIN_ALLOW_THREADS
            fst_measure(&m.plan, 0, inv_scale, &seen, &status);
            Py_END_ALLOW_THREADS
        }
        fst_square *slot = status.code ? NULL : fst_squares_at(self, index);
        done = slot && !keep(slot, &m, grad, version, inv_scale);
        if (status.code)
            fst_raise(&status);
    }
    measuring_free(&m);
    return PyErr_Occurred() ? -1 : done;
}
