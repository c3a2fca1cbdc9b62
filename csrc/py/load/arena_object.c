/* The type faststep._C.Arena: tensors over memory that processes share. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/context.h"
#include "io/arena.h"
#include "py/load/arguments.h"

typedef struct {
    PyObject_HEAD
    fst_arena *arena;
} arena_object;

PyObject *fst_py_keep_freed_memory(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    fst_keep_freed_memory();
    return Py_NewRef(Py_None);
}

PyObject *fst_py_keep_locked_memory(PyObject *module, PyObject *whether)
{
    const int keep = PyObject_IsTrue(whether);
    (void)module;
    if (keep < 0)
        return NULL;
    fst_arena_keep_locked(keep);
    return Py_NewRef(Py_None);
}

/* A use of a block by tensors. `end` is called for the block when the last of them is gone. */
typedef struct {
    fst_arena *arena;
    size_t block;
    void (*end)(fst_arena *arena, size_t block);
    pid_t process;
} block_use;

/* A forked child has a copy of the tensors but does not own the block. */
static void end_use(void *owner)
{
    block_use *use = owner;
    if (use->process == getpid())
        use->end(use->arena, use->block);
    fst_arena_drop(use->arena);
    free(use);
}

/* A tensor over the bytes of a block at one of its addresses. */
static PyObject *tensor_at(const arena_object *self, size_t block, void *data, size_t size,
                           void (*end)(fst_arena *, size_t))
{
    int64_t bytes = (int64_t)size;
    const fst_dl_tensor form = {.data = data,
                                .device = {FST_DL_CPU, 0},
                                .ndim = 1,
                                .dtype = {FST_DL_UINT, 8, 1},
                                .shape = &bytes};
    block_use *use = malloc(sizeof *use);
    if (!use) {
        end(self->arena, block);
        return PyErr_NoMemory();
    }
    *use = (block_use){self->arena, block, end, getpid()};
    fst_arena_keep(self->arena);
    return fst_export_tensor(PyType_GetModuleState(Py_TYPE(self)), &form, end_use, use);
}

/* Arena() makes an arena. Arena(file, reserve) attaches to that of another process and owns the
 * file. */
static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fst_status status = {0};
    int file = -1;
    Py_ssize_t reserve = 0;
    if (!PyArg_ParseTuple(args, "|in", &file, &reserve))
        return NULL;
    if (PyTuple_Size(args) && (file < 0 || reserve <= 0))
        return PyErr_Format(PyExc_ValueError, "no arena of %zd bytes in file %d", reserve, file);
    arena_object *self = fst_object_new(type, keywords);
    if (!self && file >= 0)
        close(file);
    if (!self)
        return NULL;
    self->arena =
        file < 0 ? fst_arena_new(&status) : fst_arena_attach(file, (size_t)reserve, &status);
    if (self->arena)
        return (PyObject *)self;
    Py_DECREF(self);
    return fst_raise(&status);
}

static void arena_dealloc(PyObject *object)
{
    arena_object *self = (arena_object *)object;
    if (self->arena)
        fst_arena_drop(self->arena);
    fst_object_free(object);
}

/* Parses the number of an existing block; -1 with a Python error. */
static Py_ssize_t read_block(const arena_object *self, PyObject *number)
{
    const Py_ssize_t block = PyLong_AsSsize_t(number);
    if (PyErr_Occurred())
        return -1;
    if (block < 0 || (size_t)block >= fst_arena_made(self->arena)) {
        PyErr_Format(PyExc_ValueError, "the arena has no block %zd", block);
        return -1;
    }
    return block;
}

static PyObject *arena_take(PyObject *object, PyObject *number)
{
    const arena_object *self = (arena_object *)object;
    fst_status status = {0};
    size_t block = 0;
    const size_t size = PyLong_AsSize_t(number);
    if (PyErr_Occurred())
        return NULL;
    if (fst_arena_take(self->arena, size, &block, &status))
        return fst_raise(&status);
    fst_arena_lend(self->arena, block);
    PyObject *tensor =
        tensor_at(self, block, fst_arena_data(self->arena, block), size, fst_arena_end_loan);
    return tensor ? Py_BuildValue("nN", (Py_ssize_t)block, tensor) : NULL;
}

