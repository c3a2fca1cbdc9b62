/* The sums of squares that the last unscale_ measured, for a clip_grad_norm_ that follows. */
#include "py/grads/unscaled.h"

#include "py/torch/quiet.h"

/* Mean number of elements per gradient from which saving a pass pays for asking torch for every
 * version. */
enum { WORTHWHILE_EACH = 1 << 13 };

void fst_unscaled_forget(fst_unscaled *self)
{
    PyMem_Free(self->grads);
    PyMem_Free(self->partial);
    *self = (fst_unscaled){.count = 0};
}

/* Whether the sums can be reused. Each span must be one gradient of the list, so torch must have
 * been asked for all, as it is in long calls. No memory may occur twice. The sums must be those
 * of the stored values: 16-bit types are rounded after they are squared. */
static int is_simple(const fst_plan *plan, PyObject *grads)
{
    int64_t total = 0;
    if ((Py_ssize_t)plan->span_count != PyList_Size(grads) || plan->round_count != 1)
        return 0;
    for (size_t s = 0; s < plan->span_count; s++) {
        const fst_dtype dtype = plan->operands[s * plan->width].dtype;
        if (dtype != FST_F32 && dtype != FST_F64)
            return 0;
        total += plan->spans[s].count;
    }
    return total > FST_SHORT_STEP && total / WORTHWHILE_EACH >= (int64_t)plan->span_count;
}

static int by_address(const void *a, const void *b)
{
    const uintptr_t first = (uintptr_t)((const fst_unscaled_grad *)a)->data,
                    second = (uintptr_t)((const fst_unscaled_grad *)b)->data;
    return (first > second) - (first < second);
}

/* Describes the gradient of span s. Returns 0 if it has no version counter, as a tensor of
 * inference mode. */
static int describe(fst_tensors *tensors, const fst_plan *plan, PyObject *grads, size_t s,
                    fst_unscaled_grad *grad)
{
    PyObject *tensor = PyList_GetItem(grads, (Py_ssize_t)s);
    grad->data = plan->operands[s * plan->width].data;
    grad->count = plan->spans[s].count;
    if (tensor && !fst_tensor_version(tensors, tensor, &grad->version))
        return 1;
    PyErr_Clear();
    return 0;
}

static int describe_all(fst_tensors *tensors, const fst_unscaled *self, const fst_plan *plan,
                        PyObject *grads)
{
    for (size_t s = 0; s < plan->span_count; s++) {
        if (!describe(tensors, plan, grads, s, &self->grads[s]))
            return 0;
        self->grads[s].version++; /* the caller is about to move it */
    }
    for (size_t c = plan->chunk_count; c-- > 0;)
        self->grads[plan->chunks[c].span].first = c;
    return 1;
}

void fst_unscaled_keep(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                       PyObject *grads)
{
    const size_t size = plan->chunk_count * sizeof *plan->partial;
    fst_unscaled made = {.count = 0};
    if (is_simple(plan, grads)) {
        made = (fst_unscaled){.grads = PyMem_Calloc(plan->span_count, sizeof *made.grads),
                              .partial = PyMem_Malloc(size),
                              .count = plan->span_count};
        if (made.grads && made.partial && describe_all(tensors, &made, plan, grads)) {
            memcpy(made.partial, plan->partial, size);
            qsort(made.grads, made.count, sizeof *made.grads, by_address);
        } else {
            fst_unscaled_forget(&made);
        }
    }
    fst_unscaled_forget(self);
    *self = made;
}

/* Copies the sums of span s, whose chunks begin at c. Returns 0 if the gradient has changed. */
static int expect(fst_tensors *tensors, const fst_unscaled *self, const fst_plan *plan,
                  PyObject *grads, size_t s, size_t c, double *expected)
{
    fst_unscaled_grad now;
    if (!describe(tensors, plan, grads, s, &now))
        return 0;
    const fst_unscaled_grad *kept = bsearch(&now, self->grads, self->count, sizeof now, by_address);
    if (!kept || kept->count != now.count || kept->version != now.version)
        return 0;
    for (size_t k = 0; c + k < plan->chunk_count && plan->chunks[c + k].span == s; k++)
        expected[c + k] = self->partial[kept->first + k];
    return 1;
}

double *fst_unscaled_take(fst_tensors *tensors, fst_unscaled *self, const fst_plan *plan,
                          PyObject *grads)
{
    fst_unscaled kept = *self;
    *self = (fst_unscaled){.count = 0};
    double *expected = NULL;
    if (kept.count && is_simple(plan, grads))
        expected = PyMem_Calloc(plan->chunk_count, sizeof *expected);
    int known = expected != NULL;
    for (size_t c = 0; known && c < plan->chunk_count; c++)
        if (plan->chunks[c].begin == 0)
            known = expect(tensors, &kept, plan, grads, plan->chunks[c].span, c, expected);
    fst_unscaled_forget(&kept);
    if (known)
        return expected;
    PyMem_Free(expected);
    return NULL;
}
