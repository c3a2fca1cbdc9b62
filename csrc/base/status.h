/* status.h - errors as values: a code, and a message for the user. */
#pragma once

typedef enum {
    FST_OK = 0,
    FST_NO_MEMORY,
    FST_BAD_VALUE,
    FST_UNSUPPORTED,
    FST_DEVICE_FAILED, /* a call of a device's driver returned an error */
    FST_DEVICE_LOST,   /* the same, and so will every later call in this process */
} fst_code;

typedef struct {
    fst_code code;
    int device_error; /* what a device's driver returned, 0 if it did not fail */
    char message[400];
} fst_status;

/* Records code and a printf-style message in `status` and returns the code. */
fst_code fst_fail(fst_status *status, fst_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
