/* Streams of the fake library: queues that run late, events between them, and captures. */
#include <stdlib.h>
#include <string.h>

#include "fake_cuda_inside.h"

static fake_stream *streams;
static size_t lag;
static uint64_t captures, ids;
static int running = -1;
static unsigned long threads = 1; /* 1: of no thread */
static __thread unsigned long this_thread;

int fake_running(void)
{
    return running;
}

void fake_cuda_lag(size_t operations)
{
    fake_lock();
    lag = operations;
    fake_unlock();
}

static fake_stream *new_stream(int device)
{
    fake_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        abort();
    stream->device = device;
    stream->last = &stream->first;
    stream->id = ++ids;
    stream->next = streams;
    return streams = stream;
}

void *fake_cuda_stream(int device)
{
    fake_lock();
    fake_stream *stream = new_stream(device);
    stream->thread = 1;
    fake_unlock();
    return stream;
}

void fake_cuda_close_stream(void *stream)
{
    fake_stream *closed = stream;
    fake_lock();
    fake_run_until(closed, closed->submitted);
    closed->closed = 1;
    fake_unlock();
}

/* The old stream goes on without a handle: behind the new one, so that it runs later wherever
 * nothing orders them. */
void fake_cuda_recreate_stream(void *stream)
{
    fake_stream *again = stream;
    fake_lock();
    fake_stream *old = new_stream(again->device);
    streams = old->next;
    old->thread = 1;
    old->first = again->first;
    old->last = again->first ? again->last : &old->first;
    old->submitted = again->submitted;
    old->done = again->done;
    old->next = again->next;
    again->next = old;
    again->first = NULL;
    again->last = &again->first;
    again->submitted = again->done = 0;
    again->id = ++ids;
    for (fake_event *event = fake_events; event; event = event->next)
        if (event->stream == again)
            event->stream = old;
    for (fake_stream *s = streams; s; s = s->next)
        for (fake_op *op = s->first; op; op = op->next)
            if (op->other == again)
                op->other = old;
    fake_unlock();
}

/* NULL is a device's own stream; 2 is one of each thread and device. */
fake_stream *fake_stream_of(void *handle, int device)
{
    const uintptr_t number = (uintptr_t)handle;
    if (number == 2 && !this_thread)
        this_thread = ++threads;
    const unsigned long thread = number == 2 ? this_thread : 0;
    for (fake_stream *s = streams; s; s = s->next) {
        if (s == handle && s->closed)
            fake_complain("a stream is used that was closed");
        if (s == handle)
            return s->device == device && !s->closed ? s : NULL;
        if ((number == 0 || number == 2) && s->device == device && s->thread == thread)
            return s;
    }
    if (number != 0 && number != 2)
        return NULL;
    fake_stream *own = new_stream(device);
    own->thread = thread;
    return own;
}

static void run_copy(const fake_stream *stream, const fake_op *op)
{
    if (!fake_inside(stream->device, (uint64_t)(uintptr_t)op->to, op->size))
        fake_complain("a copy of %zu bytes runs out of its memory on device %d", op->size,
                      stream->device);
    else if (!fake_inside(-1, (uint64_t)(uintptr_t)op->from, op->size))
        fake_complain("a copy of %zu bytes reads what is not pinned memory", op->size);
    else
        memcpy(op->to, op->from, op->size);
}

static void run_first(fake_stream *stream)
{
    fake_op *op = stream->first;
    const int outer = running;
    if (op->kind == FAKE_WAIT)
        fake_run_until(op->other, op->until);
    stream->first = op->next;
    if (!stream->first)
        stream->last = &stream->first;
    if (op->kind == FAKE_COPY)
        run_copy(stream, op);
    running = stream->device;
    if (op->kind == FAKE_LAUNCH && op->kernel->run &&
        op->kernel->run(op->kernel, op->grid, op->block, op->args))
        fake_complain("%s failed", op->kernel->name);
    running = outer;
    stream->done++;
    free(op->args);
    free(op);
}

void fake_run_until(fake_stream *stream, uint64_t until)
{
    while (stream->done < until && stream->first)
        run_first(stream);
}

