/* Reads and checks the tensors of a step of Adafactor. */
#include "py/step/factored_bind.h"

#include "py/step/step_plan.h"
#include "py/torch/quiet.h"

static const char *role_of(const fst_factored_entry *entry, int k)
{
    static const char *const roles[FST_OF_COUNT] = {"parameter", "gradient", "state 'step'",
                                                    "state 'row_var'", "state 'col_var'"};
    return k == FST_OF_ROW && !entry->has_rows ? "state 'variance'" : roles[k];
}

static int refuse(const fst_module *module, const fst_factored_entry *entry, int k,
                  const fst_problem *problem)
{
    return fst_step_raise(module, entry->group, entry->index, role_of(entry, k), problem->kind,
                          problem->detail);
}

/* Refuses a tensor of another shape: the parameter's, with dimension `one` of a single element if
 * it is not -1. */
static int check_shape(const fst_module *module, const fst_factored_entry *entry, int k,
                       const fst_view *views, int one)
{
    const fst_view *param = &views[FST_OF_PARAM];
    fst_problem problem;
    int same = views[k].ndim == param->ndim;
    for (int d = 0; same && d < param->ndim; d++)
        same = views[k].shape[d] == (d == one ? 1 : param->shape[d]);
    if (same)
        return 0;
    fst_problem_set(&problem, "shape",
                    one < 0 ? "is not of the parameter's shape"
                            : "is not of the parameter's shape with dimension %d of size 1",
                    one);
    return refuse(module, entry, k, &problem);
}

/* Refuses a state that lacks a part. */
static int check_parts(const fst_module *module, const fst_factored_entry *entry, int ndim)
{
    fst_problem problem;
    const char *lacks = !entry->objects[FST_OF_STEP]              ? "step"
                        : ndim > 1 && !entry->has_rows            ? "row_var"
                        : ndim > 1 && !entry->objects[FST_OF_COL] ? "col_var"
                        : ndim <= 1 && entry->has_rows            ? "variance"
                        : !entry->objects[FST_OF_ROW]             ? "variance"
                                                                  : NULL;
    if (!lacks)
        return 0;
    fst_problem_set(&problem, "key", "has no '%s'", lacks);
    return fst_step_raise(module, entry->group, entry->index, "state", problem.kind,
                          problem.detail);
}

/* Refuses to write a tensor of inference mode outside of it. May run Python code. */
static int check_inference(fst_module *module, const fst_factored_entry *entry, int k)
{
    fst_problem problem;
    if (k == FST_OF_GRAD || fst_record_counter(&module->records, entry->objects[k]))
        return 0;
    const int frozen = fst_step_is_frozen(module, entry->objects[k]);
    if (frozen <= 0)
        return frozen;
    fst_problem_set(&problem, "inference", FST_INFERENCE);
    return refuse(module, entry, k, &problem);
}

/* Whether all tensors are dense CPU tensors of one type that C takes. */
static int read_views(fst_module *module, const fst_factored_entry *entry, fst_view *views)
{
    fst_problem unused;
    for (int k = 0; k < FST_OF_COUNT; k++) {
        PyObject *object = entry->objects[k];
        views[k].data = NULL;
        if (!object)
            continue;
        if (!fst_tensor_is_plain(&module->tensors, object) ||
            fst_tensor_view(&module->tensors, object, &views[k], &unused) ||
            views[k].device != FST_HOST)
            return 0;
        if (k == FST_OF_STEP ? fst_view_is_scalar(&views[k], FST_HOST, &unused)
                             : views[k].dtype != views[FST_OF_PARAM].dtype)
            return 0;
    }
    return 1;
}

/* Describes a tensor of the parameter's shape, in the order of the shape. */
static int bind_operand(const fst_module *module, fst_factored_entry *entry, int k,
                        const fst_view *view, fst_operand *op)
{
    int order[FST_MAX_DIMS];
    fst_problem problem;
    PyMem_Free(entry->layouts[k]);
    entry->layouts[k] = NULL;
    for (int d = 0; d < view->ndim; d++)
        order[d] = d;
    if (!fst_view_is_packed(view) &&
        fst_view_layout(view, view->ndim, order, k == FST_OF_PARAM, &entry->layouts[k], &problem))
        return refuse(module, entry, k, &problem);
    *op = (fst_operand){view->data, entry->layouts[k], view->dtype};
    return 0;
}

