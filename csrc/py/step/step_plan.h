/* step_plan.h - what an optimizer remembers of its parameters between steps. */
#pragma once

#include "core/offload.h"
#include "core/rule_args.h"
#include "core/plan.h"
#include "cpu/factored.h"
#include "gpu/tables.h"
#include "py/module.h"
#include "py/step/param.h"
#include "py/torch/tensor_record.h"

/* A parameter group, parsed from the tuple of the step that runs. */
typedef struct {
    fst_rule rule;
    PyObject *keys;  /* owned: names of the states, "step" first where has_step, and last that of
                        the scales where there are codes, and of the master where has_master */
    PyObject *lr;    /* owned: {device: hyper-parameter 0 as a tensor in its memory}, or None */
    Py_ssize_t size; /* parameters, when they were bound */
    unsigned key_count, number_count;
    int has_step, maximize;
    int has_master; /* bf16 and fp16 parameters have an fp32 master, and fp32 states */
    int noisy;      /* bf16 states are rounded by the noise of this seed */
    uint64_t seed;
    int has_remainder;  /* these masters are remainders, of bf16 parameters; there are no fp16 ones
                         */
    int64_t codes_from; /* parameters of so many elements have states in codes of 8 bits, and
                           scales; 0: none has */
    PyObject *shards; /* owned: {id: shard} of parameters that are shards of whole ones, or None */
    double hyper[FST_MAX_HYPER];
} fst_group;

/* What a parameter is of a whole one, whose elements noise and codes count: all of it, or a shard.
 */
typedef struct {
    uint32_t param; /* its number in all groups */
    int coded;      /* its states are in codes of 8 bits */
    uint32_t row;   /* of the whole, as rules/codes.h has it */
    int64_t begin;  /* its first element, in the order of memory */
} fst_shard;

/* The key of the noise for a parameter of a group. */
static inline fst_noise fst_group_noise(const fst_group *group, uint32_t step, uint32_t param)
{
    return (fst_noise){{(uint32_t)group->seed, (uint32_t)(group->seed >> 32)}, step, param};
}

/* The step counter of a parameter: a 0-d tensor in the optimizer's state, or none for rules
 * without one. On the host its type may also be one of the integer types of tensor.h. */
typedef struct {
    fst_number_place at; /* no data: there is none */
    double value;  /* without a tensor, the count that the rule reads: 1 for a new state, else 2 */
    double before; /* its value before the step that runs */
    int64_t span;  /* -1: the parameter has no elements */
    uint32_t group;
    uint32_t index; /* in its group */
    uint32_t param; /* in all groups, of whole parameters */
    int wide;       /* computed in double: an fp64 parameter, or one with an fp64 state */
} fst_counter;

/* A number that a parameter has beside its step counter, likewise a 0-d tensor: see
 * rules/numbers.def. */
typedef struct {
    fst_number_place at;
    double before; /* its value before the step that runs */
} fst_tensor_number;

/* What a rule's arguments are for. Parameters that agree in it share them. */
typedef struct {
    double step;
    uint32_t group;
    fst_numbers held, next; /* for rules with numbers: before the step, and after it */
} fst_args_key;

/* The part of a step plan for one device. */
typedef struct {
    int device; /* FST_HOST or a CUDA ordinal */
    fst_plan plan;
    fst_counter *counters; /* of the parameters that have a gradient in the step that runs */
    size_t counter_count, counter_capacity;
    fst_tensor_number
        *numbers; /* of these parameters one after another, where their rules have some */
    size_t number_count, number_capacity;
    /* on the host */
    fst_update_args *args;
    fst_args_key *arg_keys;
    size_t arg_count, arg_capacity;
    /* on a CUDA device */
    void *stream;     /* of the step that runs */
    PyObject *sample; /* a parameter there; borrowed */
    fst_gpu_tables *tables;
    fst_device_span *spans;
    fst_device_group *groups;
    size_t span_capacity, group_capacity;
    size_t distinct; /* spans whose counters are known to be distinct; 0: not checked */
    uint64_t listed; /* the binding that `spans` were listed for */
} fst_step_part;

/* Where specs lie among those of a parameter that were settled. */
enum { FST_SETTLED_GRAD = 1, FST_SETTLED_STATE, FST_SETTLED = FST_SETTLED_STATE + FST_MAX_KEYS };

typedef struct fst_trace fst_trace;
typedef struct fst_traced_state fst_traced_state;
typedef struct fst_traced_dtensors fst_traced_dtensors;

