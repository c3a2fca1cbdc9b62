/* The extension module faststep._C: its method table and its state. */
#include "py/module.h"

#include <stdlib.h>

#include "cpu/kernels.h"
#include "io/table.h"
#include "py/grads/unscaled.h"

static PyMethodDef methods[] = {
#define FUNCTION(name, how, params, text) \
    {#name, fst_py_##name, how, FST_DOC(#name "($module, " params ")", text)},
#include "py/functions.def"
#undef FUNCTION
    {"hyper", (PyCFunction)(void (*)(void))fst_py_hyper, METH_FASTCALL,
     FST_DOC("hyper($module, group, places, /)",
             "The numbers at places in a parameter group, as floats. A place is a key, or a key "
             "and an index.")},
    {NULL, NULL, 0, NULL},
};

/* Chooses the instruction set: the best one, or that of FASTSTEP_CPU. */
static int choose_kernels(PyObject *module)
{
    const char *forced = getenv("FASTSTEP_CPU");
    if (forced && !*forced)
        forced = NULL;
    const fst_cpu_kernels *chosen = fst_cpu_select(forced);
    if (!chosen) {
        PyObject *names = fst_level_names(1);
        PyErr_Format(PyExc_ImportError, "FASTSTEP_CPU=%s: this machine and build run %R", forced,
                     names);
        Py_XDECREF(names);
        return -1;
    }
    fst_cpu = chosen;
    fst_table_use(chosen->widen);
    return PyModule_AddStringConstant(module, "_isa", chosen->name);
}

static int add_types(PyObject *module, PyTypeObject **types)
{
    static PyType_Spec *const specs[FST_TYPES] = {
        &fst_slots_spec,   &fst_gather_spec,    &fst_batch_spec,        &fst_arena_spec,
        &fst_offload_spec, &fst_step_plan_spec, &fst_release_hook_spec,
    };
    int failed = 0;
    for (int i = 0; !failed && i < FST_TYPES; i++) {
        types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(module, specs[i], NULL);
        failed = !types[i] || PyModule_AddType(module, types[i]);
    }
    return failed ? -1 : 0;
}

static int add_tensor_error(PyObject *module, fst_module *state)
{
    state->tensor_error = PyErr_NewExceptionWithDoc(
        "faststep._C.TensorError",
        "A tensor cannot be used. The arguments are (group, index, role, kind, detail).",
        PyExc_TypeError, NULL);
    return state->tensor_error ? PyModule_AddObjectRef(module, "TensorError", state->tensor_error)
                               : -1;
}

static int intern_names(fst_names *names)
{
    names->grad = PyUnicode_InternFromString("grad");
    names->state = PyUnicode_InternFromString("state");
    names->max_grad_norm = PyUnicode_InternFromString("_max_grad_norm");
    return names->grad && names->state && names->max_grad_norm ? 0 : -1;
}

static int module_exec(PyObject *module)
{
    fst_module *state = fst_module_state(module);
    if (choose_kernels(module) || intern_names(&state->names) ||
        fst_tensors_init(&state->tensors) || add_tensor_error(module, state))
        return -1;
    return add_types(module, state->types);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    fst_module *state = fst_module_state(module);
    for (int i = 0; i < FST_TYPES; i++)
        Py_VISIT(state->types[i]);
    Py_VISIT(state->tensor_error);
    return fst_tensors_traverse(&state->tensors, visit, arg);
}

static int module_clear(PyObject *module)
{
    fst_module *state = fst_module_state(module);
    fst_tensors_clear(&state->tensors);
    for (int i = 0; i < FST_TYPES; i++)
        Py_CLEAR(state->types[i]);
    Py_CLEAR(state->tensor_error);
    Py_CLEAR(state->names.grad);
    Py_CLEAR(state->names.state);
    Py_CLEAR(state->names.max_grad_norm);
    return 0;
}

static void module_free(void *module)
{
    fst_module *state = fst_module_state(module);
    module_clear(module);
    fst_unscaled_forget(&state->unscaled);
    for (int i = 0; i < FST_GPU_DEVICES; i++)
        fst_gpu_tables_free(state->list_tables[i]);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,         .m_name = "faststep._C", .m_doc = "The core of faststep, in C.",
    .m_size = sizeof(fst_module),  .m_methods = methods,    .m_slots = slots,
    .m_traverse = module_traverse, .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
