#include "core/pipeline.h"

#include <stdlib.h>
#include <string.h>

static const uint8_t waiting_for[FST_ENGINES] = {FST_TILE_ARRIVED, FST_TILE_READY,
                                                 FST_TILE_UPDATED};

fst_code fst_pipeline_init(fst_pipeline *pipeline, uint32_t count, fst_status *status)
{
    *pipeline = (fst_pipeline){.count = count};
    for (int engine = 0; engine < FST_ENGINES; engine++)
        pipeline->lists[engine] = (fst_tile_list){FST_NO_TILE, FST_NO_TILE};
    pipeline->state = calloc(count + 1, 1);
    pipeline->allowed = calloc(count + 1, 1);
    pipeline->next = calloc(count + 1, sizeof *pipeline->next);
    if (pipeline->state && pipeline->allowed && pipeline->next)
        return FST_OK;
    fst_pipeline_free(pipeline);
    return fst_fail(status, FST_NO_MEMORY, "no memory for %u tiles", count);
}

void fst_pipeline_free(fst_pipeline *pipeline)
{
    free(pipeline->state);
    free(pipeline->allowed);
    free(pipeline->next);
    *pipeline = (fst_pipeline){0};
}

void fst_pipeline_begin(fst_pipeline *pipeline)
{
    for (uint32_t tile = 0; tile < pipeline->count; tile++) {
        if (pipeline->state[tile] == FST_TILE_HERE)
            pipeline->state[tile] = FST_TILE_IDLE;
        pipeline->allowed[tile] = 0;
    }
    pipeline->pending = 0;
    pipeline->began = pipeline->failed = pipeline->wrote = 0;
}

/* Puts a tile at the end of an engine's list. */
static void append(fst_pipeline *pipeline, unsigned engine, uint32_t tile)
{
    fst_tile_list *list = &pipeline->lists[engine];
    pipeline->state[tile] = waiting_for[engine];
    pipeline->next[tile] = FST_NO_TILE;
    if (list->last == FST_NO_TILE)
        list->first = tile;
    else
        pipeline->next[list->last] = tile;
    list->last = tile;
}

int fst_pipeline_arrive(fst_pipeline *pipeline, uint32_t tile)
{
    const uint8_t state = pipeline->state[tile];
    if (state != FST_TILE_IDLE && state != FST_TILE_HERE)
        return 0;
    pipeline->copying++;
    append(pipeline, FST_ENGINE_IN, tile);
    return 1;
}

int fst_pipeline_copied(fst_pipeline *pipeline, uint32_t tile)
{
    const uint8_t state = pipeline->state[tile];
    return state != FST_TILE_ARRIVED && state != FST_TILE_COPYING;
}

int fst_pipeline_expects(fst_pipeline *pipeline, uint32_t tile)
{
    const uint8_t state = pipeline->state[tile];
    return !pipeline->failed && !pipeline->allowed[tile] && state >= FST_TILE_ARRIVED &&
           state <= FST_TILE_HERE;
}

int fst_pipeline_allow(fst_pipeline *pipeline, uint32_t tile)
{
    const uint8_t state = pipeline->state[tile];
    if (!fst_pipeline_expects(pipeline, tile))
        return 0;
    pipeline->allowed[tile] = 1;
    pipeline->began = 1;
    pipeline->pending++;
    if (state == FST_TILE_HERE)
        append(pipeline, FST_ENGINE_UPDATE, tile);
    return 1;
}

uint32_t fst_pipeline_take(fst_pipeline *pipeline, unsigned engine)
{
    fst_tile_list *list = &pipeline->lists[engine];
    const uint32_t tile = list->first;
    if (tile == FST_NO_TILE)
        return tile;
    list->first = pipeline->next[tile];
    if (list->first == FST_NO_TILE)
        list->last = FST_NO_TILE;
    pipeline->state[tile]++;
    return tile;
}

/* A tile is at rest again; one that was allowed is done with. */
static void rest(fst_pipeline *pipeline, uint32_t tile, fst_tile_state state)
{
    pipeline->state[tile] = (uint8_t)state;
    pipeline->pending -= pipeline->allowed[tile];
    pipeline->allowed[tile] = 0;
}

void fst_pipeline_finish(fst_pipeline *pipeline, unsigned engine, uint32_t tile, int failed)
{
    pipeline->failed |= failed;
    pipeline->copying -= engine == FST_ENGINE_IN;
    pipeline->wrote |= engine == FST_ENGINE_UPDATE;
    if (failed)
        rest(pipeline, tile, engine == FST_ENGINE_OUT ? FST_TILE_STRANDED : FST_TILE_IDLE);
    else if (engine == FST_ENGINE_OUT)
        rest(pipeline, tile, FST_TILE_IDLE);
    else if (engine == FST_ENGINE_UPDATE)
        append(pipeline, FST_ENGINE_OUT, tile);
    else if (pipeline->allowed[tile])
        append(pipeline, FST_ENGINE_UPDATE, tile);
    else
        pipeline->state[tile] = FST_TILE_HERE;
}

fst_pass_state fst_pipeline_state(const fst_pipeline *pipeline)
{
    if (pipeline->failed)
        return pipeline->wrote || pipeline->pending ? FST_PASS_PARTIAL : FST_PASS_REFUSED;
    if (!pipeline->began)
        return FST_PASS_COLLECTING;
    return pipeline->pending ? FST_PASS_UPDATING : FST_PASS_RETURNED;
}
