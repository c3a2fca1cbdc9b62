/* Sums of squares that hooks measured in backward: storage, and use by a step. */
#include "py/step/squares.h"

int fst_squares_fill(const fst_squares_object *self, fst_plan *plan, unsigned operand,
                     const uint32_t *slot_of, double inv_scale)
{
    for (size_t s = 0; s < plan->span_count; s++) {
        const fst_operand *op = &plan->operands[s * plan->width + operand];
        if (slot_of[s] >= self->slot_count)
            return 0;
        const fst_square *slot = &self->slots[slot_of[s]];
        if (!slot->grad || slot->data != op->data || slot->count != plan->spans[s].count ||
            slot->inv_scale != inv_scale)
            return 0;
    }
    for (size_t c = 0; c < plan->chunk_count; c++) {
        const fst_chunk *chunk = &plan->chunks[c];
        plan->partial[c] = self->slots[slot_of[chunk->span]].partial[chunk->begin / FST_CHUNK];
    }
    return 1;
}

fst_square *fst_squares_at(fst_squares_object *self, Py_ssize_t index)
{
    if (index < 0 || index >= FST_MOST_SQUARES) {
        PyErr_Format(PyExc_ValueError, "no slot %zd", index);
        return NULL;
    }
    if ((size_t)index >= self->slot_count) {
        const size_t count = (size_t)index + 1;
        fst_square *moved = PyMem_Realloc(self->slots, 2 * count * sizeof *moved);
        if (!moved) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(moved + self->slot_count, 0, (2 * count - self->slot_count) * sizeof *moved);
        self->slots = moved;
        self->slot_count = 2 * count;
    }
    return &self->slots[index];
}
