/* heap.h - a heap of large blocks that keeps the memory of freed ones for the next, up to a limit.
 *
 * One range of addresses is chosen once, and mapped as far as it is used. It is divided into pages
 * of FST_HEAP_PAGE bytes, and these into spans: a block, free memory that is kept, or free memory
 * that the system has back.
 * Every function may be called by any thread. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FST_HEAP_PAGE = 1 << 14 };

typedef struct {
    size_t used;   /* bytes of blocks */
    size_t kept;   /* bytes that are free and stay with the process */
    size_t peak;   /* the most bytes that blocks have had */
    size_t blocks; /* how many there are */
    size_t fresh;  /* bytes that the system was asked for, in all */
} fst_heap_counts;

/* Chooses `bytes` of addresses. Returns 0, or the system's errno; once it has returned 0, it
 * does nothing more. */
int fst_heap_open(size_t bytes);

/* A block of at least `size` bytes at a multiple of FST_HEAP_PAGE, or NULL. */
void *fst_heap_take(size_t size);

/* Whether the address lies in the heap. Does not wait. */
bool fst_heap_owns(const void *address);

/* Frees a block that fst_heap_take returned. Returns its bytes; 0 if no block begins there. */
size_t fst_heap_give(void *block);

/* At most so many bytes are kept from now on. Returns how many went back. */
size_t fst_heap_limit(size_t bytes);

/* At most so many bytes of blocks that are freed from now on are kept where the kernel cannot take
 * them when it is short of memory. */
void fst_heap_hold(size_t bytes);

/* Gives kept memory back to the system until `bytes` are left. Returns how many went back. */
size_t fst_heap_trim(size_t bytes);

fst_heap_counts fst_heap_count(void);

/* Around a fork. After it, the child has no kept memory of its parent's. */
void fst_heap_before_fork(void);
void fst_heap_after_fork(bool in_child);
