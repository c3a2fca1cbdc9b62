/* spans.h - free spans of pages by size and by age, for heap.c only. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
    FST_SPAN_BINS = 256,
    FST_SPAN_HUGE = 128, /* pages of a huge page */
};

typedef enum {
    FST_SPAN_NONE = 0, /* no span begins or ends here */
    FST_SPAN_USED,
    FST_SPAN_KEPT,
    FST_SPAN_CLEAN, /* the system has its memory; not accessible */
} fst_span_kind;

/* What is noted at the first page of a span, and its kind and size at the last one too. Links
 * are numbers of first pages; 0 ends a list, so page 0 is never used. */
typedef struct {
    uint32_t kind, pages;
    uint32_t next, previous; /* of the same kind and bin */
    uint32_t newer, older;   /* of those that are kept */
} fst_span;

typedef struct {
    fst_span *at; /* by page */
    struct {
        uint32_t first[FST_SPAN_BINS];
        uint64_t filled[FST_SPAN_BINS / 64]; /* bit b: bin b has a span */
    } bins[4];                               /* by kind */
    uint32_t newest, oldest;
    size_t count[4]; /* spans, by kind */
    size_t loose;    /* pages of kept spans that fill no huge page */
} fst_spans;

/* Notes a span of this kind, in the lists of its kind. */
void fst_spans_add(fst_spans *spans, uint32_t page, uint32_t pages, fst_span_kind kind);

/* Takes a span out of its lists and forgets it. */
void fst_spans_remove(fst_spans *spans, uint32_t page);

/* A span of this kind with at least so many pages, nearly the smallest; 0 if there is none. */
uint32_t fst_spans_find(const fst_spans *spans, uint32_t pages, fst_span_kind kind);