void fake_finish(int device)
{
    for (fake_stream *s = streams; s; s = s->next)
        if (s->device == device)
            fake_run_until(s, s->submitted);
}

static fake_op *copy_of(const fake_op *op)
{
    fake_op *copy = malloc(sizeof *copy);
    if (!copy)
        abort();
    *copy = *op;
    copy->next = NULL;
    if (op->args) {
        copy->args = malloc(op->kernel->args_size);
        if (!copy->args)
            abort();
        memcpy(copy->args, op->args, op->kernel->args_size);
    }
    return copy;
}

void fake_submit(fake_stream *stream, fake_op op)
{
    fake_op *added = copy_of(&op);
    if (stream->capture) {
        *stream->graph->last = added;
        stream->graph->last = &added->next;
        return;
    }
    *stream->last = added;
    stream->last = &added->next;
    stream->submitted++;
    while (stream->submitted - stream->done > lag)
        run_first(stream);
}

void fake_cuda_synchronize(void)
{
    fake_lock();
    for (fake_stream *s = streams; s; s = s->next)
        fake_run_until(s, s->submitted);
    fake_unlock();
}

void fake_cuda_run(void *stream)
{
    fake_lock();
    fake_run_until(stream, ((fake_stream *)stream)->submitted);
    fake_unlock();
}

typedef struct {
    void *to;
    const void *from;
    size_t size;
} reading;

static int run_reading(const fake_cuda_kernel *self, unsigned grid, unsigned block,
                       const void *args)
{
    const reading *r = args;
    (void)self, (void)grid, (void)block;
    if (fake_cuda_holds((uint64_t)(uintptr_t)r->from, r->size))
        memcpy(r->to, r->from, r->size);
    return 0;
}

void fake_cuda_read(void *stream, void *to, const void *from, size_t size)
{
    static const fake_cuda_kernel reader = {
        .name = "reader", .args_size = sizeof(reading), .run = run_reading};
    reading args = {to, from, size};
    fake_lock();
    fake_submit(stream, (fake_op){.kind = FAKE_LAUNCH, .kernel = &reader, .args = &args});
    fake_unlock();
}

int fake_capturing(void)
{
    for (const fake_stream *s = streams; s; s = s->next)
        if (s->capture)
            return 1;
    return 0;
}

void fake_cuda_begin_capture(void *stream)
{
    fake_stream *captured = stream;
    fake_lock();
    captured->capture = ++captures;
    captured->graph = calloc(1, sizeof *captured->graph);
    if (!captured->graph)
        abort();
    captured->graph->last = &captured->graph->first;
    fake_unlock();
}

void fake_cuda_join_capture(void *stream, void *captured)
{
    fake_stream *joining = stream;
    const fake_stream *other = captured;
    fake_lock();
    joining->capture = other->capture;
    joining->graph = other->graph;
    fake_unlock();
}

void *fake_cuda_end_capture(void *stream)
{
    const fake_stream *captured = stream;
    fake_lock();
    const uint64_t capture = captured->capture;
    for (fake_stream *s = streams; s; s = s->next)
        if (s->capture == capture)
            s->capture = 0;
    void *graph = captured->graph;
    fake_unlock();
    return graph;
}

void fake_cuda_replay(void *graph, void *stream)
{
    fake_lock();
    for (const fake_op *op = ((fake_graph *)graph)->first; op; op = op->next)
        fake_submit(stream, *op);
    fake_unlock();
}

size_t fake_objects;
__thread int fake_dropping;

void fake_drop(fake_object *dropped)
{
    fake_dropping = 1;
    dropped->gone(dropped->object);
    fake_dropping = 0;
    free(dropped);
    fake_objects--;
}

void fake_cuda_free_graph(void *graph)
{
    fake_graph *freed = graph;
    for (fake_op *op = freed->first, *next; op; op = next) {
        next = op->next;
        free(op->args);
        free(op);
    }
    fake_lock();
    for (fake_object *object = freed->objects, *next; object; object = next) {
        next = object->next;
        fake_drop(object);
    }
    fake_unlock();
    free(freed);
}
