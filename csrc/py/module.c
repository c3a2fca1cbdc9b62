/* The extension module faststep._C: its method table and its state. */
#include "py/module.h"

#include <stdlib.h>

#include "core/factored_step.h"
#include "core/image_pass.h"
#include "core/passes.h"
#include "io/table.h"
#include "py/docs.h"
#include "py/grads/unscaled.h"

static PyMethodDef methods[] = {
    {"accumulate", fst_py_accumulate, METH_VARARGS, FST_DOC_ACCUMULATE},
    {"chunk_squares", fst_py_chunk_squares, METH_VARARGS, FST_DOC_CHUNK_SQUARES},
    {"clamp", fst_py_clamp, METH_VARARGS, FST_DOC_CLAMP},
    {"collect_grads", fst_py_collect_grads, METH_O, FST_DOC_COLLECT_GRADS},
    {"copy_indices", fst_py_copy_indices, METH_VARARGS, FST_DOC_COPY_INDICES},
    {"cpu_info", fst_py_cpu_info, METH_NOARGS, FST_DOC_CPU_INFO},
    {"crc32c", fst_py_crc32c, METH_O, FST_DOC_CRC32C},
    {"device_accumulate", fst_py_device_accumulate, METH_VARARGS, FST_DOC_DEVICE_ACCUMULATE},
    {"device_chunk_squares", fst_py_device_chunk_squares, METH_VARARGS,
     FST_DOC_DEVICE_CHUNK_SQUARES},
    {"device_clamp", fst_py_device_clamp, METH_VARARGS, FST_DOC_DEVICE_CLAMP},
    {"device_clip", fst_py_device_clip, METH_VARARGS, FST_DOC_DEVICE_CLIP},
    {"device_counts", fst_py_device_counts, METH_NOARGS, FST_DOC_DEVICE_COUNTS},
    {"device_fold_squares", fst_py_device_fold_squares, METH_VARARGS, FST_DOC_DEVICE_FOLD_SQUARES},
    {"device_info", fst_py_device_info, METH_O, FST_DOC_DEVICE_INFO},
    {"device_norm", fst_py_device_norm, METH_VARARGS, FST_DOC_DEVICE_NORM},
    {"device_unscale", fst_py_device_unscale, METH_VARARGS, FST_DOC_DEVICE_UNSCALE},
    {"end_retaining", fst_py_end_retaining, METH_NOARGS, FST_DOC_END_RETAINING},
    {"fold_squares", fst_py_fold_squares, METH_O, FST_DOC_FOLD_SQUARES},
    {"foreign_allocator", fst_py_foreign_allocator, METH_NOARGS, FST_DOC_FOREIGN_ALLOCATOR},
    {"fusable", fst_py_fusable, METH_VARARGS, FST_DOC_FUSABLE},
    {"has_kernels", fst_py_has_kernels, METH_NOARGS, FST_DOC_HAS_KERNELS},
    {"hold", fst_py_hold, METH_VARARGS, FST_DOC_HOLD},
    {"holds", fst_py_holds, METH_NOARGS, FST_DOC_HOLDS},
    {"hyper", (PyCFunction)(void (*)(void))fst_py_hyper, METH_FASTCALL, FST_DOC_HYPER},
    {"is_built_in", fst_py_is_built_in, METH_O, FST_DOC_IS_BUILT_IN},
    {"is_recorded", fst_py_is_recorded, METH_NOARGS, FST_DOC_IS_RECORDED},
    {"keep_freed_memory", fst_py_keep_freed_memory, METH_NOARGS, FST_DOC_KEEP_FREED_MEMORY},
    {"keep_locked_memory", fst_py_keep_locked_memory, METH_O, FST_DOC_KEEP_LOCKED_MEMORY},
    {"measure", fst_py_measure, METH_VARARGS, FST_DOC_MEASURE},
    {"clip_grads", fst_py_clip_grads, METH_VARARGS, FST_DOC_CLIP_GRADS},
    {"unscale_grads", fst_py_unscale_grads, METH_VARARGS, FST_DOC_UNSCALE_GRADS},
    {"norm", fst_py_norm, METH_VARARGS, FST_DOC_NORM},
    {"permute", fst_py_permute, METH_VARARGS, FST_DOC_PERMUTE},
    {"release_memory", fst_py_release_memory, METH_NOARGS, FST_DOC_RELEASE_MEMORY},
    {"retain_memory", fst_py_retain_memory, METH_VARARGS, FST_DOC_RETAIN_MEMORY},
    {"retained_memory", fst_py_retained_memory, METH_NOARGS, FST_DOC_RETAINED_MEMORY},
    {"rules", fst_py_rules, METH_NOARGS, FST_DOC_RULES},
    {"scale", fst_py_scale, METH_VARARGS, FST_DOC_SCALE},
    {"scan_tfrecords", fst_py_scan_tfrecords, METH_VARARGS, FST_DOC_SCAN_TFRECORDS},
    {"transform_images", fst_py_transform_images, METH_VARARGS, FST_DOC_TRANSFORM_IMAGES},
    {"split_channels", fst_py_split_channels, METH_VARARGS, FST_DOC_SPLIT_CHANNELS},
    {"update_scale", fst_py_update_scale, METH_VARARGS, FST_DOC_UPDATE_SCALE},
    {"use_callbacks", fst_py_use_callbacks, METH_O, FST_DOC_USE_CALLBACKS},
    {"use_dtensors", fst_py_use_dtensors, METH_VARARGS, FST_DOC_USE_DTENSORS},
    {"use_kernels_of", fst_py_use_kernels_of, METH_O, FST_DOC_USE_KERNELS_OF},
    {"use_modes", fst_py_use_modes, METH_O, FST_DOC_USE_MODES},
    {"use_owners", fst_py_use_owners, METH_VARARGS, FST_DOC_USE_OWNERS},
    {"use_records", fst_py_use_records, METH_VARARGS, FST_DOC_USE_RECORDS},
    {"use_streams", fst_py_use_streams, METH_O, FST_DOC_USE_STREAMS},
    {"use_threads_of", fst_py_use_threads_of, METH_O, FST_DOC_USE_THREADS_OF},
    {NULL, NULL, 0, NULL},
};

