/* The shares of a plan: one per device that its parameters lie on. */
#include "py/step/step_plan.h"

fst_share *fst_plan_share(fst_plan_object *self, int device)
{
    for (size_t i = 0; i < self->share_count; i++)
        if (self->shares[i].device == device)
            return &self->shares[i];
    fst_share *shares = PyMem_Realloc(self->shares, (self->share_count + 1) * sizeof *self->shares);
    if (!shares) {
        PyErr_NoMemory();
        return NULL;
    }
    self->shares = shares;
    fst_share *share = &shares[self->share_count++];
    *share = (fst_share){.device = device};
    fst_plan_init(&share->plan, FST_OP_COUNT);
    return share;
}

void fst_plan_free_shares(fst_plan_object *self)
{
    for (size_t i = 0; i < self->share_count; i++) {
        fst_share *share = &self->shares[i];
        if (share->tables)
            fst_gpu_tables_free(share->tables);
        fst_plan_free(&share->plan);
        PyMem_Free(share->counters);
        PyMem_Free(share->args);
        PyMem_Free(share->fold_keys);
        PyMem_Free(share->spans);
        PyMem_Free(share->groups);
    }
    PyMem_Free(self->shares);
    self->shares = NULL;
    self->share_count = 0;
}
