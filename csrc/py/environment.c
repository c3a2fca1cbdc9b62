/* What the extension runs on: instruction set, threads, kernels, and torch's own functions and
 * records. */
#include "core/rule_args.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "gpu/context.h"
#include "py/module.h"
#include "py/torch/dtensor.h"

PyObject *fst_py_use_threads_of(PyObject *module, PyObject *path)
{
    PyObject *bytes = NULL;
    (void)module;
    if (path != Py_None && !PyUnicode_FSConverter(path, &bytes))
        return NULL;
    const int found = fst_parallel_init(bytes ? PyBytes_AsString(bytes) : NULL);
    Py_XDECREF(bytes);
    return PyBool_FromLong(found);
}

PyObject *fst_level_names(int supported_only)
{
    PyObject *names = PyList_New(0);
    const char *name;
    int supported;
    for (size_t i = 0; names && (name = fst_cpu_level(i, &supported)); i++) {
        if (supported_only && !supported)
            continue;
        PyObject *text = PyUnicode_FromString(name);
        if (!text || PyList_Append(names, text))
            Py_CLEAR(names);
        Py_XDECREF(text);
    }
    PyObject *tuple = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return tuple;
}

PyObject *fst_py_cpu_info(PyObject *module, PyObject *unused)
{
    (void)unused;
    PyObject *isa = PyObject_GetAttrString(module, "_isa");
    if (!isa)
        return NULL;
    return Py_BuildValue("{s:N,s:N,s:N,s:s}", "isa", isa, "supported", fst_level_names(1),
                         "compiled", fst_level_names(0), "threads", fst_parallel_name());
}

/* {rule: (number, states per element, names of the hyper-parameters)} */
PyObject *fst_py_rules(PyObject *module, PyObject *unused)
{
    PyObject *all = PyDict_New();
    (void)module, (void)unused;
    for (unsigned r = 0; all && r <= FST_RULE_COUNT; r++) {
        const fst_rule_entry *rule = &fst_rules[r];
        PyObject *names = PyTuple_New(rule->hyper_count);
        for (unsigned i = 0; names && i < rule->hyper_count; i++)
            PyTuple_SetItem(names, i, PyUnicode_FromString(rule->hyper[i]));
        PyObject *row = names ? Py_BuildValue("IIN", r, rule->states, names) : NULL;
        if (!row || PyDict_SetItemString(all, rule->name, row))
            Py_CLEAR(all);
        Py_XDECREF(row);
    }
    return all;
}

/* use_kernels_of(path): sets the fatbin from which a CUDA device loads its kernels at first use. */
PyObject *fst_py_use_kernels_of(PyObject *module, PyObject *path)
{
    PyObject *bytes = NULL;
    fst_status status = {0};
    if (!PyUnicode_FSConverter(path, &bytes))
        return NULL;
    fst_gpu_kernels_in_file(PyBytes_AsString(bytes), &status);
    Py_DECREF(bytes);
    if (status.code)
        return fst_raise(&status);
    fst_module_state(module)->has_kernels = 1;
    return Py_NewRef(Py_None);
}

static void use_records_of_tensors(fst_module *state, const fst_record_layout *found,
                                   uint64_t negated)
{
    state->records = *found;
    state->tensors.impl_in_object = found->at.impl_in_object;
    state->tensors.negated_in_impl = found->at.kind + 1;
    state->tensors.negated = negated;
}

/* use_records(words...): the places of fst_record_places in their order, two masks, the bits
 * that mark a version counter and a negated view, and the address of the function that moves a
 * version counter, or 0. Without arguments torch is asked about every tensor. */
