/* The type faststep._C.OffloadPipe: threads that copy gradients to the host, update parameters
 * there and copy them back. */
#include <math.h>

#include "py/step/offload_views.h"
#include "py/step/step_plan.h"

#define SLOWEST 1e4 /* bytes per second of a simulated link */

typedef struct {
    PyObject_HEAD
    fst_offload *offload;
    PyObject *params; /* tuples of views of what set() was given */
    PyObject *grads;  /* that are copied in: a list of (parameter, view) */
    Py_ssize_t count;
    int calls;   /* that run, and may have released the GIL or run Python code */
    int setting; /* set() runs: it waits until no other call does */
} offload_object;

fst_offload *fst_offload_of(PyObject *object)
{
    return ((offload_object *)object)->offload;
}

int fst_offload_check_process(PyObject *object)
{
    if (fst_engines_are_here(fst_offload_engines(fst_offload_of(object))))
        return 0;
    PyErr_SetString(
        PyExc_RuntimeError,
        "this optimizer was offloaded before a fork, and its threads are in the parent: "
        "offload it in the process that trains");
    return -1;
}

PyObject *fst_step_offload(PyObject *object, PyObject *offload)
{
    fst_step_plan *self = (fst_step_plan *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    if (!PyObject_TypeCheck(offload, module->types[FST_OFFLOAD]) || self->busy) {
        PyErr_SetString(PyExc_TypeError, "expected an OffloadPipe, and no step that runs");
        return NULL;
    }
    PyObject *before = self->offload;
    self->offload = Py_NewRef(offload);
    Py_XDECREF(before);
    return Py_NewRef(Py_None);
}

/* Begins a call that needs the parameters as they are; end_call() ends it. Returns 0, or -1 with a
 * RuntimeError. */
static int begin_call(offload_object *self)
{
    if (fst_offload_check_process((PyObject *)self))
        return -1;
    if (self->setting) {
        PyErr_SetString(PyExc_RuntimeError, "the parameters of this OffloadPipe are being set");
        return -1;
    }
    self->calls++;
    return 0;
}

static PyObject *end_call(offload_object *self, PyObject *result)
{
    self->calls--;
    return result;
}

static PyObject *offload_set(PyObject *object, PyObject *args)
{
    offload_object *self = (offload_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    fst_status status = {0};
    fst_offload_home home = {0};
    PyObject *list;
    int device = FST_HOST;
    Py_ssize_t stream = 0; /* its address */
    if (!PyArg_ParseTuple(args, "O|in", &list, &device, &stream) ||
        fst_offload_check_process(object))
        return NULL;
    home.stream = (void *)stream;
    if (device != FST_HOST && !(home.gpu = fst_gpu_context_get(device, &status)))
        return fst_raise(&status);
    PyObject *tuples = fst_offload_views(list);
    if (!tuples)
        return NULL;
    if (self->setting || self->calls) {
        Py_DECREF(tuples);
        PyErr_SetString(PyExc_RuntimeError, "another call of this OffloadPipe runs");
        return NULL;
    }
    self->setting = 1;
    const Py_ssize_t count = PyTuple_Size(tuples);
    fst_offload_param *params = PyMem_Calloc((size_t)count + 1, sizeof *params);
    int failed = !params;
    if (!params)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = fst_offload_read(module, PyTuple_GetItem(tuples, i), device, &params[i]);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        fst_engines_begin(fst_offload_engines(self->offload));
        Py_END_ALLOW_THREADS
        /* with the GIL, under which steps look for the parameters */
        fst_offload_set(self->offload, params, (size_t)count, home, &status);
        self->count = status.code ? 0 : count;
    }
    PyMem_Free(params);
    self->setting = 0;
    if (!failed) {
        PyObject *before = self->params;
        self->params = Py_NewRef(tuples);
        Py_XDECREF(before);
    }
    Py_DECREF(tuples);
    if (failed)
        return NULL;
    return status.code ? fst_raise(&status) : Py_NewRef(Py_None);
}

/* The number of a parameter, checked; -1 with an IndexError. */
static Py_ssize_t number_of(const offload_object *self, Py_ssize_t index)
{
    if (index >= 0 && index < self->count)
        return index;
    PyErr_SetString(PyExc_IndexError, "no such offloaded parameter");
    return -1;
}

/* Drops the first gradients of the list that were copied. Returns 0, or -1 with a Python error. */
static int drop_copied(offload_object *self)
{
    const Py_ssize_t count = PyList_Size(self->grads);
    Py_ssize_t copied = 0;
    uint32_t first, last;
    for (; copied < count; copied++) {
        PyObject *number = PyTuple_GetItem(PyList_GetItem(self->grads, copied), 0);
        const size_t param = PyLong_AsSize_t(number);
        if (param < (size_t)self->count) {
            fst_offload_tiles(self->offload, param, &first, &last);
            if (!fst_engines_copied(fst_offload_engines(self->offload), first, last))
                break;
        }
    }
    return copied ? PyList_SetSlice(self->grads, 0, copied, NULL) : 0;
}

/* The memory of a gradient on the host; NULL with a Python error. */
static void *memory_of(fst_module *module, offload_object *self, Py_ssize_t index, PyObject *grad)
{
    fst_view view, host;
    fst_problem problem = {.kind = NULL};
    PyObject *copy = PyTuple_GetItem(PyTuple_GetItem(self->params, index), 2);
    if (fst_tensor_view(&module->tensors, copy, &host, &problem) ||
        fst_tensor_view(&module->tensors, grad, &view, &problem) ||
        fst_view_is_on(&view, FST_HOST, &problem)) {
        PyErr_Format(PyExc_TypeError, "the gradient %s", problem.detail);
        return NULL;
    }
    if (view.dtype != host.dtype || fst_view_count(&view) != fst_view_count(&host) || !view.data ||
        !fst_offload_has_no_gaps(&view)) {
        PyErr_SetString(PyExc_TypeError, "the gradient does not fit its copy");
        return NULL;
    }
    return view.data;
}

/* The handle of a torch.cuda.Event that was recorded; NULL with a Python error. */
static void *handle_of(PyObject *event)
{
    PyObject *number = PyObject_GetAttrString(event, "cuda_event");
    void *handle = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (!handle && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the event was not recorded");
    return handle;
}

/* Takes a gradient by way of a view, or of the event behind its copy. */
static PyObject *arrive(offload_object *self, Py_ssize_t index, PyObject *kept, void *source,
                        double factor)
{
    uint32_t first, last;
    fst_offload_tiles(self->offload, (size_t)index, &first, &last);
    PyObject *held = Py_BuildValue("nO", index, kept);
    if (!held)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_engines_wait(fst_offload_engines(self->offload), first, last);
    Py_END_ALLOW_THREADS
    const int failed = drop_copied(self) || PyList_Append(self->grads, held);
    Py_DECREF(held);
    if (failed)
        return NULL;
    /* with the GIL: no other thread drops the gradient before */
    return PyBool_FromLong(fst_offload_arrive(self->offload, (size_t)index, source, factor));
}

static PyObject *offload_arrive(PyObject *object, PyObject *args)
{
    offload_object *self = (offload_object *)object;
    fst_module *module = PyType_GetModuleState(Py_TYPE(object));
    Py_ssize_t index;
    PyObject *grad, *result = NULL;
    double factor;
    if (!PyArg_ParseTuple(args, "nOd", &index, &grad, &factor) || begin_call(self))
        return NULL;
    const int is_event = fst_offload_home_of(self->offload).gpu != NULL;
    PyObject *kept = is_event ? Py_NewRef(grad) : fst_offload_view(grad);
    if (kept && number_of(self, index) >= 0) {
        void *source = is_event ? handle_of(kept) : memory_of(module, self, index, kept);
        result = source ? arrive(self, index, kept, source, factor) : NULL;
    }
    Py_XDECREF(kept);
    return end_call(self, result);
}

static PyObject *offload_settle(PyObject *object, PyObject *unused)
{
    offload_object *self = (offload_object *)object;
    fst_pass_state state;
    (void)unused;
    if (begin_call(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    state = fst_engines_settle(fst_offload_engines(self->offload));
    Py_END_ALLOW_THREADS
    return end_call(self, drop_copied(self) ? NULL : PyLong_FromLong(state));
}

static PyObject *offload_wait(PyObject *object, PyObject *args)
{
    offload_object *self = (offload_object *)object;
    fst_pass_state state;
    Py_ssize_t index = -1;
    uint32_t first = 0, last = 0;
    if (!PyArg_ParseTuple(args, "|n", &index) || (index != -1 && number_of(self, index) < 0) ||
        begin_call(self))
        return NULL;
    const Py_ssize_t begin = index < 0 ? 0 : index, end = index < 0 ? self->count : index + 1;
    Py_BEGIN_ALLOW_THREADS
    state = fst_engines_wait(fst_offload_engines(self->offload), 0, 0);
    for (Py_ssize_t i = begin; i < end; i++) {
        fst_offload_tiles(self->offload, (size_t)i, &first, &last);
        state = fst_engines_wait(fst_offload_engines(self->offload), first, last);
    }
    Py_END_ALLOW_THREADS
    return end_call(self, PyLong_FromLong(state));
}

static PyObject *offload_begin(PyObject *object, PyObject *unused)
{
    offload_object *self = (offload_object *)object;
    (void)unused;
    if (begin_call(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fst_engines_begin(fst_offload_engines(self->offload));
    Py_END_ALLOW_THREADS
    return end_call(self, Py_NewRef(Py_None));
}

static PyObject *offload_pace(PyObject *object, PyObject *args)
{
    double in, out;
    if (!PyArg_ParseTuple(args, "dd", &in, &out) || fst_offload_check_process(object))
        return NULL;
    if ((in != 0.0 && !(in >= SLOWEST)) || (out != 0.0 && !(out >= SLOWEST))) {
        PyErr_SetString(PyExc_ValueError, "expected 0, or at least 10000 bytes per second");
        return NULL;
    }
    fst_offload_pace(fst_offload_of(object), in, out);
    return Py_NewRef(Py_None);
}

static PyObject *offload_busy(PyObject *object, PyObject *unused)
{
    uint64_t busy[FST_ENGINES];
    (void)unused;
    if (fst_offload_check_process(object))
        return NULL;
    fst_engines_busy(fst_offload_engines(fst_offload_of(object)), busy);
    return Py_BuildValue("ddd", (double)busy[FST_ENGINE_IN] * 1e-9,
                         (double)busy[FST_ENGINE_UPDATE] * 1e-9,
                         (double)busy[FST_ENGINE_OUT] * 1e-9);
}

static PyObject *offload_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned threads;
    long long tile;
    fst_status status = {0};
    if (!PyArg_ParseTuple(args, "IL", &threads, &tile))
        return NULL;
    if (threads < 1 || threads > 256 || tile < 1 || tile > INT64_MAX - FST_CHUNK) {
        PyErr_SetString(PyExc_ValueError, "expected from 1 to 256 threads, and a positive tile");
        return NULL;
    }
    offload_object *self = fst_object_new(type, kwargs);
    if (!self)
        return NULL;
    self->grads = PyList_New(0);
    self->offload = self->grads ? fst_offload_new(threads, tile, &status) : NULL;
    if (!self->offload) {
        if (status.code)
            fst_raise(&status);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Not `params` and `grads`: the collector would clear those of an object that it frees, and threads
 * still read them. Nobody else has these views, so that no cycle goes through them. */
static int offload_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    return 0;
}

/* The threads read what it has: nothing is dropped before they have ended. */
static void offload_dealloc(PyObject *object)
{
    offload_object *self = (offload_object *)object;
    PyObject_GC_UnTrack(object);
    Py_BEGIN_ALLOW_THREADS
    fst_offload_free(self->offload);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->params);
    Py_XDECREF(self->grads);
    fst_object_free(object);
}

static PyMethodDef offload_methods[] = {
    {"arrive", offload_arrive, METH_VARARGS,
     FST_DOC("arrive($self, index, grad, factor, /)",
             "Copy a gradient to the host, and sum its squares times factor unless that is NaN. "
             "On a CUDA device the caller copies, and passes the event behind that. "
             "False if an earlier step could not return the parameter.")},
    {"begin", offload_begin, METH_NOARGS,
     FST_DOC("begin($self, /)", "Forget the gradients that were copied, once nothing moves.")},
    {"busy", offload_busy, METH_NOARGS,
     FST_DOC("busy($self, /)", "The seconds that copies in, updates and copies out have taken.")},
    {"pace", offload_pace, METH_VARARGS,
     FST_DOC("pace($self, bytes_in, bytes_out, /)",
             "Let copies take as long as over links of so many bytes per second; 0 is no limit.")},
    {"set", offload_set, METH_VARARGS,
     FST_DOC(
         "set($self, params, device=-1, stream=0, /)",
         "Set the parameters: tuples of the parameter, its copy, that of its gradient, and room "
         "for the sums of chunks. More tensors are kept. Parameters on a CUDA device are copied "
         "back by a stream of it.")},
    {"settle", offload_settle, METH_NOARGS,
     FST_DOC("settle($self, /)", "Wait for the gradients. Returns the state of the pass.")},
    {"wait", offload_wait, METH_VARARGS,
     FST_DOC("wait($self, index=-1, /)",
             "Wait until a parameter is back, or all are. Returns the state of the pass.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot offload_slots[] = {
    {Py_tp_doc, FST_DOC("OffloadPipe(threads, tile, /)",
                        "Threads that update parameters in host memory, tile by tile.")},
    {Py_tp_new, offload_new},
    {Py_tp_dealloc, offload_dealloc},
    {Py_tp_traverse, offload_traverse},
    {Py_tp_methods, offload_methods},
    {0, NULL},
};

PyType_Spec fst_offload_spec = {
    .name = "faststep._C.OffloadPipe",
    .basicsize = sizeof(offload_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = offload_slots,
};
