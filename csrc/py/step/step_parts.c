/* The parts of a step plan: one per device that its parameters lie on. */
#include "py/step/step_plan.h"

fst_step_part *fst_step_part_on(fst_step_plan *self, int device)
{
    for (size_t i = 0; i < self->part_count; i++)
        if (self->parts[i].device == device)
            return &self->parts[i];
    fst_step_part *parts = PyMem_Realloc(self->parts, (self->part_count + 1) * sizeof *self->parts);
    if (!parts) {
        PyErr_NoMemory();
        return NULL;
    }
    self->parts = parts;
    fst_step_part *part = &parts[self->part_count++];
    *part = (fst_step_part){.device = device};
    fst_plan_init(&part->plan, FST_OP_COUNT);
    return part;
}

void fst_step_free_parts(fst_step_plan *self)
{
    for (size_t i = 0; i < self->part_count; i++) {
        fst_step_part *part = &self->parts[i];
        fst_gpu_tables_free(part->tables);
        fst_plan_free(&part->plan);
        PyMem_Free(part->counters);
        PyMem_Free(part->numbers);
        PyMem_Free(part->args);
        PyMem_Free(part->arg_keys);
        PyMem_Free(part->spans);
        PyMem_Free(part->groups);
    }
    PyMem_Free(self->parts);
    self->parts = NULL;
    self->part_count = 0;
}