/* put(address, size): copies memory to a new block and returns its number. */
static PyObject *arena_put(PyObject *object, PyObject *args)
{
    const arena_object *self = (arena_object *)object;
    fst_status status = {0};
    unsigned long long address;
    Py_ssize_t size;
    size_t block = 0;
    if (!PyArg_ParseTuple(args, "Kn", &address, &size))
        return NULL;
    if (size < 0 || (size && !address))
        return PyErr_Format(PyExc_ValueError, "no %zd bytes at address %llu", size, address);
    Py_BEGIN_ALLOW_THREADS
    if (!fst_arena_take(self->arena, (size_t)size, &block, &status))
        memcpy(fst_arena_data(self->arena, block), (const void *)(uintptr_t)address, (size_t)size);
    Py_END_ALLOW_THREADS
    return status.code ? fst_raise(&status) : PyLong_FromSize_t(block);
}

/* Does something with an existing block. */
static PyObject *on_block(PyObject *object, PyObject *number, void (*act)(fst_arena *, size_t))
{
    const arena_object *self = (arena_object *)object;
    const Py_ssize_t block = read_block(self, number);
    if (block < 0)
        return NULL;
    act(self->arena, (size_t)block);
    return Py_NewRef(Py_None);
}

static PyObject *arena_send(PyObject *object, PyObject *number)
{
    return on_block(object, number, fst_arena_send);
}

static PyObject *arena_sent(PyObject *object, PyObject *number)
{
    const arena_object *self = (arena_object *)object;
    const Py_ssize_t block = read_block(self, number);
    return block < 0 ? NULL : PyBool_FromLong(fst_arena_sent(self->arena, (size_t)block));
}

static PyObject *arena_give_back(PyObject *object, PyObject *number)
{
    return on_block(object, number, fst_arena_give_back);
}

static PyObject *arena_hold(PyObject *object, PyObject *args)
{
    const arena_object *self = (arena_object *)object;
    fst_status status = {0};
    Py_ssize_t block, size;
    if (!PyArg_ParseTuple(args, "nn", &block, &size))
        return NULL;
    if (block < 0 || size < 0)
        return PyErr_Format(PyExc_ValueError, "no block %zd of %zd bytes", block, size);
    if (fst_arena_hold(self->arena, (size_t)block, (size_t)size, &status))
        return fst_raise(&status);
    return tensor_at(self, (size_t)block, fst_arena_data(self->arena, (size_t)block), (size_t)size,
                     fst_arena_end_hold);
}

static PyObject *arena_pin(PyObject *object, PyObject *unused)
{
    const arena_object *self = (arena_object *)object;
    const size_t made = fst_arena_made(self->arena);
    PyObject *pinned = PyList_New(0);
    (void)unused;
    for (size_t b = 0; pinned && b < made; b++) {
        if (!fst_arena_pin(self->arena, b))
            continue;
        PyObject *number = PyLong_FromSize_t(b);
        if (!number || PyList_Append(pinned, number))
            Py_CLEAR(pinned);
        Py_XDECREF(number);
    }
    return pinned;
}

static PyObject *arena_unpin(PyObject *object, PyObject *number)
{
    return on_block(object, number, fst_arena_end_hold);
}

static PyObject *arena_sweep(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromSize_t(fst_arena_sweep(((arena_object *)object)->arena));
}

static PyObject *arena_counts(PyObject *object, PyObject *unused)
{
    const fst_arena_counts c = fst_arena_counted(((arena_object *)object)->arena);
    (void)unused;
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "made", (Py_ssize_t)c.made, "free",
                         (Py_ssize_t)c.free, "taken", (Py_ssize_t)c.taken, "held",
                         (Py_ssize_t)c.held, "gone", (Py_ssize_t)c.gone, "locked",
                         (Py_ssize_t)c.locked, "backed", (Py_ssize_t)c.backed);
}

static PyObject *arena_fileno(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(fst_arena_file(((arena_object *)object)->arena));
}

static PyObject *arena_reserve(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromSize_t(fst_arena_reserve(((arena_object *)object)->arena));
}

