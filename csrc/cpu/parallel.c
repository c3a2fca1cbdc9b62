#include "cpu/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

typedef int32_t (*parallel_fn)(int64_t begin, int64_t end, int64_t grain, fst_range_fn fn,
                               void *context);

static parallel_fn torch_parallel_for;

static void forget_threads(void)
{
    torch_parallel_for = NULL;
}

int fst_parallel_init(const char *path)
{
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!library)
        return 0;
    void *symbol = dlsym(library, "torch_parallel_for");
    dlclose(library); /* torch itself keeps it loaded */
    if (!symbol)
        return 0;
    if (!torch_parallel_for && pthread_atfork(NULL, NULL, forget_threads))
        return 0;
    *(void **)&torch_parallel_for = symbol;
    return 1;
}

const char *fst_parallel_name(void)
{
    return torch_parallel_for ? "torch_parallel_for" : "calling thread";
}

fst_code fst_parallel_for(int64_t end, int64_t grain, fst_range_fn fn, void *context,
                          fst_status *status)
{
    if (end <= 0)
        return FST_OK;
    if (!torch_parallel_for || end <= grain) {
        fn(0, end, context);
        return FST_OK;
    }
    if (torch_parallel_for(0, end, grain, fn, context))
        return fst_fail(status, FST_UNSUPPORTED, "torch_parallel_for failed");
    return FST_OK;
}
