/* Recognizes DTensors: the same objects with the same local tensors. */
#include "py/step/trace.h"

#include "py/torch/dtensor.h"
#include "py/torch/tensor_record_read.h"

static fst_traced_dtensors *traced(const fst_step_plan *self, const fst_trace *trace)
{
    return &self->traced_dtensors[trace - self->traces];
}

/* Makes room for as many parameters as there are traces. */
static int reserve(fst_step_plan *self)
{
    if (self->traced_dtensors && self->traced_dtensor_capacity >= self->param_count)
        return 1;
    PyMem_Free(self->traced_dtensors);
    self->traced_dtensors = PyMem_Calloc(self->param_count + 1, sizeof *self->traced_dtensors);
    self->traced_dtensor_capacity = self->traced_dtensors ? self->param_count : 0;
    return self->traced_dtensors != NULL;
}

void fst_trace_dtensor(const fst_record_layout *layout, fst_step_plan *self, fst_trace *trace,
                       size_t index, PyObject *object)
{
    self->traceable = self->traceable && reserve(self);
    if (!self->traceable)
        return;
    trace->is_dtensor = 1;
    trace->type = Py_TYPE(object);
    self->traced_dtensors[index] = (fst_traced_dtensors){
        .object = object,
        .impl = fst_record_of(layout, object),
    };
}

void fst_trace_dtensor_state(const fst_record_layout *layout, fst_step_plan *self,
                             const fst_trace *trace, unsigned k, PyObject *object)
{
    if (!trace->is_dtensor) {
        self->traceable = 0; /* a state of a plain parameter */
        return;
    }
    traced(self, trace)->states[k].object = object;
    traced(self, trace)->states[k].impl = fst_record_of(layout, object);
}

void fst_trace_fetch_dtensors(const fst_step_plan *self, const fst_trace *trace, unsigned key_count)
{
    const fst_traced_dtensors *was = traced(self, trace);
    __builtin_prefetch(was->object);
    __builtin_prefetch(was->impl);
    for (unsigned k = 0; k < key_count; k++)
        if (was->states[k].object)
            __builtin_prefetch(was->states[k].object);
}

/* The local tensor of a DTensor, which keeps it alive; NULL where that fails. */
static PyObject *local_of(const fst_module *module, PyObject *object)
{
    PyObject *local = fst_dtensor_local(&module->tensors, object);
    Py_XDECREF(local);
    if (!local)
        PyErr_Clear();
    return local;
}

int fst_trace_same_dtensor(fst_module *module, const fst_step_plan *self, const fst_trace *trace,
                           PyObject **object, PyObject **grad)
{
    const fst_traced_dtensors *was = traced(self, trace);
    PyObject *whole = *object;
    if (whole != was->object || !fst_tensor_is_dtensor(&module->tensors, whole) ||
        fst_record_of(&module->records, whole) != was->impl)
        return 0;
    PyObject *whole_grad = fst_tensor_grad(&module->tensors, whole);
    if (whole_grad && module->tensors.ran_python) { /* nothing that was found need live any more */
        Py_DECREF(whole_grad);
        return 0;
    }
    const int settled =
        whole_grad ? fst_step_is_settled(&module->tensors, self, (size_t)(trace - self->traces),
                                         whole, whole_grad, FST_SETTLED_GRAD)
                   : -1;
    *object = settled > 0 ? local_of(module, whole) : NULL;
    *grad = settled > 0 ? local_of(module, whole_grad) : NULL;
    Py_XDECREF(whole_grad); /* the parameter keeps it */
    if (settled < 0)
        PyErr_Clear();
    return *object && *grad && fst_tensor_is_plain(&module->tensors, *grad);
}

PyObject *fst_trace_same_state(const fst_module *module, const fst_step_plan *self,
                               const fst_trace *trace, unsigned k, PyObject *object)
{
    const fst_traced_dtensors *was = traced(self, trace);
    if (!was->states[k].object)
        return object;
    if (object != was->states[k].object || !fst_tensor_is_dtensor(&module->tensors, object) ||
        fst_record_of(&module->records, object) != was->states[k].impl)
        return NULL;
    return local_of(module, object);
}
