/* job.h - a job: one pass over all chunks, divided among threads. */
#pragma once

#include "base/status.h"
#include "cpu/kernels.h"

/* The direction of a pass over chunks. */
typedef enum {
    FST_FORWARDS,
    FST_TURNS,      /* over gradients: the opposite of the pass before */
    FST_TURNS_LAST, /* an update, which ends a step: the next pass that turns goes forwards */
} fst_direction;

/* A pass calls `chunk` for every chunk; most fields are arguments of one kind of pass alone. */
typedef struct fst_job fst_job;
struct fst_job {
    const fst_work *work;
    void (*chunk)(const fst_job *job, size_t index);
    fst_direction direction;
    unsigned operand;       /* the first that the pass touches */
    unsigned operand_count; /* how many to prefetch, from the first on */
    fst_norm_kind norm;
    double power, factor;
    double again; /* factor for chunks whose sum matches */
    double *partial;
    const double *expected;
    int *nonfinite;
    const fst_update_args *args;
    int write_grad, start;
};

/* The operands of a chunk's span, from job->operand on. */
static inline const fst_operand *fst_job_operands(const fst_job *job, size_t index)
{
    return job->work->operands + job->work->chunks[index].span * job->work->width + job->operand;
}

/* Runs the rounds of the work one after another, each as one parallel region. */
fst_code fst_job_run(const fst_job *job, fst_status *status);
