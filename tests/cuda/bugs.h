/* bugs.h - what the kernels of bugs.cu are launched with. */
#pragma once

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
