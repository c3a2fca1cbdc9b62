/* Records of TFRecord files: checksums, and files that are cut off or damaged anywhere. */
#include <stdlib.h>
#include <time.h>

#include "common.h"
#include "io/tfrecord.h"

/* Bit by bit, as the definition has it. */
static uint32_t slow_crc(const unsigned char *data, size_t size)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0x82F63B78) : 0);
    }
    return ~crc;
}

static void checksums_are_those_of_the_standard(void)
{
    unsigned char data[70] = {0};
    CHECK_INT(fst_crc32c("123456789", 9), 0xE3069283);
    CHECK_INT(fst_crc32c(data, 32), 0x8A9136AA); /* RFC 3720, B.4 */
    CHECK_INT(fst_crc32c(data, 0), 0);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)random_bits();
    for (size_t from = 0; from < 9; from++)
        for (size_t size = 0; size + from <= sizeof data; size++)
            CHECK_INT(fst_crc32c(data + from, size), slow_crc(data + from, size));
}

static void put32(unsigned char *p, uint32_t value)
{
    for (unsigned i = 0; i < 4; i++)
        p[i] = (unsigned char)(value >> 8 * i);
}

static uint32_t masked(const unsigned char *data, size_t size)
{
    const uint32_t crc = slow_crc(data, size);
    return (crc >> 15 | crc << 17) + UINT32_C(0xA282EAD8);
}

/* Appends a record with the length that it claims to have. */
static size_t put_record(unsigned char *out, uint64_t claimed, size_t length)
{
    put32(out, (uint32_t)claimed);
    put32(out + 4, (uint32_t)(claimed >> 32));
    put32(out + 8, masked(out, 8));
    for (size_t i = 0; i < length; i++)
        out[12 + i] = (unsigned char)random_bits();
    put32(out + 12 + length, masked(out + 12, length));
    return length + 16;
}

enum { RECORDS = 5 };

static size_t put_file(unsigned char *out)
{
    size_t size = 0;
    for (size_t i = 0; i < RECORDS; i++)
        size += put_record(out + size, i * 3, i * 3);
    return size;
}

/* Intact records from the start, or what is wrong with the one after them. */
static fst_tfrecord_fault count_records(const unsigned char *file, size_t size, size_t *found)
{
    size_t at = 0, data, length;
    for (*found = 0; at < size; ++*found) {
        const fst_tfrecord_fault fault =
            fst_tfrecord_at((const char *)file, size, at, 1, &data, &length);
        if (fault)
            return fault;
        CHECK(data + length + FST_TFRECORD_TAIL <= size);
        at = data + length + FST_TFRECORD_TAIL;
    }
    return FST_TFRECORD_OK;
}

/* Each file is in a block of its own size, so that AddressSanitizer sees a byte too far. */
static void files_may_end_anywhere(void)
{
    unsigned char whole[200];
    const size_t size = put_file(whole);
    for (size_t cut = 0; cut <= size; cut++) {
        unsigned char *file = malloc(cut + !cut);
        size_t found, ends = 0, want = 0;
        memcpy(file, whole, cut);
        while (want < RECORDS && ends + want * 3 + 16 <= cut)
            ends += want++ * 3 + 16;
        const fst_tfrecord_fault fault = count_records(file, cut, &found);
        CHECK_INT((int64_t)found, (int64_t)want);
        CHECK_INT(fault, ends == cut       ? FST_TFRECORD_OK
                         : cut - ends < 12 ? FST_TFRECORD_CUT_HEAD
                                           : FST_TFRECORD_CUT_DATA);
        free(file);
    }
}

/* Any single bit that flips is found, in the record where it is. */
static void damage_is_found(void)
{
    unsigned char file[200];
    const size_t size = put_file(file);
    size_t record = 0, begin = 0;
    for (size_t i = 0; i < size; i++) {
        size_t found;
        if (i == begin + record * 3 + 16)
            begin = i, record++;
        file[i] ^= (unsigned char)(1u << i % 8);
        CHECK_INT(count_records(file, size, &found),
                  i - begin < 12 ? FST_TFRECORD_BAD_LENGTH : FST_TFRECORD_BAD_DATA);
        CHECK_INT((int64_t)found, (int64_t)record);
        file[i] ^= (unsigned char)(1u << i % 8);
    }
}