typedef struct {
    PyObject_HEAD
    fst_step_part *parts; /* the host's comes first */
    size_t part_count;
    fst_param *params;
    size_t param_count;
    PyObject *offload;      /* the OffloadPipe that updates the parameters, or NULL */
    PyObject *last_written; /* the list that the last short step returned */
    /* Of each parameter that is a DTensor, its spec and those that its gradient and its states may
     * have; owned. */
    PyObject **settled;
    size_t settled_count;  /* parameters */
    int64_t total;         /* elements of the last step that the host worked on */
    int64_t written_total; /* elements of its parameters on all devices */
    Py_ssize_t applied;    /* steps that were, but for those of fst_step_repeat() */
    int busy;
    int has_dtensors; /* one of the parameters that are bound is a DTensor */
    int has_fp16;     /* one of their gradients is of type float16 */
    int is_factored;  /* the step is Adafactor's */
    int is_long;      /* of more than FST_SHORT_STEP elements: its passes run without the GIL */
    /* The trace: tells whether the next step is like this one, so that what is bound stays
     * valid. */
    fst_trace *traces;
    fst_traced_state *traced_states;
    fst_traced_dtensors *traced_dtensors; /* of as many parameters as there are traces; or NULL */
    size_t trace_capacity, traced_state_capacity, traced_state_count;
    size_t traced_dtensor_capacity;
    int traceable;
    int traced;        /* 0: no trace; 2: also for steps that write the gradients */
    uint64_t bindings; /* number of binds; the first is 1 */
    uint64_t moves;    /* number of times that a gradient was followed to other memory */
    fst_group *groups;
    size_t group_count;
    /* for the step that runs */
    PyObject **held; /* owned: every object that is bound, in the order in which they were found,
                        with a NULL behind those of each parameter */
    size_t held_count, held_capacity;
    fst_old_pins old_pins;
    PyObject *unsettled; /* owned: a list of (group, index), or NULL */
    PyObject **written;  /* parameters and moments, which the step writes; borrowed */
    size_t written_count, written_capacity;
    const void **counted; /* torch's records of as many of them, from the first on, as have one */
    size_t counted_count, counted_capacity;
    PyObject **grads; /* borrowed */
    size_t grad_count, grad_capacity;
    fst_layout **layouts;
    size_t layout_count, layout_capacity;
    fst_factored *factored; /* what Adafactor computes of each parameter */
    size_t factored_capacity;
} fst_step_plan;

/* Where parameters lie on several devices these agree first: one call of step() measures into
 * the flag and the norm of each device, and another one applies what the caller has put there. */
typedef enum { FST_STEP_WHOLE, FST_STEP_MEASURE, FST_STEP_APPLY } fst_step_phase;

/* What the caller of step() asked for. */
typedef struct {
    /* {device: (grad_scale, found_inf, norm)}, tensors or None; NULL: all None */
    PyObject *scalars;
    int measure_found_inf; /* 2: and fp16 gradients are refused, as torch's unscale_ does, and in
                            * host memory those that are shared, which it divides repeatedly */
    int write_grads;
    int measure_undivided; /* measure the gradients as they are; for a step without the two above */
    double max_norm;       /* NaN: no clipping */
    double divisor;        /* of gradients in CPU memory where `scalars` is NULL */
    int phase;
} fst_step_options;

/* The scalars of a device. */
typedef struct {
    fst_number_place grad_scale, found_inf, norm;
} fst_step_scalar_set;

/* What the step found on the host. A CUDA device keeps its findings in its memory. */
typedef struct {
    int skipped, measured;
    double norm, square_sum;
} fst_step_outcome;

/* Raises TensorError(group, index, role, kind, detail), which Python turns into the error that
 * users see. Returns -1 (bound.c). */
int fst_step_raise(const fst_module *module, Py_ssize_t group, Py_ssize_t index, const char *role,
                   const char *kind, const char *detail);

/* Parses the list of groups (groups.c). Where another rule, other states or the sign have changed,
 * the trace is dropped. Returns 0, or -1 with a Python error. */
int fst_groups_parse(fst_module *module, fst_step_plan *self, PyObject *specs);
void fst_groups_free(fst_step_plan *self);

/* Learns the types of the tensors in a dictionary {device: tensors}: of scalars, as of a group's
 * learning rates. That may run Python code, so that reading them later does not. Returns 0, or -1
 * with a Python error. */
int fst_groups_learn_types(fst_tensors *tensors, PyObject *of_devices);

/* Binds all parameters that have a gradient (bind.c), which changes no tensor. Returns the list
 * of (group, index) whose state is missing, empty if all is bound; or NULL with a Python error.
 * `fresh` lists parameters whose states were created since, or is None. */
