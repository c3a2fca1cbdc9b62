/* accumulate(sums, terms, factor, start, more) adds to each sum one or two terms of any dtype, in
 * one pass. device_accumulate does the same on a CUDA device in one launch. */
#include "core/layout.h"
#include "core/passes.h"
#include "gpu/launch.h"
#include "py/grads/tensor_lists.h"
#include "py/torch/quiet.h"

enum { MOST_TERMS = 2 };

static const char *const term_roles[MOST_TERMS] = {"term", "further term"};

/* A call's lists. The spans of sums.plan have a sum and its terms as operands; the plans of the
 * terms stay empty. */
typedef struct {
    fst_list sums, terms[MOST_TERMS];
    unsigned term_count;
    double factor;
    int start;
} addition;

static void addition_free(addition *a)
{
    fst_list_free(&a->sums);
    for (unsigned k = 0; k < MOST_TERMS; k++)
        fst_list_free(&a->terms[k]);
}

static int terms_start(addition *a, PyObject *terms, int device)
{
    fst_list *list = &a->terms[a->term_count++];
    if (fst_list_start(list, terms, device))
        return -1;
    if (list->count == a->sums.count)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd sums and %zd terms", a->sums.count, list->count);
    return -1;
}

/* Starts the lists of a call. They must be freed in either case. */
static int addition_start(addition *a, PyObject *sums, PyObject *terms, PyObject *more, int device)
{
    if (fst_list_start(&a->sums, sums, device) || terms_start(a, terms, device) ||
        (more != Py_None && terms_start(a, more, device)))
        return -1;
    fst_plan_init(&a->sums.plan, 1 + a->term_count);
    return 0;
}

static int same_geometry(const fst_view *a, const fst_view *b)
{
    int same = a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; d++)
        same = a->shape[d] == b->shape[d];
    return same;
}

/* Fills an operand from a view that is iterated in the given order. */
static int bind_operand(const fst_view *view, int order_count, const int *order, int written,
                        fst_layout **layout, fst_operand *op, fst_problem *problem)
{
    if (!fst_view_is_packed(view) &&
        fst_view_layout(view, order_count, order, written, layout, problem))
        return -1;
    if (*layout && fst_layout_is_for(*layout, view->device, problem))
        return -1;
    *op = (fst_operand){.data = view->data, .layout = *layout, .dtype = view->dtype};
    return 0;
}

/* The order of iteration: that of the sum's memory, or of the shape where an operand is
 * contiguous, as it needs no layout only in that order. */
static int iteration_order(const fst_view *views, unsigned count, int *order)
{
    int packed = 0;
    for (unsigned k = 0; k < count; k++)
        packed |= fst_view_is_packed(&views[k]);
    if (!packed)
        return fst_layout_order(views->ndim, views->shape, views->strides, order);
    for (int d = 0; d < views->ndim; d++)
        order[d] = d;
    return views->ndim;
}

static const fst_list *list_of(const addition *a, unsigned operand)
{
    return operand ? &a->terms[operand - 1] : &a->sums;
}

static const char *role_of(unsigned operand)
{
    return operand ? term_roles[operand - 1] : "sum";
}

/* Reads the tensors at `index` of each list. *role names the one with a problem. */
static int view_all(fst_module *state, const addition *a, Py_ssize_t index, fst_view *views,
                    const char **role, fst_problem *problem)
{
    PyObject *objects[1 + MOST_TERMS];
    unsigned which;
    for (unsigned k = 0; k <= a->term_count; k++)
        objects[k] = PyTuple_GetItem(list_of(a, k)->items, index);
    if (fst_tensor_views(&state->tensors, objects, 1 + a->term_count, views, &which, problem)) {
        *role = role_of(which);
        return -1;
    }
    for (unsigned k = 0; k <= a->term_count; k++) {
        *role = role_of(k);
        if (fst_view_is_on(&views[k], list_of(a, k)->device, problem))
            return -1;
        if (!same_geometry(&views[0], &views[k]))
            return fst_problem_set(problem, "shape", "is not of the sum's shape");
    }
    return 0;
}

