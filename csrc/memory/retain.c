#define _GNU_SOURCE /* RTLD_DEFAULT, dladdr */
#include "memory/retain.h"

#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "memory/symbols.h"

enum {
    MOST_SLOTS = 8,
    CHECK_EVERY = 64 << 20, /* bytes taken or freed between two looks at the control group */
    GROUP_SHARE = 16,       /* of the group's limit stays free */
    HOLD_SHARE = 64,        /* of the machine's or the group's memory is held against the kernel */
    KEPT_BY_MALLOC = 64 << 20,
    BY_MAP = 32 << 20, /* as far as glibc goes by itself */
};

typedef int (*memalign_function)(void **, size_t, size_t);
typedef void (*free_function)(void *);

static struct {
    pthread_mutex_t lock; /* of what follows; the heap has its own */
    bool installed;       /* `free` is ours, for as long as the process lives */
    bool forks_known;
    fst_symbol_slot takers[MOST_SLOTS], givers[MOST_SLOTS];
    size_t taker_count, giver_count;
    size_t limit;
    size_t most; /* bytes of a block; the system may refuse larger ones, of the C library */
    memalign_function memalign;
    free_function free;
    _Atomic(bool) active;
    _Atomic(const fst_cgroup *) group;
    _Atomic(size_t) moved; /* bytes since the last look */
} retain = {.lock = PTHREAD_MUTEX_INITIALIZER, .limit = SIZE_MAX};

/* Gives back what is kept as far as the control group needs it. */
static void look_at_group(size_t bytes)
{
    const fst_cgroup *group = atomic_load_explicit(&retain.group, memory_order_acquire);
    if (!group || atomic_fetch_add(&retain.moved, bytes) + bytes < CHECK_EVERY)
        return;
    atomic_store(&retain.moved, 0);
    const fst_cgroup_memory memory = fst_cgroup_read(group);
    const size_t wanted = memory.limit / GROUP_SHARE + bytes;
    if (memory.left < wanted) {
        const size_t kept = fst_heap_count().kept, missing = wanted - memory.left;
        fst_heap_trim(kept > missing ? kept - missing : 0);
    }
}

static bool is_limited(int resource)
{
    struct rlimit limit;
    return !getrlimit(resource, &limit) && limit.rlim_cur != RLIM_INFINITY;
}

/* Whether the process was given a limit that what is kept counts against; a script may do so at any
 * time. */
static bool limits_data(void)
{
    return is_limited(RLIMIT_AS) || is_limited(RLIMIT_DATA);
}

static int take(void **out, size_t alignment, size_t size)
{
    if (size >= FST_RETAIN_LEAST && size <= retain.most && alignment <= FST_HEAP_PAGE &&
        atomic_load_explicit(&retain.active, memory_order_relaxed)) {
        look_at_group(size);
        void *block = fst_heap_take(size);
        if (block) {
            *out = block;
            return 0;
        }
    }
    const int error = retain.memalign(out, alignment, size);
    if (error == ENOMEM && fst_heap_trim(0))
        return retain.memalign(out, alignment, size);
    return error;
}

/* Leaves errno as it is, as glibc's does. */
static void give(void *block)
{
    const int before = errno;
    const size_t bytes = fst_heap_owns(block) ? fst_heap_give(block) : 0;
    if (!bytes)
        retain.free(block);
    else if (limits_data())
        fst_heap_trim(0);
    else
        look_at_group(bytes);
    errno = before;
}

static void before_fork(void)
{
    pthread_mutex_lock(&retain.lock);
    fst_heap_before_fork();
}

static void after_fork_in_parent(void)
{
    fst_heap_after_fork(false);
    pthread_mutex_unlock(&retain.lock);
}

static void after_fork_in_child(void)
{
    fst_heap_after_fork(true);
    pthread_mutex_unlock(&retain.lock);
}

const char *fst_retain_stranger(void)
{
    static Dl_info found; /* its file's name lives as long as the library */
    Dl_info libc;
    void *version = dlsym(RTLD_DEFAULT, "gnu_get_libc_version");
    if (!dladdr(dlsym(RTLD_DEFAULT, "malloc"), &found))
        return "an unknown library";
    if (!version || !dladdr(version, &libc) || libc.dli_fbase != found.dli_fbase)
        return found.dli_fname;
    return NULL;
}

static int set_all(const fst_symbol_slot *slots, size_t count, void *function)
{
    for (size_t i = 0; i < count; i++) {
        const int error = fst_symbol_set(&slots[i], function);
        if (error)
            return error;
    }
    return 0;
}

/* Adds the words of one library, which holds the address of both functions or is left alone. */
static void find_in(const char *library, const void *inside)
{
    fst_symbol_slot *takers = retain.takers + retain.taker_count;
    fst_symbol_slot *givers = retain.givers + retain.giver_count;
    const size_t room = MOST_SLOTS - retain.taker_count, space = MOST_SLOTS - retain.giver_count;
    const size_t taken = fst_symbol_slots(library, inside, "posix_memalign", takers, room);
    const size_t given = fst_symbol_slots(library, inside, "free", givers, space);
    if (taken && given && taken <= room && given <= space) {
        retain.taker_count += taken;
        retain.giver_count += given;
    }
}

static size_t memory_of_machine(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (size_t)pages * (size_t)size : (size_t)64 << 30;
}