PyObject *fst_step_bind(fst_module *module, fst_step_plan *self, PyObject *param_lists,
                        PyObject *state, PyObject *fresh, int write_grads);

#define FST_INFERENCE                                                                         \
    "was made in inference mode, and torch does not write such a tensor outside of it; call " \
    ".clone() on it"

/* Refuses to write tensors of inference mode outside of it (inference.c). Returns 1 if there are
 * such tensors, 0 if not, -1 with a Python error. Tensors with a version counter are not of
 * inference mode, and not checked. */
int fst_step_check_inference(fst_module *module, const fst_step_plan *self, PyObject *param_lists);

/* Whether a tensor must not be written now, for that reason; -1 with a Python error. */
int fst_step_is_frozen(fst_module *module, PyObject *object);

/* Whether a parameter and its gradient or one of its states are plain or, as DTensors, have specs
 * that settle() was told: the parameter its first one, the tensor entry `which`. -1 with a Python
 * error (dtensors.c). */
int fst_step_is_settled(const fst_tensors *tensors, const fst_step_plan *self, size_t index,
                        PyObject *param, PyObject *tensor, size_t which);

/* settle(index, param_spec, grad_spec, state_specs) of a plan. */
PyObject *fst_step_settle(PyObject *object, PyObject *args);

/* Lists a parameter as one that Python has to look at. Returns 0, or -1 with a Python error. */
int fst_step_list_unsettled(fst_step_plan *self, Py_ssize_t group, Py_ssize_t index);

/* Drops what settle() was told. */
void fst_step_unsettle(fst_step_plan *self);

/* Forgets what was bound in this step, but not the groups and what is held. */
void fst_step_unbind(fst_step_plan *self);

/* Ends a step. Drops its references last, as that may run Python code. */
void fst_step_end(fst_step_plan *self);

/* The part for a device, which is made when it is first asked for; NULL with a Python error.
 * Other parts may move then (step_parts.c). */
fst_step_part *fst_step_part_on(fst_step_plan *self, int device);
void fst_step_free_parts(fst_step_plan *self);

/* Reads the scalars of the options for a device (scalars.c). A scalar that is None has no data.
 * Returns 0, or -1 with a Python error. */
int fst_step_scalars(fst_module *module, const fst_step_options *options, int device,
                     fst_step_scalar_set *scalars);

/* Reads and writes a number in CPU memory. */
double fst_number_read(const fst_number_place *number);
void fst_number_write(const fst_number_place *number, double value);

/* Remembers the value of a step counter in CPU memory, and returns that after one more step. */
double fst_counter_next(fst_counter *counter);
void fst_counter_write(const fst_counter *counter, double value);

/* offload(offload) of a plan (offload_object.c): its threads update parameters from now on. */
PyObject *fst_step_offload(PyObject *object, PyObject *offload);

/* What an OffloadPipe's threads work on. */
fst_offload *fst_offload_of(PyObject *object);

/* Whether the threads are there, and nobody holds their lock for ever: 0, or -1 with a
 * RuntimeError in a forked child. */
int fst_offload_check_process(PyObject *object);

/* Runs the passes for the host's part (host_step.c). Returns 0, or -1 with a Python error. */
int fst_host_step(fst_module *module, fst_step_plan *self, const fst_step_options *options,
                  fst_step_outcome *outcome);

/* The same for a CUDA device (device_step.c). `prepare` does everything that can fail; `step`
 * only launches. */
int fst_device_prepare(fst_module *module, fst_step_plan *self, fst_step_part *part,
                       const fst_step_options *options);
int fst_device_step(fst_module *module, fst_step_part *part, const fst_step_options *options);

/* The same for Adafactor (factored_run.c). `prepare` lists parameters that share memory as
 * unsettled: torch makes their step. */
int fst_factored_prepare(fst_module *module, fst_step_plan *self);
int fst_factored_run(fst_module *module, fst_step_plan *self);

/* Steps without Python code if the step is like the one before: all parameters in CPU memory, and
 * nothing but the gradients' memory has changed. Returns 1, 0 if nothing was done, or -1 with a
 * Python error (step_plan.c). */
int fst_step_repeat(fst_module *module, fst_step_plan *self, PyObject *param_lists, PyObject *specs,
                    PyObject *state, const fst_step_options *options, fst_step_outcome *outcome);

/* Forgets the parameters. Their pins go to the old pins. */
void fst_params_free(fst_step_plan *self);
