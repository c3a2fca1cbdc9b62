/* brief.h - the tables of a short list of tensors inside a launch struct, for passes that leave
 * nothing in the tables: they need no memory of the device. Calls no driver. */
#pragma once

#include <stddef.h>

#include "base/device.h"
#include "base/work.h"

/* Bytes that fst_gpu_brief_put writes, or SIZE_MAX where it cannot or they are more than `most`. */
size_t fst_gpu_brief_size(const fst_work *work, size_t most);

/* Writes operands, layouts and runs into a launch struct, from its byte `at` on. Returns the
 * tables for a launch over all chunks. */
fst_device_tables fst_gpu_brief_put(const fst_work *work, void *launch, size_t at);
