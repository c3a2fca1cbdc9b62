#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

fst_code fst_fail(fst_status *status, fst_code code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(status->message, sizeof status->message, format, arguments);
    va_end(arguments);
    return status->code = code;
}
