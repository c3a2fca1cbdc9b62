#include "core/offload.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/passes.h"
#include "io/clock.h"

typedef struct {
    fst_offload_param at;
    void *source; /* the gradient, or an event behind its copy */
    double factor;
    uint32_t first_tile;
    fst_operand operands[FST_OP_COUNT]; /* of the step that runs, as all below */
    int64_t begin;                      /* the first element, of a whole parameter */
    fst_update_args args;
    double inv_scale;
    int write_grad;
} entry;

typedef struct {
    double rate;
    int64_t free; /* when the link has sent what it was given, in ns */
} simulated_link;

enum { IDLE_NS = 2000000 }; /* without work, after which a simulated link begins anew */

struct fst_offload {
    fst_engines *engines;
    entry *entries;   /* by the address of `host` */
    uint32_t *places; /* of each parameter among them */
    uint32_t *owners; /* of each tile */
    size_t count;
    int64_t tile;
    fst_offload_home home;
    simulated_link wires[FST_ENGINES];
};

/* Waits until the link would have sent so many more bytes. A thread that wakes up late does not
 * slow the link down: what is sent next was queued behind. */
static void pace(simulated_link *wire, size_t bytes)
{
    if (!(wire->rate > 0.0))
        return;
    const int64_t now = fst_now_ns();
    wire->free = (now - wire->free > IDLE_NS ? now : wire->free) +
                 (int64_t)((double)bytes / wire->rate * 1e9);
    const struct timespec until = fst_time_at(wire->free);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

/* Copies a gradient, or waits until the device has; returns 1 if that failed. */
static int copy_in(fst_offload *offload, const entry *e, int64_t begin, int64_t end)
{
    const size_t size = fst_dtype_size(e->at.grad_dtype);
    const fst_operand op = {.data = e->at.host_grad, .dtype = e->at.grad_dtype};
    fst_status status = {0};
    if (offload->home.gpu && fst_gpu_await(offload->home.gpu, e->source, &status))
        return 1;
    pace(&offload->wires[FST_ENGINE_IN], (size_t)(end - begin) * size);
    for (int64_t at = begin; at < end; at += FST_CHUNK) {
        const size_t count = (size_t)(end - at < FST_CHUNK ? end - at : FST_CHUNK);
        const size_t from = (size_t)at * size;
        if (!offload->home.gpu)
            memcpy((char *)e->at.host_grad + from, (const char *)e->source + from, count * size);
        if (!isnan(e->factor)) /* while it is in the cache */
            e->at.sums[at / FST_CHUNK] = fst_chunk_squares(&op, at, count, e->factor);
    }
    return 0;
}

static int upload(fst_offload_home home, void *to, const void *from, size_t bytes)
{
    fst_status status = {0};
    int mode;
    if (fst_gpu_enter_relaxed(home.gpu, &mode, &status))
        return 1;
    fst_gpu_upload(home.gpu, (uint64_t)(uintptr_t)to, from, bytes, home.stream, &status);
    return fst_gpu_leave_relaxed(home.gpu, mode, &status) != FST_OK;
}

static int copy_out(fst_offload *offload, const entry *e, int64_t begin, int64_t end)
{
    const size_t size = fst_dtype_size(e->at.dtype), from = (size_t)begin * size;
    const size_t bytes = (size_t)(end - begin) * size;
    char *to = (char *)e->at.param + from;
    const char *host = (const char *)e->at.host + from;
    pace(&offload->wires[FST_ENGINE_OUT], bytes);
    if (offload->home.gpu)
        return upload(offload->home, to, host, bytes);
    memcpy(to, host, bytes);
    return 0;
}

/* Where the update of a tile begins: blocks of codes end with the chunks of a whole parameter. The
 * gradients between are those of the tile before, which are copied in first. */
static int64_t edge_of(const entry *e, int64_t at)
{
    return at > 0 && at < e->at.count ? at - (e->begin + at) % FST_CHUNK : at;
}

static int work(void *context, unsigned engine, uint32_t tile)
{
    fst_offload *offload = context;
    const entry *e = &offload->entries[offload->owners[tile]];
    int64_t begin = (int64_t)(tile - e->first_tile) * offload->tile;
    const int64_t left = e->at.count - begin;
    int64_t end = begin + (left < offload->tile ? left : offload->tile);
    if (engine == FST_ENGINE_IN)
        return copy_in(offload, e, begin, end);
    begin = edge_of(e, begin);
    end = edge_of(e, end);
    if (engine == FST_ENGINE_OUT)
        return copy_out(offload, e, begin, end);
    fst_update_span(e->operands, e->begin + begin, e->begin + end, &e->args, e->inv_scale,
                    e->write_grad);
    return 0;
}

fst_offload *fst_offload_new(unsigned updaters, int64_t tile, fst_status *status)
{
    fst_offload *offload = calloc(1, sizeof *offload);
    if (!offload) {
        fst_fail(status, FST_NO_MEMORY, "no memory for an offload");
        return NULL;
    }
    const int64_t chunks = tile < 1 ? 1 : (tile + FST_CHUNK - 1) / FST_CHUNK;
    offload->tile = chunks * FST_CHUNK;
    offload->engines = fst_engines_new(updaters, work, offload, status);
    if (offload->engines)
        return offload;
    free(offload);
    return NULL;
}

static void free_entries(fst_offload *offload)
{
    free(offload->entries);
    free(offload->places);
    free(offload->owners);
    offload->entries = NULL;
    offload->places = offload->owners = NULL;
    offload->count = 0;
}

void fst_offload_free(fst_offload *offload)
{
    if (!offload || !fst_engines_are_here(offload->engines))
        return;
    fst_engines_free(offload->engines);
    free_entries(offload);
    free(offload);
}

fst_engines *fst_offload_engines(fst_offload *offload)
{
    return offload->engines;
}

static int by_address(const void *first, const void *second)
{
    const entry *a = first, *b = second;
    return (a->at.host > b->at.host) - (a->at.host < b->at.host);
}

/* Numbers the tiles, and notes of each parameter where its entry is. */
static uint32_t number_tiles(fst_offload *offload)
{
    uint32_t tile = 0;
    for (size_t i = 0; i < offload->count; i++) {
        entry *e = &offload->entries[i];
        offload->places[e->first_tile] = (uint32_t)i; /* has held the parameter's number so far */
        e->first_tile = tile;
        for (int64_t at = 0; at < e->at.count; at += offload->tile)
            offload->owners[tile++] = (uint32_t)i;
    }
    return tile;
}

fst_code fst_offload_set(fst_offload *offload, const fst_offload_param *params, size_t count,
                         fst_offload_home home, fst_status *status)
{
    size_t tiles = 0;
    fst_engines_begin(offload->engines);
    free_entries(offload);
    offload->home = home;
    for (size_t i = 0; i < count; i++)
        tiles += (size_t)((params[i].count + offload->tile - 1) / offload->tile);
    if (tiles >= FST_NO_TILE)
        return fst_fail(status, FST_UNSUPPORTED, "more than 2^32 tiles");
    offload->entries = calloc(count + 1, sizeof *offload->entries);
    offload->places = calloc(count + 1, sizeof *offload->places);
    offload->owners = calloc(tiles + 1, sizeof *offload->owners);
    if (!offload->entries || !offload->places || !offload->owners)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %zu tiles", tiles);
    for (size_t i = 0; i < count; i++)
        offload->entries[i] = (entry){.at = params[i], .first_tile = (uint32_t)i};
    qsort(offload->entries, count, sizeof *offload->entries, by_address);
    offload->count = count;
    if (fst_engines_resize(offload->engines, number_tiles(offload), status))
        free_entries(offload);
    return status->code;
}

static uint32_t tiles_of(const fst_offload *offload, const entry *e)
{
    return (uint32_t)((e->at.count + offload->tile - 1) / offload->tile);
}

void fst_offload_tiles(const fst_offload *offload, size_t param, uint32_t *first, uint32_t *last)
{
    const entry *e = &offload->entries[offload->places[param]];
    *first = e->first_tile;
    *last = *first + tiles_of(offload, e);
}

fst_offload_home fst_offload_home_of(const fst_offload *offload)
{
    return offload->home;
}

int fst_offload_arrive(fst_offload *offload, size_t param, void *source, double factor)
{
    entry *e = &offload->entries[offload->places[param]];
    uint32_t first, last;
    fst_offload_tiles(offload, param, &first, &last);
    if (!fst_engines_copied(offload->engines, first, last))
        return 0;
    e->source = source;
    e->factor = factor;
    return fst_engines_arrive(offload->engines, first, last);
}

/* Where the elements of a span lie: an operand's address is that of a whole parameter. */
static void *first_of(const fst_operand *op, int64_t begin)
{
    return (void *)((uintptr_t)op->data + (uintptr_t)begin * fst_dtype_size(op->dtype));
}

static entry *find(const fst_offload *offload, const fst_operand *operands, int64_t begin)
{
    const entry key = {.at.host = first_of(&operands[FST_OP_PARAM], begin)};
    return offload->count ? bsearch(&key, offload->entries, offload->count, sizeof key, by_address)
                          : NULL;
}

fst_code fst_offload_check(const fst_offload *offload, const fst_plan *plan, fst_status *status)
{
    for (size_t i = 0; i < plan->span_count; i++) {
        const fst_operand *ops = &plan->operands[i * plan->width];
        const fst_span *span = &plan->spans[i];
        const entry *e = find(offload, ops, span->begin);
        if (!e)
            continue;
        int same = e->at.count == span->count && ops[FST_OP_PARAM].dtype == e->at.dtype &&
                   first_of(&ops[FST_OP_GRAD], span->begin) == e->at.host_grad &&
                   ops[FST_OP_GRAD].dtype == e->at.grad_dtype;
        for (unsigned k = 0; k < FST_OP_COUNT; k++)
            same = same && !ops[k].layout;
        if (!same)
            return fst_fail(status, FST_UNSUPPORTED,
                            "an offloaded parameter, its gradient or a state lies in another order "
                            "or place than when it was offloaded");
        if (!fst_engines_expect(offload->engines, e->first_tile,
                                e->first_tile + tiles_of(offload, e)))
            return fst_fail(status, FST_UNSUPPORTED, "a gradient did not reach the host");
    }
    return FST_OK;
}

void fst_offload_allow(fst_offload *offload, const fst_plan *plan, const fst_update_args *args,
                       double inv_scale, int write_grad)
{
    for (size_t i = 0; i < plan->span_count; i++) {
        const fst_operand *ops = &plan->operands[i * plan->width];
        const fst_span *span = &plan->spans[i];
        const fst_update_args *own = &args[span->args];
        entry *e = find(offload, ops, span->begin);
        if (!e) {
            const int64_t end = span->begin + span->count;
            fst_update_span(ops, span->begin, end, own, inv_scale, write_grad);
            continue;
        }
        memcpy(e->operands, ops, sizeof e->operands);
        e->begin = span->begin;
        e->args = *own;
        e->inv_scale = inv_scale;
        e->write_grad = write_grad;
        fst_engines_allow(offload->engines, e->first_tile, e->first_tile + tiles_of(offload, e));
    }
}

void fst_offload_pace(fst_offload *offload, double in, double out)
{
    offload->wires[FST_ENGINE_IN].rate = in;
    offload->wires[FST_ENGINE_OUT].rate = out;
}
