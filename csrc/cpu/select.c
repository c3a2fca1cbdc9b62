/* Chooses the kernels. Compiled without -m flags, as it must run on any CPU. */
#include "cpu/kernels.h"

const fst_cpu_kernels *fst_cpu;

static int runs_base(void)
{
    return 1;
}

/* __builtin_cpu_supports asks CPUID and whether the system saves the registers (XGETBV). */
#ifdef FST_HAVE_AVX2
static int runs_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}
#endif
#ifdef FST_HAVE_AVX512
static int runs_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

static const struct {
    const fst_cpu_kernels *kernels;
    int (*runs)(void);
} levels[] = {
    {&fst_cpu_kernels_base, runs_base},
#ifdef FST_HAVE_AVX2
    {&fst_cpu_kernels_avx2, runs_avx2},
#endif
#ifdef FST_HAVE_AVX512
    {&fst_cpu_kernels_avx512, runs_avx512},
#endif
};

enum { LEVELS = sizeof levels / sizeof levels[0] };

const fst_cpu_kernels *fst_cpu_select(const char *name)
{
    for (size_t i = LEVELS; i-- > 0;)
        if (levels[i].runs() && (!name || !strcmp(name, levels[i].kernels->name)))
            return levels[i].kernels;
    return NULL;
}

const char *fst_cpu_level(size_t index, int *supported)
{
    if (index >= LEVELS)
        return NULL;
    *supported = levels[index].runs();
    return levels[index].kernels->name;
}
