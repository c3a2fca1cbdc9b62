/* read_tables.h - reads the tables of base/device.h. */
#pragma once

#include "words.h"

FST_DEVICE double fst_scalar_read(const fst_device_scalar *scalar)
{
    const double held = scalar->is_double ? *(const double *)fst_global(scalar->data)
                                          : (double)*(const float *)fst_global(scalar->data);
    return scalar->negated ? -held : held;
}

/* Does nothing where the scalar is absent. */
FST_DEVICE void fst_scalar_write(const fst_device_scalar *scalar, double value)
{
    const double held = scalar->negated ? -value : value;
    if (scalar->data && scalar->is_double)
        *(double *)fst_global(scalar->data) = held;
    else if (scalar->data)
        *(float *)fst_global(scalar->data) = (float)held;
}

/* 0 where the number is absent. */
FST_DEVICE double fst_number_read(const fst_device_number *number)
{
    const void *data = (const void *)fst_global(number->data);
    if (!number->data)
        return 0.0;
    const double held = number->dtype == FST_F32    ? (double)*(const float *)data
                        : number->dtype == FST_F64  ? *(const double *)data
                        : number->dtype == FST_BF16 ? fst_bf16_to_f32(*(const uint16_t *)data)
                                                    : fst_f16_to_f32(*(const uint16_t *)data);
    return number->negated ? -held : held;
}

/* Does nothing where the number is absent. */
FST_DEVICE void fst_number_write(const fst_device_number *number, double value)
{
    const double held = number->negated ? -value : value;
    void *data = (void *)fst_global(number->data);
    if (!number->data)
        return;
    if (number->dtype == FST_F64)
        *(double *)data = held;
    else if (number->dtype == FST_F32)
        *(float *)data = (float)held;
    else
        *(uint16_t *)data =
            number->dtype == FST_BF16 ? fst_f32_to_bf16((float)held) : fst_f32_to_f16((float)held);
}

FST_DEVICE fst_device_outcome *fst_outcome_of(const fst_device_tables *tables)
{
    return (fst_device_outcome *)fst_global(tables->outcome);
}

FST_DEVICE double *fst_partial_of(const fst_device_tables *tables)
{
    return (double *)fst_global(tables->partial);
}

/* A table that may lie in the launch struct, of which `tables` is the first member. */
FST_DEVICE const void *fst_table_at(const fst_device_tables *tables, uint64_t address)
{
    return address < FST_DEVICE_LAUNCH ? (const char *)tables + address
                                       : (const char *)(uintptr_t)address;
}

FST_DEVICE const fst_device_chunk *fst_chunks_of(const fst_device_tables *tables)
{
    return (const fst_device_chunk *)fst_table_at(tables, tables->chunks);
}

/* The chunk of that number, from a list of chunks or, with `run_count`, from runs. Not inlined:
 * nvcc would make a loop over chunks twice, for lists and for runs, and then again and again for
 * whatever else stays the same in it, and would take hours. */
FST_DEVICE_CALL fst_device_chunk fst_chunk_of(const void *chunks, uint32_t run_count,
                                              uint32_t number)
{
    const fst_device_run *runs = (const fst_device_run *)chunks;
    fst_device_chunk chunk;
    uint32_t span = 0;
    if (!run_count)
        return ((const fst_device_chunk *)chunks)[number];
    for (uint32_t end = run_count; end - span > 1;) {
        const uint32_t middle = span + (end - span) / 2;
        if (runs[middle].first <= number)
            span = middle;
        else
            end = middle;
    }
    chunk.begin = (int64_t)(number - runs[span].first) * FST_CHUNK;
    const int64_t left = runs[span].count - chunk.begin;
    chunk.span = span;
    chunk.count = left < FST_CHUNK ? (uint32_t)left : (uint32_t)FST_CHUNK;
    return chunk;
}

FST_DEVICE fst_device_chunk fst_chunk_at(const fst_device_tables *tables, uint32_t number)
{
    return fst_chunk_of(fst_table_at(tables, tables->chunks), tables->run_count, number);
}

FST_DEVICE const fst_device_span *fst_spans_of(const fst_device_tables *tables)
{
    return (const fst_device_span *)fst_table_at(tables, tables->spans);
}

FST_DEVICE const fst_device_group *fst_groups_of(const fst_device_tables *tables)
{
    return (const fst_device_group *)fst_table_at(tables, tables->groups);
}

FST_DEVICE const fst_device_layout *fst_layouts_of(const fst_device_tables *tables)
{
    return (const fst_device_layout *)fst_table_at(tables, tables->layouts);
}

/* The operands of a span. */
FST_DEVICE const fst_device_operand *fst_operands_of(const fst_device_tables *tables, uint32_t span)
{
    return (const fst_device_operand *)fst_table_at(tables, tables->operands) +
           (size_t)span * tables->width;
}

FST_DEVICE void *fst_args_of(const fst_device_tables *tables, uint32_t span)
{
    return (char *)fst_global(tables->args) + (size_t)span * FST_DEVICE_ARGS;
}

/* The offset of an element in an operand with a layout. A 32-bit division is several times as
 * fast as a 64-bit one. Not inlined: kernels would be ten times as long. */
FST_DEVICE_CALL int64_t fst_offset(const fst_device_layout *layout, int64_t element)
{
    uint64_t left = (uint64_t)element;
    int64_t offset = 0;
    for (int d = layout->ndim - 1; d > 0; d--) {
        const uint64_t size = (uint64_t)layout->shape[d];
        const uint64_t outer = (left | size) >> 32 ? left / size : (uint32_t)left / (uint32_t)size;
        offset += (int64_t)(left - outer * size) * layout->stride[d];
        left = outer;
    }
    return offset + (int64_t)left * layout->stride[0];
}

/* Bytes of an element, as a power of two. */
FST_DEVICE unsigned fst_size_log2(int32_t dtype)
{
    return dtype == FST_F64 ? 3u : dtype == FST_F32 ? 2u : 1u;
}
