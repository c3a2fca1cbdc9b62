/* pipeline.h - the tiles of an offloaded step, on their way through three engines.
 *
 * A gradient arrives (fst_pipeline_arrive) and is copied in. The tile is then here, until the step
 * allows its update (fst_pipeline_allow); where that was before, it goes on at once. It is updated,
 * and copied out. An engine takes the tiles in the order in which they became ready for it.
 *
 * There is neither a thread nor a lock here: engines.c has them, and tests/c/test_pipeline.c goes
 * through every order of events. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { FST_ENGINE_IN, FST_ENGINE_UPDATE, FST_ENGINE_OUT, FST_ENGINES };

typedef enum {
    FST_TILE_IDLE,
    FST_TILE_ARRIVED, /* waits for an engine, as do READY and UPDATED */
    FST_TILE_COPYING,
    FST_TILE_HERE, /* waits for the step */
    FST_TILE_READY,
    FST_TILE_UPDATING,
    FST_TILE_UPDATED,
    FST_TILE_RETURNING,
    FST_TILE_STRANDED, /* updated on the host, and old on the device */
} fst_tile_state;

typedef enum {
    FST_PASS_COLLECTING, /* nothing was allowed since fst_pipeline_begin */
    FST_PASS_UPDATING,   /* a tile that was allowed is not back yet */
    FST_PASS_RETURNED,
    FST_PASS_REFUSED, /* an engine has failed, and nothing was updated */
    FST_PASS_PARTIAL, /* the same, and some tiles were updated, or may have been */
} fst_pass_state;

#define FST_NO_TILE UINT32_MAX

typedef struct {
    uint32_t first, last;
} fst_tile_list;

typedef struct {
    uint8_t *state;   /* of each tile */
    uint8_t *allowed; /* whether it goes on to its update */
    uint32_t *next;   /* the tile behind it in a list */
    uint32_t count;
    fst_tile_list lists[FST_ENGINES]; /* of tiles that wait for an engine */
    uint32_t pending;                 /* tiles that are allowed and not at rest */
    uint32_t copying;                 /* tiles that have arrived and are not here */
    int began, failed, wrote; /* whether a tile was allowed, an engine failed, one was updated */
} fst_pipeline;

fst_code fst_pipeline_init(fst_pipeline *pipeline, uint32_t count, fst_status *status);
void fst_pipeline_free(fst_pipeline *pipeline);

/* Begins another pass: forgets the gradients that are here. Only while nothing moves. */
void fst_pipeline_begin(fst_pipeline *pipeline);

/* The gradient of a tile is to be copied in, maybe once more. Returns 0 and does nothing where the
 * tile is under way. */
int fst_pipeline_arrive(fst_pipeline *pipeline, uint32_t tile);

/* The tile is to be updated as soon as it is here. Returns 0 and does nothing if an engine has
 * failed since the pass began, or the tile is past its update. */
int fst_pipeline_allow(fst_pipeline *pipeline, uint32_t tile);

/* Whether fst_pipeline_allow would not refuse; whether the tile neither waits for a copy in nor is
 * being copied. */
int fst_pipeline_expects(fst_pipeline *pipeline, uint32_t tile);
int fst_pipeline_copied(fst_pipeline *pipeline, uint32_t tile);

/* The next tile for an engine, which has it until it calls `finish`; FST_NO_TILE: none waits. */
uint32_t fst_pipeline_take(fst_pipeline *pipeline, unsigned engine);
void fst_pipeline_finish(fst_pipeline *pipeline, unsigned engine, uint32_t tile, int failed);

fst_pass_state fst_pipeline_state(const fst_pipeline *pipeline);

/* Whether a tile is in no engine and waits for none. */
static inline int fst_pipeline_rests(const fst_pipeline *pipeline, uint32_t tile)
{
    const uint8_t state = pipeline->state[tile];
    return state == FST_TILE_IDLE || state == FST_TILE_STRANDED ||
           (state == FST_TILE_HERE && !pipeline->allowed[tile]);
}
