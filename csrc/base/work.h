/* work.h - what a pass works on, as plain data that every backend reads.
 *
 * A span is a number of elements that the operands of one parameter have in common. The operands
 * are parameter, gradient, states and so on; each has its own dtype and, if its strides differ,
 * its own layout. Spans are cut into chunks of at most FST_CHUNK elements. The chunk list covers
 * all spans. Its order and the chunk size are fixed, so partial sums are the same for every
 * number of threads. */
#pragma once

#include <stdint.h>

#include "base/dtype.h"

enum {
    FST_CHUNK = 16384,   /* elements: the four fp32 operands of Adam fill half of a 512 KiB L2 */
    FST_CHUNK_COST = 64, /* fixed cost of a chunk, in elements */
    FST_MAX_DIMS = 64,
    FST_MAX_STATES = 3,
};

/* Operands of a span in an update pass; other passes have one operand per span. An operand
 * without data is absent. If MASTER is present the rule updates it, and PARAM receives it rounded
 * to its own dtype. An element of PARAM that is not MASTER's rounded was written by somebody else
 * since: the rule begins with it. MASTER may also be the remainder of a bf16 parameter, of type
 * FST_I16: then the two together are the fp32 number that the rule updates (portable.h). */
enum {
    FST_OP_PARAM,
    FST_OP_GRAD,
    FST_OP_MASTER,
    FST_OP_STATE,
    FST_OP_COUNT = FST_OP_STATE + FST_MAX_STATES,
};

/* Where the elements of an operand lie, in the span's order of iteration. The last dimension is
 * the innermost. Strides are in elements and may be 0. With `negated`, as in a lazily negated
 * view, the memory holds the elements with their signs flipped. */
typedef struct {
    int ndim;
    int64_t shape[FST_MAX_DIMS];
    int64_t stride[FST_MAX_DIMS];
    int negated;
} fst_layout;

typedef struct {
    void *data;
    const fst_layout *layout; /* NULL: the elements lie one after another, as they are */
    fst_dtype dtype;
    uint32_t row;     /* of a state in codes, which has no layout: see rules/codes.h */
    uint16_t *scales; /* NULL: the operand is not in codes */
} fst_operand;

/* Whether an operand is the remainder of a bf16 parameter. */
static inline int fst_is_remainder(const fst_operand *op)
{
    return (int)op->dtype == FST_I16;
}

/* The elements of a span that is a part of a larger one are counted from the beginning of that: its
 * first is `begin`, and its operands have data from there on, and no layouts. */
typedef struct {
    int64_t count; /* elements */
    uint32_t args; /* index of the arguments of an update pass */
    int64_t begin;
} fst_span;

typedef struct {
    int64_t begin; /* first element, counted as those of the span */
    uint64_t cost; /* cost of all chunks before this one: threads share the list by cost */
    uint32_t span;
    uint32_t count;
} fst_chunk;

/* A pass. Chunks [rounds[r], rounds[r + 1]) write disjoint memory and may run in any order;
 * rounds run one after another. There is more than one round only if parameters share memory. */
typedef struct {
    const fst_span *spans;
    const fst_operand *operands; /* operand k of span i at [i * width + k] */
    const fst_chunk *chunks;     /* chunk_count + 1: the last one only holds the total cost */
    const uint32_t *rounds;      /* round_count + 1 */
    size_t span_count, chunk_count, round_count;
    uint64_t serial; /* of the chunk list: no two lists have the same; 0: unknown */
    unsigned width;
} fst_work;