/* Fills what is computed of the views, which fit each other. */
static int fill(const fst_module *module, fst_factored_entry *entry, const fst_view *views,
                fst_factored *f)
{
    const fst_view *param = &views[FST_OF_PARAM];
    const int is_vector = param->ndim <= 1;
    *f = (fst_factored){
        .row = {views[FST_OF_ROW].data, NULL, param->dtype},
        .col = {views[FST_OF_COL].data, NULL, param->dtype},
        .count = fst_view_count(param),
        .batch = 1,
        .rows = 1,
        .cols = 1,
        .kind = is_vector ? FST_FACTORED_VECTOR : FST_FACTORED_WHOLE,
    };
    if (!is_vector) {
        f->rows = param->shape[param->ndim - 2];
        f->cols = param->shape[param->ndim - 1];
        f->batch = f->count / (f->rows * f->cols);
    }
    if (bind_operand(module, entry, FST_OF_PARAM, param, &f->param) ||
        bind_operand(module, entry, FST_OF_GRAD, &views[FST_OF_GRAD], &f->grad))
        return -1;
    entry->is_left = fst_factored_share(&f->param, &f->grad, f->count);
    entry->step = views[FST_OF_STEP];
    return 0;
}

static int check_count(const fst_module *module, const fst_factored_entry *entry,
                       const fst_view *param)
{
    fst_problem problem;
    if (fst_view_count(param) > 0)
        return 0;
    fst_problem_set(&problem, "empty", "has no elements");
    return refuse(module, entry, FST_OF_PARAM, &problem);
}

static int bind(fst_module *module, fst_factored_entry *entry, fst_factored_known *known,
                fst_factored *f)
{
    fst_view views[FST_OF_COUNT];
    if (known && fst_factored_follow(module, entry, known, f))
        return 0;
    entry->is_left = !read_views(module, entry, views);
    if (entry->is_left)
        return 0;
    const int ndim = views[FST_OF_PARAM].ndim;
    if (check_count(module, entry, views) || check_parts(module, entry, ndim) ||
        check_shape(module, entry, FST_OF_GRAD, views, -1) ||
        check_shape(module, entry, FST_OF_ROW, views, ndim > 1 ? ndim - 1 : -1) ||
        (ndim > 1 && check_shape(module, entry, FST_OF_COL, views, ndim - 2)))
        return -1;
    for (int k = FST_OF_ROW; k < FST_OF_COUNT - (ndim <= 1); k++)
        entry->is_left |= !fst_view_is_packed(&views[k]);
    for (int k = 0; k < FST_OF_COUNT - (ndim <= 1); k++)
        if (check_inference(module, entry, k))
            return -1;
    if (!entry->is_left && fill(module, entry, views, f))
        return -1;
    if (known && !entry->is_left)
        fst_factored_remember(module, entry, known, views, f);
    return 0;
}

enum { AHEAD = 4 }; /* entries between the two steps of prefetching */

static int bind_all(fst_module *module, fst_factored_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        fst_factored_known *known = i < list->known.count ? &list->known.all[i] : NULL;
        if (i + 2 * AHEAD < list->count)
            fst_factored_fetch(module, &list->entries[i + 2 * AHEAD], 0);
        if (i + AHEAD < list->count)
            fst_factored_fetch(module, &list->entries[i + AHEAD], 1);
        if (bind(module, &list->entries[i], known, &list->params[i]))
            return -1;
    }
    return 0;
}

int fst_factored_bind(fst_module *module, fst_factored_list *list)
{
    fst_tensors *tensors = &module->tensors;
    int failed = 1;
    fst_factored_take_known(module, list);
    for (int attempt = 0; attempt < FST_ATTEMPTS; attempt++) {
        tensors->ran_python = 0;
        failed = bind_all(module, list);
        if (failed || !tensors->ran_python)
            break;
    }
    fst_factored_give_known(module, list);
    return failed ? -1 : 0;
}
