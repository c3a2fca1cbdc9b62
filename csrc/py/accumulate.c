/* accumulate(sums, terms, factor, start): adds tensors to tensors of other types, in one pass; and
 * device_accumulate, the same on a CUDA device, as one launch. */
#include "core/layout.h"
#include "core/passes.h"
#include "gpu/run.h"
#include "py/lists.h"

/* A call in the making. The spans of sums.plan have two operands, a sum and its term; the plan of
 * the terms stays empty. */
typedef struct {
    fst_list sums, terms;
} pairs;

static void pairs_free(pairs *p)
{
    fst_list_free(&p->sums);
    fst_list_free(&p->terms);
}

static int pairs_start(pairs *p, PyObject *sums, PyObject *terms, int device)
{
    *p = (pairs){.sums = {.device = device}};
    if (fst_list_start(&p->sums, sums, device) || fst_list_start(&p->terms, terms, device))
        return -1;
    fst_plan_init(&p->sums.plan, 2);
    if (p->sums.count == p->terms.count)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd sums and %zd terms", p->sums.count, p->terms.count);
    return -1;
}

static int same_geometry(const fst_view *a, const fst_view *b)
{
    int same = a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; d++)
        same = a->shape[d] == b->shape[d];
    return same;
}

/* Fills an operand of a view that is iterated in the given order. */
static int bind_operand(fst_module *state, PyObject *object, const fst_view *view, int order_count,
                        const int *order, int written, fst_layout **layout, fst_operand *op,
                        fst_problem *problem)
{
    if (!fst_view_is_packed(view) && fst_tensor_layout(&state->tensors, object, view, order_count,
                                                       order, written, layout, problem))
        return -1;
    if (*layout && fst_layout_is_for(*layout, view->device, problem))
        return -1;
    *op = (fst_operand){view->data, *layout, view->dtype};
    return 0;
}

/* Both are iterated in the order of the sum's memory, or of the shape where one of them is packed
 * and the other is not. */
static int iteration_order(const fst_view *sum, const fst_view *term, int *order)
{
    if (!fst_view_is_packed(sum) && !fst_view_is_packed(term))
        return fst_layout_order(sum->ndim, sum->shape, sum->strides, order);
    for (int d = 0; d < sum->ndim; d++)
        order[d] = d;
    return sum->ndim;
}

static int share_memory(const fst_operand *ops, int64_t count)
{
    const fst_extent a = fst_overlap_extent(&ops[0], count), b = fst_overlap_extent(&ops[1], count);
    return a.begin < b.end && b.begin < a.end;
}

/* Adds pair `index`; *role says whose problem it is. */
static int bind_pair(fst_module *state, pairs *p, Py_ssize_t index, const char **role,
                     fst_problem *problem)
{
    PyObject *sum = PyTuple_GetItem(p->sums.items, index);
    PyObject *term = PyTuple_GetItem(p->terms.items, index);
    fst_view sum_view, term_view;
    fst_status status = {0};
    int order[FST_MAX_DIMS];
    *role = "sum";
    if (fst_tensor_view(&state->tensors, sum, &sum_view, problem) ||
        fst_view_is_on(&sum_view, p->sums.device, problem))
        return -1;
    *role = "term";
    if (fst_tensor_view(&state->tensors, term, &term_view, problem) ||
        fst_view_is_on(&term_view, p->terms.device, problem))
        return -1;
    if (!same_geometry(&sum_view, &term_view))
        return fst_problem_set(problem, "shape", "is not of the sum's shape");
    const int64_t count = fst_view_count(&sum_view);
    if (count == 0)
        return 0;
    const int kept = iteration_order(&sum_view, &term_view, order);
    fst_operand *ops = fst_plan_add(&p->sums.plan, count, 0, &status);
    if (!ops)
        return fst_problem_set(problem, "storage", "%s", status.message);
    if (bind_operand(state, term, &term_view, kept, order, 0, &p->terms.layouts[index], &ops[1],
                     problem))
        return -1;
    *role = "sum";
    if (bind_operand(state, sum, &sum_view, kept, order, 1, &p->sums.layouts[index], &ops[0],
                     problem))
        return -1;
    if (share_memory(ops, count))
        return fst_problem_set(problem, "overlap", "shares memory with its term");
    return 0;
}

static int bind_all(fst_module *state, pairs *p)
{
    fst_status status = {0};
    for (Py_ssize_t i = 0; i < p->sums.count; i++) {
        fst_problem problem;
        const char *role;
        if (bind_pair(state, p, i, &role, &problem)) {
            PyErr_Format(PyExc_TypeError, "%s %zd %s", role, i, problem.detail);
            return -1;
        }
    }
    if (fst_plan_seal(&p->sums.plan, 0, 1, &status))
        return fst_raise_int(&status);
    return 0;
}

PyObject *fst_py_accumulate(PyObject *module, PyObject *args)
{
    PyObject *sums, *terms, *result = NULL;
    double factor;
    int start = 0;
    pairs p;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "OOd|p", &sums, &terms, &factor, &start))
        return NULL;
    if (!pairs_start(&p, sums, terms, FST_HOST) && !bind_all(fst_module_state(module), &p)) {
        Py_BEGIN_ALLOW_THREADS fst_accumulate(&p.sums.plan, factor, start, &status);
        Py_END_ALLOW_THREADS result = status.code ? fst_raise(&status) : Py_NewRef(Py_None);
    }
    pairs_free(&p);
    return result;
}

PyObject *fst_py_device_accumulate(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *sums, *terms, *result = NULL;
    fst_accumulate_launch launch = {.start = 0};
    fst_status status = {0};
    pairs p;
    int device, start = 0;
    void *stream;
    if (!PyArg_ParseTuple(args, "OOd|p", &sums, &terms, &launch.factor, &start) ||
        fst_list_device(state, sums, &device, &stream))
        return NULL;
    launch.start = start;
    if (!pairs_start(&p, sums, terms, device) && !bind_all(state, &p)) {
        fst_gpu_tables *tables = fst_list_upload(state, &p.sums, stream);
        if (tables && !fst_gpu_accumulate(tables, &launch, &status))
            result = Py_NewRef(Py_None);
        else if (tables)
            fst_list_raise(&p.sums, &status);
    }
    pairs_free(&p);
    return result;
}
