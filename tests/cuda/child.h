/* child.h - runs this program again with other arguments, to see how it ends. */
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

/* The exit status of `program first second`, whose output is thrown away; 128 and more: a signal.
 */
static inline int status_of_child(const char *program, const char *first, const char *second)
{
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        const int nowhere = open("/dev/null", O_WRONLY);
        dup2(nowhere, 1);
        dup2(nowhere, 2);
        execl(program, program, first, second, (char *)NULL);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
