/* What a step plan remembers of one parameter, and the small states that it keeps alive. */
#include "py/step/param.h"

#include "core/layout.h"
#include "py/torch/arrays.h"

enum {
    PIN_BYTES = 16384
}; /* larger states are not kept alive: a user who drops one wants the memory back at once */

static void fetch_record(const void *object, const void *shape)
{
    const char *record = shape;
    if (!record)
        return;
    __builtin_prefetch(object);
    __builtin_prefetch(record - 64);
    __builtin_prefetch(record);
    __builtin_prefetch(record + 64);
}

void fst_param_fetch(const fst_param *param)
{
    fetch_record(param->param, param->record);
    fetch_record(param->grad, param->grad_record);
    __builtin_prefetch(param->dict);
    for (unsigned k = 0; k < FST_MAX_KEYS; k++)
        fetch_record(param->states[k].object, param->states[k].record);
}

/* Puts a pin on the list of old pins. Without memory for the list the tensor stays alive for
 * ever: it must not be freed here. */
static void give_up(fst_dl_managed *pin, fst_old_pins *old)
{
    if (!pin)
        return;
    if (old->count == old->capacity &&
        fst_array_double(&old->pins, &old->capacity, sizeof *old->pins))
        return;
    old->pins[old->count++] = pin;
}

void fst_old_pins_free(fst_old_pins *old)
{
    fst_old_pins pins = *old;
    *old = (fst_old_pins){.count = 0}; /* Python code may come here again */
    for (size_t i = 0; i < pins.count; i++)
        fst_tensor_unpin(pins.pins[i]);
    PyMem_Free(pins.pins);
}

/* Whether pinning the tensor pays: it is small, and exporting it runs no Python code. torch
 * first views a tensor of one number with another stride, by its dispatcher. */
static int is_worth_a_pin(const fst_param *param, const fst_view *view)
{
    const int strided = view->ndim == 1 && view->shape[0] == 1 && view->strides[0] != 1;
    return !strided && (size_t)param->count * fst_dtype_size(view->dtype) <= PIN_BYTES;
}

void fst_param_note_state(fst_tensors *tensors, fst_param *param, fst_old_pins *old, unsigned k,
                          PyObject *object, const fst_view *view)
{
    if (param->states[k].object != object) {
        give_up(param->states[k].pin, old);
        param->states[k].pin = NULL;
        if (is_worth_a_pin(param, view))
            param->states[k].pin = fst_tensor_pin(tensors, object);
    }
    param->states[k].object = object;
    param->states[k].record = view->shape;
}

void fst_param_forget(fst_param *param, fst_old_pins *old)
{
    for (unsigned k = 0; k < FST_MAX_KEYS; k++)
        give_up(param->states[k].pin, old);
    PyMem_Free(param->geometry);
    PyMem_Free(param->order);
    *param = (fst_param){.param = NULL};
}

/* A loop, not memcmp(): it is faster for two or three numbers. */
static int same_numbers(const int64_t *a, const int64_t *b, int count)
{
    for (int i = 0; i < count; i++)
        if (a[i] != b[i])
            return 0;
    return 1;
}

int fst_param_has_shape(const fst_param *param, const fst_view *view)
{
    return param->ndim == view->ndim && param->geometry &&
           same_numbers(param->geometry, view->shape, view->ndim);
}

int fst_param_fits(const fst_param *param, const fst_view *view)
{
    return fst_param_has_shape(param, view) &&
           same_numbers(param->geometry + view->ndim, view->strides, view->ndim);
}

int fst_param_is_packed_in(const fst_param *param, const fst_view *view)
{
    return param->flat && !view->negated && fst_param_fits(param, view);
}

int fst_param_learn(fst_param *param, fst_old_pins *old, PyObject *object, const fst_view *view,
                    int in_shape_order, fst_problem *problem)
{
    const size_t ndim = (size_t)view->ndim;
    const int64_t count = fst_view_count(view);
    fst_view plain = *view;
    fst_layout *layout = NULL;
    const unsigned dtensors = param->dtensors;
    fst_param_forget(param, old);
    param->dtensors = dtensors; /* of this bind */
    param->geometry = PyMem_Malloc((2 * ndim + 1) * sizeof *param->geometry);
    param->order = PyMem_Malloc((ndim + 1) * sizeof *param->order);
    if (!param->geometry || !param->order) {
        fst_param_forget(param, old);
        return fst_problem_set(problem, "storage", "cannot be described for lack of memory");
    }
    memcpy(param->geometry, view->shape, ndim * sizeof *param->geometry);
    memcpy(param->geometry + ndim, view->strides, ndim * sizeof *param->geometry);
    param->ndim = view->ndim;
    param->count = count;
    if (!in_shape_order)
        param->order_count = fst_layout_order(view->ndim, view->shape, view->strides, param->order);
    for (int d = 0; in_shape_order && d < view->ndim; d++)
        if (view->shape[d] != 1)
            param->order[param->order_count++] = d;
    plain.negated = 0;
    if (count > 0 && fst_view_layout(&plain, param->order_count, param->order, 1, &layout, problem))
        return -1;
    param->flat = !layout;
    PyMem_Free(layout);
    param->param = object;
    return 0;
}
