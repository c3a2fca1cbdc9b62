/* Keeps memory alive and in place while somebody reads it, whatever happens to its tensor.
 *
 * A reference to a tensor or its storage does not do that: torch moves a storage in place
 * (share_memory_, pickling for a worker, resize_) and frees the old memory. The storage's record
 * names an owner and a function that frees it. A hold replaces both and counts its users. The
 * memory goes back to its owner when the storage and all readers have dropped the hold. */
#include "py/load/gather.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef void (*free_function)(void *owner);

typedef struct {
    atomic_size_t users; /* the storage while it has the memory, and each tensor over it */
    void *owner;
    free_function free;
} hold;

static atomic_size_t holds, moves;

/* Drops one user. Called from any thread, with the GIL or without. */
static void let_go(void *argument)
{
    hold *held = argument;
    if (atomic_fetch_sub(&held->users, 1) > 1)
        return;
    held->free(held->owner);
    free(held);
    atomic_fetch_sub(&holds, 1);
}

/* The function that the storage calls when it gets other memory or ends. */
static void let_go_of_storage(void *argument)
{
    let_go(argument);
    atomic_fetch_add(&moves, 1);
}

size_t fst_hold_moves(void)
{
    return atomic_load(&moves);
}

/* Reads a word of a storage's record. Threads without the GIL may read it at the same time. */
static void *read_word(uint64_t *words, int place)
{
    return (void *)(uintptr_t)__atomic_load_n(&words[place], __ATOMIC_RELAXED);
}

static void write_word(uint64_t *words, int place, uintptr_t value)
{
    __atomic_store_n(&words[place], value, __ATOMIC_RELAXED);
}

/* The hold of a storage, with one more user; NULL with a Python error. */
static hold *hold_storage(const fst_owner_places *at, uint64_t *words)
{
    void *owner = read_word(words, at->owner);
    if ((uintptr_t)read_word(words, at->free) == (uintptr_t)let_go_of_storage) {
        hold *held = owner;
        atomic_fetch_add(&held->users, 1);
        return held;
    }
    hold *held = malloc(sizeof *held);
    if (!held) {
        PyErr_NoMemory();
        return NULL;
    }
    atomic_init(&held->users, 2);
    held->owner = owner;
    held->free = (free_function)(uintptr_t)read_word(words, at->free);
    write_word(words, at->owner, (uintptr_t)held);
    write_word(words, at->free, (uintptr_t)let_go_of_storage);
    atomic_fetch_add(&holds, 1);
    return held;
}

PyObject *fst_py_hold(PyObject *module, PyObject *args)
{
    const fst_module *state = fst_module_state(module);
    unsigned long long record;
    PyObject *object;
    fst_dl_tensor tensor;
    if (!PyArg_ParseTuple(args, "OK", &object, &record) || fst_read_tensor(state, object, &tensor))
        return NULL;
    uint64_t *words = (uint64_t *)(uintptr_t)record;
    if (!state->owners.known || !words || !tensor.strides) {
        PyErr_SetString(PyExc_RuntimeError, "it is not known who owns the memory of a tensor");
        return NULL;
    }
    const uintptr_t start = (uintptr_t)read_word(words, state->owners.data);
    if (!start || start > (uintptr_t)tensor.data + tensor.byte_offset ||
        !read_word(words, state->owners.owner) || !read_word(words, state->owners.free)) {
        PyErr_SetString(PyExc_ValueError, "the tensor has no memory, or not that of this storage");
        return NULL;
    }
    hold *held = hold_storage(&state->owners, words);
    return held ? fst_export_tensor(state, &tensor, let_go, held) : NULL;
}

PyObject *fst_py_holds(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromSize_t(atomic_load(&holds));
}

PyObject *fst_py_use_owners(PyObject *module, PyObject *args)
{
    fst_owner_places found = {.known = 0};
    if (PyTuple_Size(args) == 0) {
        fst_module_state(module)->owners = found;
        return Py_NewRef(Py_None);
    }
    if (!PyArg_ParseTuple(args, "iii", &found.data, &found.free, &found.owner))
        return NULL;
    const int all[] = {found.data, found.free, found.owner};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] < 0 || all[i] >= FST_RECORD_WORDS)
            return PyErr_Format(PyExc_ValueError, "no record has a word %d", all[i]);
    found.known = 1;
    fst_module_state(module)->owners = found;
    return Py_NewRef(Py_None);
}
