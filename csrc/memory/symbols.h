/* symbols.h - the words in which a loaded library keeps the addresses of functions it calls. */
#pragma once

#include <stddef.h>

typedef struct {
    void **at;       /* the word */
    void *read_only; /* the pages that the loader has made read-only; NULL: none */
    size_t read_bytes;
} fst_symbol_slot;

/* Finds the words of a loaded library, by the end of its file's name or by an address in it, that
 * hold the address of the function `symbol`. Returns how many; more than `most` are not noted. */
size_t fst_symbol_slots(const char *library, const void *inside, const char *symbol,
                        fst_symbol_slot *found, size_t most);

/* Writes a function's address to the word. Returns 0, or the system's errno. */
int fst_symbol_set(const fst_symbol_slot *slot, void *function);
