/* engines.h - the threads of a pipeline: one that copies in, one that copies out, and some that
 * update, each of these bound to a core. Every function may be called by any thread of the process
 * that made them; a child after a fork has no threads. */
#pragma once

#include "core/pipeline.h"

/* The work of an engine on a tile. Returns 0, or 1 if it has failed. */
typedef int (*fst_engine_work)(void *context, unsigned engine, uint32_t tile);

typedef struct fst_engines fst_engines;

/* The threads, which wait; NULL with `status` filled. */
fst_engines *fst_engines_new(unsigned updaters, fst_engine_work work, void *context,
                             fst_status *status);

/* Waits for what moves, and ends the threads. In a child it leaves all as it is. */
void fst_engines_free(fst_engines *engines);

/* Whether this is the process that made them. */
int fst_engines_are_here(const fst_engines *engines);

/* Lets there be so many tiles, all idle, once nothing moves. */
fst_code fst_engines_resize(fst_engines *engines, uint32_t count, fst_status *status);

/* Those of pipeline.h, for tiles [first, last). Return 0 if one of them refused. */
int fst_engines_arrive(fst_engines *engines, uint32_t first, uint32_t last);
int fst_engines_allow(fst_engines *engines, uint32_t first, uint32_t last);
void fst_engines_begin(fst_engines *engines); /* waits until nothing moves */

/* Whether fst_engines_allow would refuse none of these. */
int fst_engines_expect(fst_engines *engines, uint32_t first, uint32_t last);

/* Whether none of these waits for a copy in, or is being copied. */
int fst_engines_copied(fst_engines *engines, uint32_t first, uint32_t last);

/* Wait until no tile is copied in; until tiles [first, last) rest. Return the state of the pass. */
fst_pass_state fst_engines_settle(fst_engines *engines);
fst_pass_state fst_engines_wait(fst_engines *engines, uint32_t first, uint32_t last);

/* Nanoseconds that each engine has worked, all its threads together. */
void fst_engines_busy(fst_engines *engines, uint64_t busy[FST_ENGINES]);