PyObject *fst_py_use_records(PyObject *module, PyObject *args)
{
    fst_record_layout found = {.known = 0};
    fst_record_places *at = &found.at;
    unsigned long long masks[2], countable, negated, move;
    if (PyTuple_Size(args) == 0) {
        use_records_of_tensors(fst_module_state(module), &found, 0);
        return Py_NewRef(Py_None);
    }
    if (!PyArg_ParseTuple(args, "iiiiiiiiiiiiKKKKK", &at->impl_in_object, &at->storage_in_impl,
                          &at->data_in_storage, &at->meta_in_impl, &at->grad_in_meta,
                          &at->counter_in_impl, &at->ndim, &at->sizes, &at->strides, &at->offset,
                          &at->numel, &at->kind, &masks[0], &masks[1], &countable, &negated, &move))
        return NULL;
    const int all[] = {at->impl_in_object, at->storage_in_impl, at->data_in_storage,
                       at->meta_in_impl,   at->grad_in_meta,    at->counter_in_impl,
                       at->ndim,           at->sizes,           at->strides,
                       at->offset,         at->numel,           at->kind};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] < 0 || all[i] >= FST_RECORD_WORDS)
            return PyErr_Format(PyExc_ValueError, "no record has a word %d", all[i]);
    found.masks[0] = masks[0];
    found.masks[1] = masks[1];
    found.countable = countable;
    found.move = (fst_move_version)(uintptr_t)move;
    fst_record_init(&found);
    use_records_of_tensors(fst_module_state(module), &found, negated);
    return Py_NewRef(Py_None);
}

/* Sets a function of libtorch by its address. */
static PyObject *use_function(_Bool (**function)(void), PyObject *address)
{
    const unsigned long long found = PyLong_AsUnsignedLongLong(address);
    if (found == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    *function = (_Bool (*)(void))(uintptr_t)found;
    return Py_NewRef(Py_None);
}

PyObject *fst_py_use_callbacks(PyObject *module, PyObject *address)
{
    return use_function(&fst_module_state(module)->has_callbacks, address);
}

PyObject *fst_py_use_modes(PyObject *module, PyObject *address)
{
    return use_function(&fst_module_state(module)->tensors.has_modes, address);
}

PyObject *fst_py_use_dtensors(PyObject *module, PyObject *args)
{
    PyObject *type, *local, *spec;
    fst_tensors *tensors = &fst_module_state(module)->tensors;
    if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &type, &local, &spec))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)tensors->tensor_type)) {
        PyErr_SetString(PyExc_TypeError, "the class is not one of tensors");
        return NULL;
    }
    if (fst_dtensors_learn(tensors, (PyTypeObject *)type, local, spec))
        return NULL;
    return Py_NewRef(Py_None);
}

PyObject *fst_py_use_streams(PyObject *module, PyObject *function)
{
    fst_tensors *tensors = &fst_module_state(module)->tensors;
    if (function != Py_None && !PyCallable_Check(function)) {
        PyErr_SetString(PyExc_TypeError, "the function cannot be called");
        return NULL;
    }
    PyObject *old = tensors->stream_lasts;
    tensors->stream_lasts = function == Py_None ? NULL : Py_NewRef(function);
    Py_XDECREF(old);
    return Py_NewRef(Py_None);
}

PyObject *fst_py_is_recorded(PyObject *module, PyObject *unused)
{
    const fst_module *state = fst_module_state(module);
    (void)unused;
    return PyBool_FromLong(!state->has_callbacks || state->has_callbacks());
}

PyObject *fst_py_has_kernels(PyObject *module, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(fst_module_state(module)->has_kernels);
}

PyObject *fst_py_check_driver(PyObject *module, PyObject *unused)
{
    fst_status status = {0};
    (void)module;
    (void)unused;
    return fst_gpu_check_driver(&status) ? fst_raise(&status) : Py_NewRef(Py_None);
}

/* device_info(ordinal): makes the device ready for use, and describes it. */
PyObject *fst_py_device_info(PyObject *module, PyObject *ordinal)
{
    fst_status status = {0};
    (void)module;
    const long device = PyLong_AsLong(ordinal);
    if (device == -1 && PyErr_Occurred())
        return NULL;
    if (device < 0 || device >= FST_GPU_DEVICES)
        return PyErr_Format(PyExc_ValueError, "no CUDA device %ld", device);
    const fst_gpu_device *found = fst_gpu_device_get((int)device, &status);
    if (!found)
        return fst_raise(&status);
    return Py_BuildValue("{s:i,s:I}", "device", found->ordinal, "update_blocks",
                         (unsigned)found->grids[FST_KERNEL_UPDATE]);
}

/* (launches, uploads, uploaded bytes) since the process started. */
PyObject *fst_py_device_counts(PyObject *module, PyObject *unused)
{
    const fst_gpu_counts counts = fst_gpu_counted();
    (void)module, (void)unused;
    return Py_BuildValue("KKK", (unsigned long long)counts.launches,
                         (unsigned long long)counts.uploads,
                         (unsigned long long)counts.uploaded_bytes);
}
