/* tfrecord.h - the records of a TFRecord file, with their checksums.
 *
 * A record is the data's length (8 bytes), the masked CRC-32C of the length, the data, and the
 * masked CRC-32C of the data. Numbers are little-endian. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { FST_TFRECORD_HEAD = 12, FST_TFRECORD_TAIL = 4 };

typedef enum {
    FST_TFRECORD_OK,
    FST_TFRECORD_CUT_HEAD, /* the file ends in length or its checksum */
    FST_TFRECORD_BAD_LENGTH,
    FST_TFRECORD_CUT_DATA,
    FST_TFRECORD_BAD_DATA,
} fst_tfrecord_fault;

/* CRC-32C (Castagnoli), as in RFC 3720. */
uint32_t fst_crc32c(const void *data, size_t size);

/* Reads the record that begins at byte `at` < size of a file: where its data lie and how long
 * they are. Compares the data with their checksum if `check` is set. */
fst_tfrecord_fault fst_tfrecord_at(const char *file, size_t size, size_t at, int check,
                                   size_t *data, size_t *length);
