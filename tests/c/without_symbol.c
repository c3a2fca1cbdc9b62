/* A library to preload: the program does not find the symbol that WITHOUT_SYMBOL names, as if the
 * library that it asks had none. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef void *(*lookup_fn)(void *handle, const char *name);

static lookup_fn its_own(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    void *found = NULL;
    for (size_t i = 0; !found && i < sizeof versions / sizeof *versions; i++)
        found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    lookup_fn lookup;
    memcpy(&lookup, &found, sizeof lookup);
    return lookup;
}

void *dlsym(void *restrict handle, const char *restrict name)
{
    static lookup_fn lookup;
    const char *missing = getenv("WITHOUT_SYMBOL");
    if (!lookup)
        lookup = its_own();
    return lookup(handle, missing && !strcmp(name, missing) ? "a symbol that nobody has" : name);
}
