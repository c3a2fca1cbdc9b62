#include "io/tfrecord.h"

#include <pthread.h>

enum { SLICES = 8 };

static uint32_t tables[SLICES][256];
static pthread_once_t filled = PTHREAD_ONCE_INIT;

/* tables[k][b]: the remainder of byte b followed by k bytes of zeros. */
static void fill_tables(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82F63B78) : 0);
        tables[0][b] = crc;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (size_t k = 1; k < SLICES; k++)
            tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
}

static uint32_t read32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Slicing by 8 (Kounavis & Berry 2005): eight bytes per step, each with a table of its own. */
uint32_t fst_crc32c(const void *data, size_t size)
{
    const unsigned char *p = data;
    uint32_t crc = UINT32_MAX;
    pthread_once(&filled, fill_tables);
    for (; size >= SLICES; size -= SLICES, p += SLICES) {
        const uint32_t low = crc ^ read32(p), high = read32(p + 4);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
              tables[4][low >> 24] ^ tables[3][high & 255] ^ tables[2][high >> 8 & 255] ^
              tables[1][high >> 16 & 255] ^ tables[0][high >> 24];
    }
    for (; size; size--, p++)
        crc = crc >> 8 ^ tables[0][(crc ^ *p) & 255];
    return ~crc;
}

/* Compares data with a checksum as files store it: rotated and shifted, as a checksum over
 * checksums is weak. */
static int matches(const void *data, size_t size, const unsigned char *stored)
{
    const uint32_t crc = fst_crc32c(data, size);
    return (crc >> 15 | crc << 17) + UINT32_C(0xA282EAD8) == read32(stored);
}

fst_tfrecord_fault fst_tfrecord_at(const char *file, size_t size, size_t at, int check,
                                   size_t *data, size_t *length)
{
    const unsigned char *head = (const unsigned char *)file + at;
    const size_t room = size - at;
    if (room < FST_TFRECORD_HEAD)
        return FST_TFRECORD_CUT_HEAD;
    if (!matches(head, 8, head + 8))
        return FST_TFRECORD_BAD_LENGTH;
    const uint64_t bytes = read32(head) | (uint64_t)read32(head + 4) << 32;
    if (room < FST_TFRECORD_HEAD + FST_TFRECORD_TAIL ||
        bytes > room - FST_TFRECORD_HEAD - FST_TFRECORD_TAIL)
        return FST_TFRECORD_CUT_DATA;
    *data = at + FST_TFRECORD_HEAD;
    *length = (size_t)bytes;
    if (check && !matches(file + *data, *length, head + FST_TFRECORD_HEAD + *length))
        return FST_TFRECORD_BAD_DATA;
    return FST_TFRECORD_OK;
}
