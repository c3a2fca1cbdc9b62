/* common.h - what several test programs need: random numbers, arrays of any type and layout whose
 * elements are read and written one at a time, and the levels that this CPU runs. */
#pragma once

#include <stdlib.h>

#include "base/portable.h"
#include "check.h"
#include "cpu/kernels.h"

enum { MAX_LEVELS = 8 };

static const char *const dtype_names[] = {"fp32", "fp64", "bf16", "fp16", "uint8", "int8", "int16"};

static inline void *must_alloc(size_t size)
{
    void *memory = malloc(size ? size : 1);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", size);
        exit(1);
    }
    return memory;
}

static inline void *must_copy(const void *from, size_t size)
{
    return memcpy(must_alloc(size), from, size);
}

/* SplitMix64 (Steele, Lea & Flood 2014); every program starts from the same seed. */
static inline uint64_t random_bits(void)
{
    static uint64_t state = 20;
    uint64_t z = state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline size_t random_below(size_t limit)
{
    return (size_t)(random_bits() % limit);
}

/* Between -1 and 1. */
static inline double random_unit(void)
{
    return (double)(int64_t)random_bits() * 0x1p-63;
}

/* Mostly between -1 and 1; now and then of any size, or a value that is easy to get wrong. */
static inline double random_value(void)
{
    static const double special[] = {0.0,       -0.0,    INFINITY, -INFINITY, NAN,     3e38,
                                     -65504.0,  0x1p-24, 0x1p-149, -0x1p-126, 0x1p-14, 1e-40,
                                     0x1.8p-25, 65519.0, 1e19,     -1e30,     1.0};
    const size_t kind = random_below(16);
    if (kind == 0)
        return special[random_below(sizeof special / sizeof special[0])];
    return kind == 1 ? ldexp(random_unit(), (int)random_below(200) - 100) : random_unit();
}

static inline double random_positive(void)
{
    return fabs(random_value());
}

/* Any remainder of a bf16 number. */
static inline double random_remainder(void)
{
    return (double)(int16_t)random_bits();
}

static inline double load_value(const void *at, fst_dtype dtype)
{
    float narrow;
    double wide;
    uint16_t half;
    if ((int)dtype == FST_I16) {
        memcpy(&half, at, sizeof half);
        return (double)(int16_t)half;
    }
    switch (dtype) {
    case FST_F32:
        memcpy(&narrow, at, sizeof narrow);
        return (double)narrow;
    case FST_F64:
        memcpy(&wide, at, sizeof wide);
        return wide;
    case FST_BF16:
    case FST_F16:
    default:
        memcpy(&half, at, sizeof half);
        return (double)(dtype == FST_BF16 ? fst_bf16_to_f32(half) : fst_f16_to_f32(half));
    }
}

static inline void store_value(void *at, fst_dtype dtype, double value)
{
    const float narrow = (float)value;
    const uint16_t half = (int)dtype == FST_I16 ? (uint16_t)(int16_t)value
                          : dtype == FST_BF16   ? fst_f32_to_bf16(narrow)
                                                : fst_f32_to_f16(narrow);
    if (dtype == FST_F64)
        memcpy(at, &value, sizeof value);
    else if (dtype == FST_F32)
        memcpy(at, &narrow, sizeof narrow);
    else
        memcpy(at, &half, sizeof half);
}

typedef enum {
    FLAT,               /* one element after another, aligned to no more than an element */
    STRIDED,            /* every third element */
    NEGATED,            /* one element after another, each with its sign flipped */
    TRANSPOSED,         /* rows of seven, stored by columns */
    NEGATED_TRANSPOSED, /* the same with every sign flipped */
    EXPANDED,           /* one row of seven, seen again and again: to be read only */
    ARRANGEMENTS,
} arrangement;

/* Elements with a layout, in memory that ends with the last one, so that AddressSanitizer sees a
 * step too far. Use by pointer only: op points to layout. */
typedef struct {
    fst_operand op;
    fst_layout layout;
    unsigned char *memory;
    size_t size, lead; /* bytes; of them before the first element */
    int64_t count;
} array;

/* `count` elements, rounded up to whole rows of seven where the arrangement has rows. */
static inline array *array_new(fst_dtype dtype, arrangement how, int64_t count)
{
    array *a = must_alloc(sizeof *a);
    const int64_t rows = (count + 6) / 7;
    int64_t last = count - 1;
    *a = (array){.count = how < TRANSPOSED ? count : rows * 7};
    if (how == STRIDED) {
        a->layout = (fst_layout){.ndim = 1, .shape = {count}, .stride = {3}};
        last *= 3;
    } else if (how == NEGATED) {
        a->layout = (fst_layout){.ndim = 1, .shape = {count}, .stride = {1}};
    } else if (how != FLAT) {
        a->layout = (fst_layout){.ndim = 2, .shape = {rows, 7}, .stride = {1, rows}};
        if (how == EXPANDED)
            memcpy(a->layout.stride, (int64_t[]){0, 1}, 2 * sizeof(int64_t));
        last = how == EXPANDED ? 6 : a->count - 1;
    }
    a->layout.negated = how == NEGATED || how == NEGATED_TRANSPOSED;
    const size_t element = fst_dtype_size(dtype);
    a->lead = element;
    a->size = ((size_t)last + 2) * element;
    a->memory = must_alloc(a->size);
    memset(a->memory, 0, a->size);
    a->op.data = a->memory + element;
    a->op.layout = how == FLAT ? NULL : &a->layout;
    a->op.dtype = dtype;
    return a;
}

/* One element after another from an address that is a multiple of 16 on. */
static inline array *array_new_aligned(fst_dtype dtype, int64_t count)
{
    array *a = array_new(dtype, FLAT, count);
    a->lead = 16;
    a->size = a->lead + (size_t)count * fst_dtype_size(dtype);
    free(a->memory);
    a->memory = must_alloc(a->size);
    memset(a->memory, 0, a->size);
    a->op.data = a->memory + a->lead;
    return a;
}

static inline array *array_clone(const array *from)
{
    array *a = must_copy(from, sizeof *from);
    a->memory = must_copy(from->memory, from->size);
    a->op.data = a->memory + a->lead;
    a->op.layout = from->op.layout ? &a->layout : NULL;
    if (from->op.scales)
        a->op.scales = (uint16_t *)(void *)(a->memory + ((const unsigned char *)from->op.scales -
                                                         from->memory));
    return a;
}

static inline void array_free(array *a)
{
    if (a)
        free(a->memory);
    free(a);
}

/* Where element i of an operand lies, in elements. */
static inline int64_t offset_of(const fst_operand *op, int64_t i)
{
    int64_t offset = 0;
    if (!op->layout)
        return i;
    for (int d = op->layout->ndim; d-- > 0; i /= op->layout->shape[d])
        offset += i % op->layout->shape[d] * op->layout->stride[d];
    return offset;
}

static inline char *element_at(const fst_operand *op, int64_t i)
{
    return (char *)op->data + offset_of(op, i) * (int64_t)fst_dtype_size(op->dtype);
}

static inline double signed_as_in(const fst_operand *op, double value)
{
    return op->layout && op->layout->negated ? -value : value;
}

static inline double get(const fst_operand *op, int64_t i)
{
    return signed_as_in(op, load_value(element_at(op, i), op->dtype));
}

static inline void set(const fst_operand *op, int64_t i, double value)
{
    store_value(element_at(op, i), op->dtype, signed_as_in(op, value));
}

/* Random bytes between the elements too: nobody may write there. */
static inline void array_fill(array *a, double (*value)(void))
{
    for (size_t i = 0; i < a->size; i++)
        a->memory[i] = (unsigned char)random_bits();
    for (int64_t i = 0; i < a->count; i++)
        set(&a->op, i, value());
}

/* The same bits in the whole memory; but a NaN may be any NaN, as neither IEEE 754 nor C says which
 * of two NaNs an operation hands on. */
static inline int same_memory(const array *a, const array *b)
{
    const size_t element = fst_dtype_size(a->op.dtype);
    if (a->size != b->size)
        return 0;
    if (a->op.scales)
        return !memcmp(a->memory, b->memory, a->size);
    for (size_t at = 0; at < a->size; at += element) {
        const void *left = a->memory + at, *right = b->memory + at;
        if (memcmp(left, right, element) &&
            !(isnan(load_value(left, a->op.dtype)) && isnan(load_value(right, a->op.dtype))))
            return 0;
    }
    return 1;
}

/* The same bits, or both NaN. */
static inline int same_double(double a, double b)
{
    return !memcmp(&a, &b, sizeof a) || (isnan(a) && isnan(b));
}

/* The compiled levels that this CPU runs, base first; returns how many. */
static inline size_t supported_levels(const fst_cpu_kernels *levels[MAX_LEVELS])
{
    const char *name;
    size_t count = 0;
    for (size_t i = 0; i < MAX_LEVELS; i++) {
        int supported = 0;
        if ((name = fst_cpu_level(i, &supported)) && supported)
            levels[count++] = fst_cpu_select(name);
    }
    return count;
}

/* The sanitizers' malloc must fail as others do, where a test asks for too much. */
#define MALLOC_OF(sanitizer)                                                                  \
    __attribute__((visibility("default"))) const char *__##sanitizer##_default_options(void); \
    const char *__##sanitizer##_default_options(void)                                         \
    {                                                                                         \
        return "allocator_may_return_null=1";                                                 \
    }
#define MALLOC_MAY_FAIL MALLOC_OF(asan) MALLOC_OF(tsan)
