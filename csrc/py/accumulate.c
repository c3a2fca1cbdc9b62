/* accumulate(sums, terms, factor, start): adds tensors to tensors of other types, in one pass; and
 * device_accumulate, the same on a CUDA device, as one launch. */
#include "core/layout.h"
#include "core/passes.h"
#include "gpu/run.h"
#include "py/lists.h"

/* A call in the making; each span has two operands, a sum and its term. */
typedef struct {
    fst_plan plan;
    PyObject *sums, *terms; /* tuples, which keep the tensors alive */
    fst_layout **layouts;   /* of sum i at [2 * i], of term i at [2 * i + 1]; mostly NULL */
    Py_ssize_t count;
    int device;
} binding;

static void binding_free(binding *b)
{
    for (Py_ssize_t i = 0; b->layouts && i < 2 * b->count; i++)
        PyMem_Free(b->layouts[i]);
    PyMem_Free(b->layouts);
    Py_XDECREF(b->sums);
    Py_XDECREF(b->terms);
    fst_plan_free(&b->plan);
}

static int binding_start(binding *b, PyObject *sums, PyObject *terms, int device)
{
    *b = (binding){.sums = PySequence_Tuple(sums), .device = device};
    fst_plan_init(&b->plan, 2);
    b->terms = b->sums ? PySequence_Tuple(terms) : NULL;
    if (!b->terms)
        return -1;
    if (PyTuple_Size(b->sums) != PyTuple_Size(b->terms)) {
        PyErr_Format(PyExc_ValueError, "%zd sums and %zd terms", PyTuple_Size(b->sums),
                     PyTuple_Size(b->terms));
        return -1;
    }
    b->count = PyTuple_Size(b->sums);
    b->layouts = PyMem_Calloc(2 * (size_t)b->count + 1, sizeof *b->layouts);
    if (b->layouts)
        return 0;
    PyErr_NoMemory();
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
static int bind_pair(fst_module *state, binding *b, Py_ssize_t index, const char **role,
                     fst_problem *problem)
{
    PyObject *sum = PyTuple_GetItem(b->sums, index), *term = PyTuple_GetItem(b->terms, index);
    fst_view sum_view, term_view;
    fst_status status = {0};
    fst_layout **layouts = &b->layouts[2 * index];
    int order[FST_MAX_DIMS];
    *role = "sum";
    if (fst_tensor_view(&state->tensors, sum, &sum_view, problem) ||
        fst_view_is_on(&sum_view, b->device, problem))
        return -1;
    *role = "term";
    if (fst_tensor_view(&state->tensors, term, &term_view, problem) ||
        fst_view_is_on(&term_view, b->device, problem))
        return -1;
    if (!same_geometry(&sum_view, &term_view))
        return fst_problem_set(problem, "shape", "is not of the sum's shape");
    const int64_t count = fst_view_count(&sum_view);
    if (count == 0)
        return 0;
    const int kept = iteration_order(&sum_view, &term_view, order);
    fst_operand *ops = fst_plan_add(&b->plan, count, 0, &status);
    if (!ops)
        return fst_problem_set(problem, "storage", "%s", status.message);
    if (bind_operand(state, term, &term_view, kept, order, 0, &layouts[1], &ops[1], problem))
        return -1;
    *role = "sum";
    if (bind_operand(state, sum, &sum_view, kept, order, 1, &layouts[0], &ops[0], problem))
        return -1;
    if (share_memory(ops, count))
        return fst_problem_set(problem, "overlap", "shares memory with its term");
    return 0;
}

static int bind_all(fst_module *state, binding *b)
{
    fst_status status = {0};
    for (Py_ssize_t i = 0; i < b->count; i++) {
        fst_problem problem;
        const char *role;
        if (bind_pair(state, b, i, &role, &problem)) {
            PyErr_Format(PyExc_TypeError, "%s %zd %s", role, i, problem.detail);
            return -1;
        }
    }
    if (fst_plan_seal(&b->plan, 0, 1, &status))
        return fst_raise_int(&status);
    return 0;
}

PyObject *fst_py_accumulate(PyObject *module, PyObject *args)
{
    PyObject *sums, *terms, *result = NULL;
    double factor;
    int start = 0;
    binding b;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "OOd|p", &sums, &terms, &factor, &start))
        return NULL;
    if (!binding_start(&b, sums, terms, FST_HOST) && !bind_all(fst_module_state(module), &b)) {
        Py_BEGIN_ALLOW_THREADS fst_accumulate(&b.plan, factor, start, &status);
        Py_END_ALLOW_THREADS result = status.code ? fst_raise(&status) : Py_NewRef(Py_None);
    }
    binding_free(&b);
    return result;
}

PyObject *fst_py_device_accumulate(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *sums, *terms, *result = NULL;
    fst_accumulate_launch launch = {.start = 0};
    fst_status status = {0};
    binding b;
    int device, start = 0;
    void *stream;
    if (!PyArg_ParseTuple(args, "OOd|p", &sums, &terms, &launch.factor, &start) ||
        fst_list_device(state, sums, &device, &stream))
        return NULL;
    launch.start = start;
    if (!binding_start(&b, sums, terms, device) && !bind_all(state, &b)) {
        fst_gpu_tables *tables = fst_list_upload(state, &b.plan, device, stream);
        if (tables && !fst_gpu_accumulate(tables, &launch, &status))
            result = Py_NewRef(Py_None);
        else if (tables)
            fst_raise(&status);
    }
    binding_free(&b);
    return result;
}