/* Whether the system counts memory that nobody has written to. */
static bool counts_promises(void)
{
    FILE *file = fopen("/proc/sys/vm/overcommit_memory", "re");
    const int mode = file ? fgetc(file) : 0;
    if (file)
        fclose(file);
    return mode == '2';
}

/* Why nothing may be kept: memory that nobody uses counts, or cannot go back; NULL: it may. */
static const char *reason_against(void)
{
    if (sysconf(_SC_PAGESIZE) > FST_HEAP_PAGE)
        return "the system's pages are larger than 16 KiB";
    if (is_limited(RLIMIT_AS))
        return "the process has a limit of addresses (RLIMIT_AS, ulimit -v)";
    if (is_limited(RLIMIT_DATA))
        return "the process has a limit of data (RLIMIT_DATA, ulimit -d)";
    return counts_promises() ? "the system does not overcommit memory (vm.overcommit_memory is 2)"
                             : NULL;
}

/* What must happen once, and then holds until the process ends. */
static fst_code install(fst_status *status)
{
    retain.memalign = (memalign_function)(uintptr_t)dlsym(RTLD_DEFAULT, "posix_memalign");
    retain.free = (free_function)(uintptr_t)dlsym(RTLD_DEFAULT, "free");
    retain.taker_count = retain.giver_count = 0;
    find_in("libc10.so", NULL);
    if (!retain.taker_count)
        return fst_fail(status, FST_UNSUPPORTED,
                        "torch's libc10.so does not call posix_memalign and free");
    find_in(NULL, &retain); /* the loader's own blocks */
    const size_t memory = memory_of_machine(), most = (size_t)16 << 40;
    size_t bytes = memory < most / 8 ? memory * 8 : most;
    int error = fst_heap_open(bytes);
    for (; error == ENOMEM && bytes >> 30; bytes /= 2)
        error = fst_heap_open(bytes / 2);
    retain.most = memory / 2;
    if (error)
        return fst_fail(status, FST_NO_MEMORY, "no addresses for a heap: %s", strerror(error));
    if (!retain.forks_known)
        error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    retain.forks_known |= !error;
    if (!error)
        error = set_all(retain.givers, retain.giver_count, (void *)(uintptr_t)give);
    if (error)
        return fst_fail(status, FST_UNSUPPORTED, "free of torch cannot be replaced: %s",
                        strerror(error));
    retain.installed = true;
    return FST_OK;
}

static fst_code start(size_t limit, const fst_cgroup *group, fst_status *status)
{
    static fst_cgroup groups[2]; /* the other one may be in use */
    if (!retain.installed && install(status))
        return status->code;
    const fst_cgroup *old = atomic_load(&retain.group);
    fst_cgroup *next = old == &groups[0] ? &groups[1] : &groups[0];
    if (group)
        *next = *group;
    atomic_store(&retain.group, group ? next : NULL);
    retain.limit = limit;
    const size_t machine = memory_of_machine();
    const size_t most = group ? fst_cgroup_read(group).limit : machine;
    fst_heap_limit(limit);
    fst_heap_hold((most < machine ? most : machine) / HOLD_SHARE);
    const int error = set_all(retain.takers, retain.taker_count, (void *)(uintptr_t)take);
    if (error)
        return fst_fail(status, FST_UNSUPPORTED, "posix_memalign of torch cannot be replaced: %s",
                        strerror(error));
#ifdef M_TRIM_THRESHOLD /* smaller blocks, and those of other libraries */
    mallopt(M_MMAP_THRESHOLD, BY_MAP);
    mallopt(M_TRIM_THRESHOLD, limit < KEPT_BY_MALLOC ? (int)limit : KEPT_BY_MALLOC);
#endif
    atomic_store(&retain.active, true);
    return FST_OK;
}

fst_code fst_retain(size_t limit, const fst_cgroup *group, fst_status *status)
{
    const char *stranger = fst_retain_stranger();
    if (stranger)
        return fst_fail(status, FST_UNSUPPORTED, "malloc is that of %s, not glibc's", stranger);
    const char *reason = reason_against();
    if (reason)
        return fst_fail(status, FST_UNSUPPORTED, "%s", reason);
    pthread_mutex_lock(&retain.lock);
    const fst_code code = start(limit, group, status);
    pthread_mutex_unlock(&retain.lock);
    return code;
}

size_t fst_retain_release(void)
{
    const size_t gone = fst_heap_trim(0);
#ifdef M_TRIM_THRESHOLD
    malloc_trim(0);
#endif
    return gone;
}

size_t fst_retain_undo(void)
{
    pthread_mutex_lock(&retain.lock);
    if (atomic_load(&retain.active)) {
        atomic_store(&retain.active, false);
        atomic_store(&retain.group, NULL);
        set_all(retain.takers, retain.taker_count, (void *)(uintptr_t)retain.memalign);
        fst_heap_limit(0); /* blocks that are freed from now on */
#ifdef M_TRIM_THRESHOLD
        mallopt(M_MMAP_THRESHOLD, 128 << 10);
        mallopt(M_TRIM_THRESHOLD, 128 << 10);
#endif
    }
    pthread_mutex_unlock(&retain.lock);
    return fst_retain_release();
}

fst_retain_counts fst_retain_count(void)
{
    pthread_mutex_lock(&retain.lock);
    const fst_retain_counts counts = {atomic_load(&retain.active), retain.limit, fst_heap_count()};
    pthread_mutex_unlock(&retain.lock);
    return counts;
}
