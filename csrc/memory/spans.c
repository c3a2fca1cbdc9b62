#include "memory/spans.h"

enum { MOST_LOOKS = 32 }; /* spans of one bin that a search compares */

/* Bins 0..7 hold spans of 1..8 pages; each doubling above has 8 bins. */
static uint32_t bin_of(uint32_t pages)
{
    if (pages <= 8)
        return pages - 1;
    const uint32_t power = 31u - (uint32_t)__builtin_clz(pages);
    return (power - 2) * 8 + ((pages >> (power - 3)) & 7u);
}

static void mark(fst_spans *spans, uint32_t page, uint32_t pages, fst_span_kind kind)
{
    fst_span *first = &spans->at[page], *last = &spans->at[page + pages - 1];
    first->kind = last->kind = kind;
    first->pages = last->pages = kind == FST_SPAN_NONE ? 0 : pages;
}

/* The pages of a span outside the huge pages that it fills. */
static uint32_t loose_pages(uint32_t page, uint32_t pages)
{
    const uint32_t first = (page + FST_SPAN_HUGE - 1) / FST_SPAN_HUGE;
    const uint32_t end = (page + pages) / FST_SPAN_HUGE;
    return end > first ? pages - (end - first) * FST_SPAN_HUGE : pages;
}

static void add_to_ages(fst_spans *spans, uint32_t page)
{
    fst_span *span = &spans->at[page];
    span->newer = 0;
    span->older = spans->newest;
    if (spans->newest)
        spans->at[spans->newest].newer = page;
    else
        spans->oldest = page;
    spans->newest = page;
}

static void remove_from_ages(fst_spans *spans, const fst_span *span)
{
    if (span->newer)
        spans->at[span->newer].older = span->older;
    else
        spans->newest = span->older;
    if (span->older)
        spans->at[span->older].newer = span->newer;
    else
        spans->oldest = span->newer;
}

void fst_spans_add(fst_spans *spans, uint32_t page, uint32_t pages, fst_span_kind kind)
{
    mark(spans, page, pages, kind);
    spans->count[kind]++;
    if (kind == FST_SPAN_USED)
        return;
    const uint32_t bin = bin_of(pages);
    fst_span *span = &spans->at[page];
    uint32_t *first = &spans->bins[kind].first[bin];
    span->previous = 0;
    span->next = *first;
    if (*first)
        spans->at[*first].previous = page;
    *first = page;
    spans->bins[kind].filled[bin / 64] |= UINT64_C(1) << bin % 64;
    if (kind == FST_SPAN_KEPT) {
        spans->loose += loose_pages(page, pages);
        add_to_ages(spans, page);
    }
}

void fst_spans_remove(fst_spans *spans, uint32_t page)
{
    const fst_span span = spans->at[page];
    const uint32_t bin = bin_of(span.pages);
    mark(spans, page, span.pages, FST_SPAN_NONE);
    spans->count[span.kind]--;
    if (span.kind == FST_SPAN_USED)
        return;
    if (span.next)
        spans->at[span.next].previous = span.previous;
    if (span.previous)
        spans->at[span.previous].next = span.next;
    else if (!(spans->bins[span.kind].first[bin] = span.next))
        spans->bins[span.kind].filled[bin / 64] &= ~(UINT64_C(1) << bin % 64);
    if (span.kind == FST_SPAN_KEPT) {
        spans->loose -= loose_pages(page, span.pages);
        remove_from_ages(spans, &span);
    }
}

/* The smallest of the first spans of a bin that are large enough; of equal ones the lowest. */
static uint32_t best_of(const fst_spans *spans, uint32_t page, uint32_t pages)
{
    uint32_t best = 0;
    for (int looks = 0; page && looks < MOST_LOOKS; page = spans->at[page].next, looks++) {
        const uint32_t has = spans->at[page].pages, least = best ? spans->at[best].pages : 0;
        if (has >= pages && (!best || has < least || (has == least && page < best)))
            best = page;
    }
    return best;
}

uint32_t fst_spans_find(const fst_spans *spans, uint32_t pages, fst_span_kind kind)
{
    const uint64_t *filled = spans->bins[kind].filled;
    uint32_t bin = bin_of(pages);
    const uint32_t found = best_of(spans, spans->bins[kind].first[bin], pages);
    if (found || ++bin == FST_SPAN_BINS)
        return found;
    uint64_t word = filled[bin / 64] & (UINT64_MAX << bin % 64);
    for (uint32_t i = bin / 64;; word = filled[i]) {
        if (word) {
            bin = i * 64 + (uint32_t)__builtin_ctzll(word);
            return best_of(spans, spans->bins[kind].first[bin], pages);
        }
        if (++i == FST_SPAN_BINS / 64)
            return 0;
    }
}