static PyObject *arena_prepare_locks(PyObject *object, PyObject *device)
{
    const arena_object *self = (arena_object *)object;
    const long ordinal = PyLong_AsLong(device);
    fst_status status = {0};
    if (PyErr_Occurred())
        return NULL;
    if (ordinal < 0 || ordinal >= FST_GPU_DEVICES)
        return PyErr_Format(PyExc_ValueError, "no CUDA device %ld", ordinal);
    const fst_arena_locker locker = {fst_gpu_lock_host, fst_gpu_unlock_host, (int)ordinal};
    Py_BEGIN_ALLOW_THREADS
    fst_arena_prepare_locks(self->arena, locker, &status);
    Py_END_ALLOW_THREADS
    return status.code ? fst_raise(&status) : Py_NewRef(Py_None);
}

static PyObject *arena_locked(PyObject *object, PyObject *args)
{
    const arena_object *self = (arena_object *)object;
    fst_status status = {0};
    unsigned long long address;
    Py_ssize_t size;
    size_t block = 0;
    void *locked = NULL;
    if (!PyArg_ParseTuple(args, "Kn", &address, &size))
        return NULL;
    if (size < 0)
        return PyErr_Format(PyExc_ValueError, "no %zd bytes", size);
    Py_BEGIN_ALLOW_THREADS /* locking takes milliseconds */
    fst_arena_lock(self->arena, (const void *)(uintptr_t)address, (size_t)size, &block, &locked,
                   &status);
    Py_END_ALLOW_THREADS
    if (status.code)
        return fst_raise(&status);
    if (!locked)
        return Py_NewRef(Py_None);
    return tensor_at(self, block, locked, (size_t)size, fst_arena_end_lock);
}

static PyMethodDef arena_methods[] = {
    {"counts", arena_counts, METH_NOARGS,
     FST_DOC("counts($self, /)",
             "A dict with the numbers of blocks in each state, and the bytes that have memory.")},
    {"fileno", arena_fileno, METH_NOARGS,
     FST_DOC("fileno($self, /)", "The descriptor of the anonymous file that holds the blocks.")},
    {"give_back", arena_give_back, METH_O,
     FST_DOC("give_back($self, block, /)",
             "In a worker: free a block of put(), or one that was sent.")},
    {"hold", arena_hold, METH_VARARGS,
     FST_DOC("hold($self, block, size, /)", "In the main process: the first size bytes of a block "
                                            "that a worker filled, as a uint8 tensor.")},
    {"locked", arena_locked, METH_VARARGS,
     FST_DOC("locked($self, address, size, /)",
             "The bytes at an address of a held block, page-locked, as a uint8 tensor. None where "
             "they are not locked.")},
    {"pin", arena_pin, METH_NOARGS,
     FST_DOC("pin($self, /)", "Keep the blocks with tensors in this process from being used again, "
                              "and return their numbers.")},
    {"prepare_locks", arena_prepare_locks, METH_O,
     FST_DOC("prepare_locks($self, device, /)",
             "In the main process: map the file a second time, for memory that is page-locked for "
             "a CUDA device.")},
    {"put", arena_put, METH_VARARGS,
     FST_DOC("put($self, address, size, /)",
             "In a worker: copy size bytes to a new block, and return its number.")},
    {"reserve", arena_reserve, METH_NOARGS,
     FST_DOC("reserve($self, /)", "The bytes of address space that the arena has.")},
    {"send", arena_send, METH_O,
     FST_DOC("send($self, block, /)",
             "Keep the block of take() when its tensor is gone, as it goes to the main process.")},
    {"sent", arena_sent, METH_O,
     FST_DOC("sent($self, block, /)",
             "True if the tensor of a block is gone. If not, send() is undone.")},
    {"sweep", arena_sweep, METH_NOARGS,
     FST_DOC("sweep($self, /)",
             "Free what workers took, and return the number of such blocks. No worker may live.")},
    {"take", arena_take, METH_O,
     FST_DOC("take($self, size, /)",
             "In a worker: the number of a new block, and its bytes as a uint8 tensor.")},
    {"unpin", arena_unpin, METH_O, FST_DOC("unpin($self, block, /)", "Undo pin() for one block.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot arena_slots[] = {
    {Py_tp_doc,
     FST_DOC("Arena(file=-1, reserve=0, /)",
             "Shared memory for batches, used again when the tensors over it are gone.")},
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {0, NULL},
};

PyType_Spec fst_arena_spec = {
    .name = "faststep._C.Arena",
    .basicsize = sizeof(arena_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = arena_slots,
};
