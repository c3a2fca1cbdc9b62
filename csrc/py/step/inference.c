/* Tensors that were made in inference mode: torch lets nobody write them outside of it. */
#include "py/step/step_plan.h"
#include "py/torch/quiet.h"

static int is_inference_mode(fst_tensors *tensors)
{
    const int paused = fst_quiet_pause(tensors);
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *answer = torch ? PyObject_CallMethod(torch, "is_inference_mode_enabled", NULL) : NULL;
    const int enabled = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_XDECREF(torch);
    fst_quiet_resume_after_python(tensors, paused);
    return enabled;
}

/* Finds a parameter's group and index; 0 if it is in none. */
static int find(PyObject *param_lists, const PyObject *param, Py_ssize_t *group, Py_ssize_t *index)
{
    for (*group = 0; *group < PyList_Size(param_lists); ++*group) {
        PyObject *params = PyList_GetItem(param_lists, *group);
        for (*index = 0; *index < PyList_Size(params); ++*index)
            if (PyList_GetItem(params, *index) == param)
                return 1;
    }
    return 0;
}

/* Raises the error for the tensor at `place`. States are listed before their parameter, so the
 * next parameter in the list is the owner. */
static int refuse(const fst_module *module, const fst_step_plan *self, PyObject *param_lists,
                  size_t place)
{
    Py_ssize_t group = 0, index = 0;
    size_t owner = place;
    while (owner < self->written_count && !find(param_lists, self->written[owner], &group, &index))
        owner++;
    if (owner == self->written_count)
        group = index = 0;
    return fst_step_raise(module, group, index, owner == place ? "parameter" : "state", "inference",
                          FST_INFERENCE);
}

/* Whether a tensor was made in inference mode. *frozen says whether it must not be written now.
 * Returns -1 with a Python error. */
static int is_inference(fst_module *module, PyObject *object, int *frozen)
{
    const int inference = fst_tensor_is_inference(&module->tensors, object);
    const int enabled = inference > 0 ? is_inference_mode(&module->tensors) : 1;
    *frozen = !enabled;
    return inference < 0 || enabled < 0 ? -1 : inference;
}

int fst_step_is_frozen(fst_module *module, PyObject *object)
{
    int frozen;
    return is_inference(module, object, &frozen) < 0 ? -1 : frozen;
}

int fst_step_check_inference(fst_module *module, const fst_step_plan *self, PyObject *param_lists)
{
    for (size_t i = self->counted_count; i < self->written_count; i++) {
        int frozen;
        const int inference = is_inference(module, self->written[i], &frozen);
        if (inference < 0)
            return -1;
        if (frozen)
            return refuse(module, self, param_lists, i);
        if (inference)
            return 1; /* inference mode is on: everything may be written */
    }
    return 0;
}
