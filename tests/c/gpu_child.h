/* gpu_child.h - runs a part of a test in a process of its own: the driver is opened once in each.
 */
#pragma once

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* The child's checks count as one of the parent's. */
static inline void in_child(void (*part)(void *), void *argument, const char *what)
{
    const long failed_before = checks_failed;
    int status = 0;
    fflush(stderr);
    const pid_t child = fork();
    if (child == 0) {
        part(argument);
        exit(checks_failed > failed_before); /* not _exit: leaks are looked for there */
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (!CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0))
        fprintf(stderr, "    in a child: %s\n", what);
}
