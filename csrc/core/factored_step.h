/* factored_step.h - a step of Adafactor for many parameters in CPU memory. */
#pragma once

#include "base/status.h"
#include "cpu/kernels.h"

/* Makes the step of parameters that share no memory. Of each, the operands, the counts and the
 * numbers of the step are set. Their count is above 0. Without memory nothing is written. */
fst_code fst_factored_step(fst_factored *params, size_t count, fst_status *status);
