/* cgroup.h - how much memory a control group still has. */
#pragma once

#include <stddef.h>

typedef struct {
    char limit[512], current[512], stat[512]; /* paths of its files */
    const char *cache[2]; /* the lines of `stat` with the bytes of files that can be dropped */
} fst_cgroup;

/* Bytes. SIZE_MAX: there is no limit, or the files cannot be read. */
typedef struct {
    size_t limit, left;
} fst_cgroup_memory;

/* The group in a folder with the files of version 2, or of version 1's memory controller.
 * Returns 0, or -1 for a path that is too long. */
int fst_cgroup_at(fst_cgroup *group, const char *folder, int version);

fst_cgroup_memory fst_cgroup_read(const fst_cgroup *group);
