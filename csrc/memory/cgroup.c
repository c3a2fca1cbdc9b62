#include "memory/cgroup.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fst_cgroup_at(fst_cgroup *group, const char *folder, int version)
{
    static const char *const names[2][5] = {
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "\ntotal_inactive_file ",
         "\ntotal_active_file "},
        {"memory.max", "memory.current", "memory.stat", "\ninactive_file ", "\nactive_file "},
    };
    const char *const *name = names[version == 2];
    char *paths[] = {group->limit, group->current, group->stat};
    for (int i = 0; i < 3; i++) {
        const int length = snprintf(paths[i], sizeof group->limit, "%s/%s", folder, name[i]);
        if (length < 0 || (size_t)length >= sizeof group->limit)
            return -1;
    }
    group->cache[0] = name[3];
    group->cache[1] = name[4];
    return 0;
}

/* Reads the beginning of a file after a line end. Returns 0, or -1. Takes no memory. */
static int read_text(const char *path, char *text, size_t room)
{
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -1;
    text[0] = '\n';
    const ssize_t got = read(file, text + 1, room - 2);
    close(file);
    text[got > 0 ? 1 + got : 0] = 0;
    return got > 0 ? 0 : -1;
}

static size_t read_bytes(const char *path)
{
    char text[64], *end;
    if (read_text(path, text, sizeof text))
        return SIZE_MAX;
    const unsigned long long bytes = strtoull(text, &end, 10);
    return end != text && *end == '\n' ? (size_t)bytes : SIZE_MAX; /* "max" is not a number */
}

/* The page cache of files, which the kernel drops before it refuses memory. */
static size_t cached(const fst_cgroup *group)
{
    char text[8192];
    size_t bytes = 0;
    if (read_text(group->stat, text, sizeof text))
        return 0;
    for (int i = 0; i < 2; i++) {
        const char *line = strstr(text, group->cache[i]);
        bytes += line ? (size_t)strtoull(line + strlen(group->cache[i]), NULL, 10) : 0;
    }
    return bytes;
}

fst_cgroup_memory fst_cgroup_read(const fst_cgroup *group)
{
    fst_cgroup_memory memory = {read_bytes(group->limit), SIZE_MAX};
    const size_t used = memory.limit == SIZE_MAX ? SIZE_MAX : read_bytes(group->current);
    if (used == SIZE_MAX)
        return memory;
    memory.left = used < memory.limit ? memory.limit - used : 0;
    if (memory.left < memory.limit / 8) { /* the other file costs the kernel more */
        const size_t files = cached(group);
        const size_t really = used > files ? used - files : 0;
        memory.left = really < memory.limit ? memory.limit - really : 0;
    }
    return memory;
}
