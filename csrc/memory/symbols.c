#define _GNU_SOURCE /* dl_iterate_phdr */
#include "memory/symbols.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { CALLED = R_X86_64_JUMP_SLOT, ADDRESSED = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { CALLED = R_AARCH64_JUMP_SLOT, ADDRESSED = R_AARCH64_GLOB_DAT };
#else
enum { CALLED = -1, ADDRESSED = -1 };
#endif

typedef struct {
    const char *library;
    const void *inside;
    const char *symbol;
    fst_symbol_slot *found;
    size_t most, count;
} search;

typedef struct {
    const ElfW(Sym) * symbols;
    const char *names;
    const ElfW(Rela) * calls, *others;
    size_t calls_bytes, others_bytes;
} tables;

static bool holds(const struct dl_phdr_info *object, const void *address)
{
    const uintptr_t at = (uintptr_t)address;
    for (size_t i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        const uintptr_t start = object->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && at >= start && at - start < part->p_memsz)
            return true;
    }
    return false;
}

static bool is_wanted(const struct dl_phdr_info *object, const search *wanted)
{
    if (wanted->inside)
        return holds(object, wanted->inside);
    const char *name = strrchr(object->dlpi_name, '/');
    return strcmp(name ? name + 1 : object->dlpi_name, wanted->library) == 0;
}

static const ElfW(Phdr) * part_of(const struct dl_phdr_info *object, ElfW(Word) type)
{
    for (size_t i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == type)
            return &object->dlpi_phdr[i];
    return NULL;
}

/* glibc has made the addresses absolute, musl has not. */
static const void *absolute(const struct dl_phdr_info *object, ElfW(Addr) address)
{
    return (const void *)(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

static tables tables_of(const struct dl_phdr_info *object, const ElfW(Dyn) * entry)
{
    tables read = {0};
    bool with_addends = true;
    for (; entry->d_tag != DT_NULL; entry++) {
        const void *address = absolute(object, entry->d_un.d_ptr);
        switch (entry->d_tag) {
        case DT_SYMTAB:
            read.symbols = address;
            break;
        case DT_STRTAB:
            read.names = address;
            break;
        case DT_JMPREL:
            read.calls = address;
            break;
        case DT_PLTRELSZ:
            read.calls_bytes = entry->d_un.d_val;
            break;
        case DT_RELA:
            read.others = address;
            break;
        case DT_RELASZ:
            read.others_bytes = entry->d_un.d_val;
            break;
        case DT_PLTREL:
            with_addends = entry->d_un.d_val == DT_RELA;
            break;
        default:
            break;
        }
    }
    return with_addends && read.symbols && read.names ? read : (tables){0};
}

static void note(search *wanted, const struct dl_phdr_info *object, ElfW(Addr) offset)
{
    const ElfW(Phdr) *relro = part_of(object, PT_GNU_RELRO);
    const uintptr_t bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t at = object->dlpi_addr + offset, page = at / bytes * bytes;
    fst_symbol_slot slot = {.at = (void **)at};
    if (relro) { /* the loader protects whole pages only */
        const uintptr_t start = object->dlpi_addr + relro->p_vaddr;
        if (at >= start && page + bytes <= start + relro->p_memsz) {
            slot.read_only = (void *)page;
            slot.read_bytes = bytes;
        }
    }
    if (wanted->count < wanted->most)
        wanted->found[wanted->count] = slot;
    wanted->count++;
}

static void look_through(search *wanted, const struct dl_phdr_info *object, const tables *read,
                         const ElfW(Rela) * list, size_t bytes)
{
    for (size_t i = 0; list && i < bytes / sizeof *list; i++) {
        const int type = (int)ELF64_R_TYPE(list[i].r_info);
        const ElfW(Sym) *symbol = &read->symbols[ELF64_R_SYM(list[i].r_info)];
        if ((type == CALLED || type == ADDRESSED) && !list[i].r_addend &&
            strcmp(read->names + symbol->st_name, wanted->symbol) == 0)
            note(wanted, object, list[i].r_offset);
    }
}

static int visit(struct dl_phdr_info *object, size_t size, void *data)
{
    search *wanted = data;
    const ElfW(Phdr) *dynamic = part_of(object, PT_DYNAMIC);
    (void)size;
    if (!dynamic || !is_wanted(object, wanted))
        return 0;
    const ElfW(Dyn) *first = (const ElfW(Dyn) *)(object->dlpi_addr + dynamic->p_vaddr);
    const tables read = tables_of(object, first);
    look_through(wanted, object, &read, read.calls, read.calls_bytes);
    look_through(wanted, object, &read, read.others, read.others_bytes);
    return 1;
}

size_t fst_symbol_slots(const char *library, const void *inside, const char *symbol,
                        fst_symbol_slot *found, size_t most)
{
    search wanted = {library, inside, symbol, found, most, 0};
    dl_iterate_phdr(visit, &wanted);
    return wanted.count;
}

int fst_symbol_set(const fst_symbol_slot *slot, void *function)
{
    if (slot->read_only && mprotect(slot->read_only, slot->read_bytes, PROT_READ | PROT_WRITE))
        return errno;
    __atomic_store_n(slot->at, function, __ATOMIC_RELEASE);
    if (slot->read_only)
        mprotect(slot->read_only, slot->read_bytes, PROT_READ);
    return 0;
}
