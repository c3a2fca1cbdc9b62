#include "py/step/offload_views.h"

#include "core/layout.h"

int fst_offload_has_no_gaps(const fst_view *view)
{
    int order[FST_MAX_DIMS];
    fst_layout unused;
    const int kept = fst_layout_order(view->ndim, view->shape, view->strides, order);
    return !view->negated && fst_view_count(view) > 0 &&
           fst_layout_describe(kept, order, view->shape, view->strides, &unused);
}

PyObject *fst_offload_view(PyObject *tensor)
{
    return PyObject_CallMethod(tensor, "detach", NULL);
}

/* Views of the tensors in a tuple; NULL with a Python error. */
static PyObject *views_of(PyObject *tuple)
{
    const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    if (count < 4) {
        PyErr_SetString(PyExc_TypeError, "expected tuples of at least four tensors");
        return NULL;
    }
    PyObject *views = PyTuple_New(count);
    for (Py_ssize_t k = 0; views && k < count; k++) {
        PyObject *view = fst_offload_view(PyTuple_GetItem(tuple, k));
        if (!view || PyTuple_SetItem(views, k, view))
            Py_CLEAR(views);
    }
    return views;
}

PyObject *fst_offload_views(PyObject *sequence)
{
    PyObject *tuples = PySequence_Tuple(sequence);
    const Py_ssize_t count = tuples ? PyTuple_Size(tuples) : 0;
    PyObject *all = tuples ? PyTuple_New(count) : NULL;
    for (Py_ssize_t i = 0; all && i < count; i++) {
        PyObject *views = views_of(PyTuple_GetItem(tuples, i));
        if (!views || PyTuple_SetItem(all, i, views))
            Py_CLEAR(all);
    }
    Py_XDECREF(tuples);
    return all;
}

int fst_offload_read(fst_module *module, PyObject *tuple, int device, fst_offload_param *param)
{
    fst_view views[4];
    fst_problem problem = {.kind = NULL};
    PyObject *tensors[4];
    unsigned which = 0;
    for (int k = 0; k < 4; k++)
        tensors[k] = PyTuple_GetItem(tuple, k);
    int bad = fst_tensor_views(&module->tensors, tensors, 4, views, &which, &problem);
    for (unsigned k = 0; !bad && k < 4; k++) {
        which = k;
        bad = fst_view_is_on(&views[k], k ? FST_HOST : device, &problem);
        if (!bad && !fst_offload_has_no_gaps(&views[k]))
            bad = fst_problem_set(&problem, "shape", "has gaps between its elements, or none");
    }
    if (bad) {
        PyErr_Format(PyExc_TypeError, "tensor %u of an offloaded parameter %s", which,
                     problem.detail);
        return -1;
    }
    const int64_t count = fst_view_count(&views[0]), chunks = (count + FST_CHUNK - 1) / FST_CHUNK;
    if (count < 1 || fst_view_count(&views[1]) != count || fst_view_count(&views[2]) != count ||
        views[0].dtype != views[1].dtype || views[3].dtype != FST_F64 ||
        fst_view_count(&views[3]) < chunks || !fst_view_is_packed(&views[3])) {
        PyErr_SetString(PyExc_TypeError, "the tensors of an offloaded parameter do not fit");
        return -1;
    }
    *param = (fst_offload_param){views[0].data, views[1].data,  views[2].data, views[3].data,
                                 count,         views[0].dtype, views[2].dtype};
    return 0;
}