/* The definition of the format, from the end of what is right so far; what follows is `fault`. */
static size_t slow_count(const unsigned char *file, size_t size, fst_tfrecord_fault *fault)
{
    size_t at = 0, found = 0;
    for (*fault = FST_TFRECORD_OK; at < size; found++) {
        uint64_t length = 0;
        if (size - at < 12) {
            *fault = FST_TFRECORD_CUT_HEAD;
            return found;
        }
        for (unsigned i = 8; i-- > 0;)
            length = length << 8 | file[at + i];
        if (memcmp(file + at + 8, &(uint32_t){masked(file + at, 8)}, 4)) {
            *fault = FST_TFRECORD_BAD_LENGTH;
            return found;
        }
        if (length > size || size - at < 16 + length) {
            *fault = FST_TFRECORD_CUT_DATA;
            return found;
        }
        if (memcmp(file + at + 12 + length, &(uint32_t){masked(file + at + 12, length)}, 4)) {
            *fault = FST_TFRECORD_BAD_DATA;
            return found;
        }
        at += 16 + length;
    }
    return found;
}

/* Records some of which claim another length, with the checksum that belongs to it. */
static size_t put_any_file(unsigned char *out, size_t room)
{
    size_t size = 0;
    for (size_t records = random_bits() % 6; records-- > 0;) {
        const size_t length = random_bits() % 40;
        uint64_t claimed = length;
        switch (random_bits() % 12) {
        case 0:
            claimed = length + random_bits() % 64 - 32;
            break;
        case 1:
            claimed = (UINT64_C(1) << random_bits() % 64) - random_bits() % 33;
            break;
        default:;
        }
        if (size + length + 16 > room)
            break;
        size += put_record(out + size, claimed, length);
    }
    return size;
}

/* Bytes that change, move, are repeated or left out. */
static size_t damage(unsigned char *file, size_t size, size_t room)
{
    const size_t from = random_bits() % (size + 1), to = random_bits() % (size + 1);
    size_t count = random_bits() % 24;
    count = count < size - from ? count : size - from;
    switch (random_bits() % 5) {
    case 0:
        for (size_t i = 0; i < count; i++)
            file[from + i] = (unsigned char)random_bits();
        return size;
    case 1:
        if (size)
            file[from % size] ^= (unsigned char)(1u << random_bits() % 8);
        return size;
    case 2: /* leave out */
        memmove(file + from, file + from + count, size - from - count);
        return size - count;
    case 3: /* repeat */
        count = count < room - size ? count : room - size;
        memmove(file + from + count, file + from, size - from);
        return size + count;
    default:
        return to; /* cut off */
    }
}

/* FUZZ_SECONDS in the environment goes on for so long. */
static void any_file_is_judged_as_by_the_definition(void)
{
    const char *seconds = getenv("FUZZ_SECONDS");
    const time_t end = time(NULL) + (seconds ? atoi(seconds) : 0);
    unsigned char file[400];
    size_t faults[FST_TFRECORD_BAD_DATA + 1] = {0};
    for (long i = 0; i < 20000 || time(NULL) < end; i++) {
        size_t size = put_any_file(file, sizeof file), found;
        fst_tfrecord_fault want;
        for (uint64_t times = random_bits() % 3; times-- > 0;)
            size = damage(file, size, sizeof file);
        unsigned char *exact = malloc(size + !size);
        memcpy(exact, file, size);
        const size_t count = slow_count(exact, size, &want);
        CHECK_INT(count_records(exact, size, &found), want);
        CHECK_INT((int64_t)found, (int64_t)count);
        faults[want]++;
        free(exact);
    }
    for (size_t fault = 0; fault <= FST_TFRECORD_BAD_DATA; fault++)
        CHECK(faults[fault] > 100); /* each came about */
}

static void absurd_lengths_are_refused(void)
{
    static const uint64_t lengths[] = {9, UINT64_MAX, UINT64_MAX - 15, UINT64_C(1) << 63, 1 << 30};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        unsigned char file[24];
        size_t data, length;
        put_record(file, lengths[i], 8);
        CHECK_INT(fst_tfrecord_at((char *)file, 24, 0, 1, &data, &length), FST_TFRECORD_CUT_DATA);
    }
}

static void noise_is_no_record(void)
{
    for (int i = 0; i < 2000; i++) {
        const size_t size = random_bits() % 64 + 1;
        unsigned char *file = malloc(size);
        size_t found;
        for (size_t k = 0; k < size; k++)
            file[k] = (unsigned char)random_bits();
        CHECK(count_records(file, size, &found) != FST_TFRECORD_OK);
        free(file);
    }
}

int main(void)
{
    checksums_are_those_of_the_standard();
    files_may_end_anywhere();
    damage_is_found();
    absurd_lengths_are_refused();
    noise_is_no_record();
    any_file_is_judged_as_by_the_definition();
    return check_report();
}
