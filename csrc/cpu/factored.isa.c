/* The loops of Adafactor, compiled once per instruction set, as kernels.isa.c. In a file of their
 * own they leave what the compiler inlines into the other loops as it is. */
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/lanes.h"
#include "cpu/strided.h"

#define ALIGNED __attribute__((aligned(64)))
enum { STRIP = FST_LANES }; /* elements that are worked on at a time */

#define REAL float
#define OTHER double
#define FST_T(name) name##_f32
#define FST_SQRT sqrtf
#include "cpu/strip.h"
#include "cpu/factored_loops.h"
#include "cpu/factored_tiles.h"
#undef FST_SQRT
#undef REAL
#undef OTHER
#undef FST_T

#define REAL double
#define OTHER float
#define FST_T(name) name##_f64
#define FST_SQRT sqrt
#include "cpu/strip.h"
#include "cpu/factored_loops.h"
#include "cpu/factored_tiles.h"
#undef FST_SQRT
#undef REAL
#undef OTHER
#undef FST_T

#define LOOPS(suffix)                                                                       \
    {measure_factored_##suffix, settle_factored_##suffix, measure_factored_update_##suffix, \
     write_factored_##suffix}

const fst_factored_loops FST_OF_ISA(fst_factored_loops)[2] = {LOOPS(f32), LOOPS(f64)};
