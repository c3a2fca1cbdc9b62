/* A library that stands in for torch's: torch_parallel_for on threads of its own, made for each
 * call and all let go at once, so that ThreadSanitizer sees what a pool would do. */
#include <pthread.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef void (*range_fn)(int64_t begin, int64_t end, void *context);

enum { MAX_THREADS = 16 };

/* What a test sets and reads. */
EXPORT int fake_torch_threads = 4;
EXPORT int fake_torch_fails = 0;
EXPORT int fake_torch_late = 0; /* each thread starts when the one before has ended */
EXPORT long fake_torch_calls = 0;

EXPORT int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, range_fn fn,
                                  void *context);

typedef struct {
    int64_t begin, end;
    range_fn fn;
    void *context;
    pthread_barrier_t *start;
} part;

static void *run_part(void *argument)
{
    const part *mine = argument;
    pthread_barrier_wait(mine->start);
    mine->fn(mine->begin, mine->end, mine->context);
    return NULL;
}

/* As torch does it: as many parts as threads, but none smaller than the grain; the caller works on
 * one of them. */
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, range_fn fn, void *context)
{
    const int64_t threads = fake_torch_threads, length = end - begin;
    const int64_t fair = (length + threads - 1) / threads, size = fair > grain ? fair : grain;
    const int64_t count = (length + size - 1) / size;
    pthread_barrier_t start;
    pthread_t thread[MAX_THREADS];
    part parts[MAX_THREADS];
    __atomic_fetch_add(&fake_torch_calls, 1, __ATOMIC_RELAXED);
    if (fake_torch_fails || count > MAX_THREADS ||
        pthread_barrier_init(&start, NULL, (unsigned)count))
        return 1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = begin + i * size, to = i + 1 < count ? from + size : end;
        if (fake_torch_late) {
            fn(from, to, context);
            continue;
        }
        parts[i] = (part){from, to, fn, context, &start};
        if (i > 0 && pthread_create(&thread[i], NULL, run_part, &parts[i]))
            __builtin_trap(); /* the others wait at the barrier for ever */
    }
    if (!fake_torch_late)
        run_part(&parts[0]);
    for (int64_t i = 1; i < count && !fake_torch_late; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&start);
    return 0;
}