/* Chooses the instruction set: the best one, or that of FASTSTEP_CPU. */
static int choose_kernels(PyObject *module)
{
    const char *forced = getenv("FASTSTEP_CPU");
    if (forced && !*forced)
        forced = NULL;
    const fst_cpu_kernels *kernels = fst_cpu_select(forced);
    if (!kernels) {
        PyObject *names = fst_level_names(1);
        PyErr_Format(PyExc_ImportError, "FASTSTEP_CPU=%s: this machine and build run %R", forced,
                     names);
        Py_XDECREF(names);
        return -1;
    }
    fst_passes_use(kernels);
    fst_factored_use(kernels);
    fst_image_use(kernels);
    fst_table_use(kernels->widen);
    return PyModule_AddStringConstant(module, "_isa", kernels->name);
}

/* The types of the loader. */
static int add_loader(PyObject *module, fst_module *state)
{
    state->slots_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fst_slots_spec, NULL);
    if (!state->slots_type || PyModule_AddType(module, state->slots_type))
        return -1;
    state->gather_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fst_gather_spec, NULL);
    if (!state->gather_type || PyModule_AddType(module, state->gather_type))
        return -1;
    state->arena_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fst_arena_spec, NULL);
    return state->arena_type ? PyModule_AddType(module, state->arena_type) : -1;
}

static int add_tensor_error(PyObject *module, fst_module *state)
{
    state->tensor_error = PyErr_NewExceptionWithDoc("faststep._C.TensorError", FST_DOC_TENSOR_ERROR,
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
        fst_tensors_init(&state->tensors) || add_tensor_error(module, state) ||
        add_loader(module, state))
        return -1;
    state->plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fst_step_plan_spec, NULL);
    if (!state->plan_type || PyModule_AddType(module, state->plan_type))
        return -1;
    state->release_hook_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &fst_release_hook_spec, NULL);
    return state->release_hook_type ? PyModule_AddType(module, state->release_hook_type) : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    fst_module *state = fst_module_state(module);
    Py_VISIT(state->plan_type);
    Py_VISIT(state->slots_type);
    Py_VISIT(state->gather_type);
    Py_VISIT(state->arena_type);
    Py_VISIT(state->release_hook_type);
    Py_VISIT(state->tensor_error);
    return fst_tensors_traverse(&state->tensors, visit, arg);
}

static int module_clear(PyObject *module)
{
    fst_module *state = fst_module_state(module);
    fst_tensors_clear(&state->tensors);
    Py_CLEAR(state->plan_type);
    Py_CLEAR(state->slots_type);
    Py_CLEAR(state->gather_type);
    Py_CLEAR(state->arena_type);
    Py_CLEAR(state->release_hook_type);
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
    if (state)
        fst_unscaled_forget(&state->unscaled);
    for (int i = 0; state && i < FST_GPU_DEVICES; i++)
        if (state->list_tables[i])
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