/* Adds the span of the tensors at `index`. */
static int bind_span(fst_module *state, addition *a, Py_ssize_t index, const char **role,
                     fst_problem *problem)
{
    fst_view views[1 + MOST_TERMS];
    fst_status status = {0};
    int order[FST_MAX_DIMS];
    if (view_all(state, a, index, views, role, problem))
        return -1;
    const int64_t count = fst_view_count(views);
    if (count == 0)
        return 0;
    const int kept = iteration_order(views, 1 + a->term_count, order);
    fst_operand *ops = fst_plan_add(&a->sums.plan, count, 0, &status);
    if (!ops)
        return fst_problem_set(problem, "storage", "%s", status.message);
    for (unsigned k = a->term_count + 1; k-- > 0;) {
        const fst_list *list = list_of(a, k);
        *role = role_of(k);
        if (bind_operand(&views[k], kept, order, k == 0, &list->layouts[index], &ops[k], problem))
            return -1;
    }
    for (unsigned k = 1; k <= a->term_count; k++)
        if (fst_extents_meet(fst_overlap_extent(&ops[0], count),
                             fst_overlap_extent(&ops[k], count)))
            return fst_problem_set(problem, "overlap", "shares memory with its term");
    return 0;
}

static int bind_spans(fst_module *state, addition *a)
{
    state->tensors.ran_python = 0;
    for (Py_ssize_t i = 0; i < a->sums.count; i++) {
        fst_problem problem;
        const char *role;
        if (bind_span(state, a, i, &role, &problem)) {
            PyErr_Format(PyExc_TypeError, "%s %zd %s", role, i, problem.detail);
            return -1;
        }
    }
    return 0;
}

static int bind_all(fst_module *state, addition *a)
{
    fst_status status = {0};
    if (bind_spans(state, a))
        return -1;
    for (int i = 1; state->tensors.ran_python && i < FST_ATTEMPTS; i++) {
        fst_list_restart(&a->sums);
        for (unsigned k = 0; k < a->term_count; k++)
            fst_list_restart(&a->terms[k]);
        if (bind_spans(state, a))
            return -1;
    }
    if (fst_plan_seal(&a->sums.plan, 0, 1, &status))
        return fst_raise_int(&status);
    return 0;
}

PyObject *fst_py_accumulate(PyObject *module, PyObject *args)
{
    PyObject *sums, *terms, *more = Py_None, *result = NULL;
    addition a = {.start = 0};
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "OOd|pO", &sums, &terms, &a.factor, &a.start, &more))
        return NULL;
    if (!addition_start(&a, sums, terms, more, FST_HOST) &&
        !bind_all(fst_module_state(module), &a)) {
        Py_BEGIN_ALLOW_THREADS
        fst_accumulate(&a.sums.plan, a.factor, a.start, &status);
        Py_END_ALLOW_THREADS
        result = status.code ? fst_raise(&status) : Py_NewRef(Py_None);
    }
    addition_free(&a);
    return result;
}

PyObject *fst_py_device_accumulate(PyObject *module, PyObject *args)
{
    fst_module *state = fst_module_state(module);
    PyObject *sums, *terms, *more = Py_None, *result = NULL;
    addition a = {.start = 0};
    fst_status status = {0};
    int device;
    void *stream;
    if (!PyArg_ParseTuple(args, "OOd|pO", &sums, &terms, &a.factor, &a.start, &more) ||
        fst_list_device(state, sums, &device, &stream))
        return NULL;
    if (!addition_start(&a, sums, terms, more, device) && !bind_all(state, &a)) {
        const fst_accumulate_launch launch = {
            .factor = a.factor, .start = a.start, .terms = a.term_count};
        fst_gpu_tables *tables = fst_list_upload(state, &a.sums, stream, 0);
        if (tables && !fst_gpu_accumulate(tables, &launch, &status))
            result = Py_NewRef(Py_None);
        else if (tables)
            fst_list_raise(&a.sums, &status);
    }
    addition_free(&a);
    return result;
}
