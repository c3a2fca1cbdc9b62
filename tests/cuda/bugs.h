/* bugs.h - what the kernels of bugs.cu are launched with. */
#ifndef TEST_CUDA_BUGS_H
#define TEST_CUDA_BUGS_H

#include "base/device.h"

typedef struct {
    double *numbers;
    uint32_t *ticket;
    unsigned right; /* chooses how the mistake is made, or that it is not */
} bug_launch;

typedef struct {
    double values[FST_DEVICE_BLOCK];
    int last;
} bug_shared;

#endif
