/* threads.h - starts a thread. It takes no signals but those of its own faults: others are for
 * threads of the program, which may wait for them. */
#pragma once

#include <pthread.h>
#include <signal.h>

/* Returns 0, or the system's errno. Needs _GNU_SOURCE for the name, of at most 15 bytes. */
static inline int fst_thread_start(pthread_t *id, const char *name, void *(*run)(void *),
                                   void *argument)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t others, before;
    sigfillset(&others);
    for (unsigned i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    const int error = pthread_create(id, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#ifdef __linux__
    if (!error)
        pthread_setname_np(*id, name);
#endif
    return error;
}
