/* isa.h - functions that the files compiled once per instruction set, FST_ISA, call of each
 * other. */
#pragma once

#include "base/image_sample.h"
#include "base/widen.h"
#include "base/work.h"
#include "cpu/factored.h"
#include "cpu/loss_rows.h"
#include "rules/codes.h"

#define FST_JOIN(name, isa) name##_##isa
#define FST_JOIN_VALUES(name, isa) FST_JOIN(name, isa)
#define FST_OF_ISA(name) FST_JOIN_VALUES(name, FST_ISA)

/* As in fst_cpu_kernels (kernels.h). */
void FST_OF_ISA(fst_image_rows)(const fst_image_batch *batch, int64_t begin, int64_t end,
                                void *scratch);
void FST_OF_ISA(fst_image_split)(size_t count, uint8_t *planes, const uint8_t *pixels);
void FST_OF_ISA(fst_floats)(const fst_float_form *form, char *restrict to,
                            const char *restrict from, size_t first, size_t count);
extern const fst_widen_loops FST_OF_ISA(fst_widen_loops);
void FST_OF_ISA(fst_loss_rows)(const fst_loss_batch *batch, int64_t begin, int64_t end);
extern const fst_factored_loops FST_OF_ISA(fst_factored_loops)[2];

/* Converts the blocks of elements [at, at + n) of a state in codes to floats, or with `into` back.
 * Both ends are ends of blocks. */
void FST_OF_ISA(fst_convert_codes)(const fst_operand *op, float *strip, int64_t at, size_t n,
                                   int into);
