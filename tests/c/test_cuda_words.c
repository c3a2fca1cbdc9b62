/* Which elements of a chunk go by words of 16 bytes: all of them where every operand is contiguous
 * and aligned, of whatever type, but for the last few; none where one operand is not, and is not
 * loose.
 */
#define SIMT_KERNELS
#include "simt.h"

#include "../../cuda/all_types.h"
#include "check.h"

enum { COUNT = 5003, BEGIN = 16384, ALIGNED = 1 << 20 };

static const fst_device_tables tables = {.width = 1};

static fst_device_operand operand(fst_dtype dtype, uint64_t address)
{
    return (fst_device_operand){.data = address, .layout = -1, .dtype = (int32_t)dtype};
}

/* How many elements go by words, of a chunk with two operands, of which the second may be loose. */
static fst_share share_of(int wide, const fst_device_operand *a, const fst_device_operand *b,
                          int loose)
{
    const fst_device_chunk chunk = {.begin = BEGIN, .count = COUNT};
    fst_share share = fst_share_of(&tables, &chunk, 0, FST_DEVICE_BLOCK);
    if (wide) {
        share_with_f64(&share, a, 0);
        share_with_f64(&share, b, loose);
    } else {
        share_with_f32(&share, a, 0);
        share_with_f32(&share, b, loose);
    }
    fst_share_close(&share);
    return share;
}

/* What a span that is worked on in float or in double has by words: all but the halves in double.
 */
static int goes_by_words(int wide, fst_dtype dtype)
{
    return wide ? dtype == FST_F32 || dtype == FST_F64 : dtype != FST_F64;
}

static uint32_t run_of(fst_dtype a, fst_dtype b)
{
    const size_t x = fst_dtype_size(a), y = fst_dtype_size(b);
    return (uint32_t)(16 / (x < y ? x : y));
}

static void aligned_operands(int wide, fst_dtype a, fst_dtype b)
{
    const fst_device_operand first = operand(a, ALIGNED), second = operand(b, ALIGNED + 4096);
    const fst_share share = share_of(wide, &first, &second, 0);
    const uint32_t run = run_of(a, b);
    if (!goes_by_words(wide, a) || !goes_by_words(wide, b)) {
        CHECK_INT(share.whole, 0);
        return;
    }
    CHECK_INT(share.whole, COUNT / run * run);
    CHECK_INT(1u << share.shift, run);
}

/* A loose operand goes by words from every address, with the run of an aligned one. */
static void loose_operands(int wide, fst_dtype a, fst_dtype b)
{
    const fst_device_operand first = operand(a, ALIGNED), aligned = operand(b, ALIGNED);
    const fst_share want = share_of(wide, &first, &aligned, 0);
    for (uint64_t off = fst_dtype_size(b); off < 16; off += fst_dtype_size(b)) {
        const fst_device_operand second = operand(b, ALIGNED + off);
        const fst_share share = share_of(wide, &first, &second, 1);
        CHECK_INT(share.whole, want.whole);
        CHECK_INT(share.shift, want.shift);
    }
}

/* Each step off the alignment that a tensor of the type can have, and a layout. */
static void other_operands(int wide, fst_dtype a, fst_dtype b)
{
    const fst_device_operand first = operand(a, ALIGNED);
    for (uint64_t off = fst_dtype_size(b); off < 16; off += fst_dtype_size(b)) {
        const fst_device_operand second = operand(b, ALIGNED + off);
        CHECK_INT(share_of(wide, &first, &second, 0).whole, 0);
        CHECK_INT(share_of(wide, &second, &first, 0).whole, 0);
    }
    fst_device_operand strided = operand(b, ALIGNED);
    strided.layout = 0;
    CHECK_INT(share_of(wide, &first, &strided, 1).whole, 0);
    CHECK_INT(share_of(wide, &strided, &first, 0).shift, 0);
}

/* Threads have every element of a tile once, and of a word all of it. */
static void threads_share_a_tile(unsigned shift)
{
    enum { HELD = 8 };
    static int seen[FST_DEVICE_BLOCK * HELD];
    fst_share share = {.threads = FST_DEVICE_BLOCK, .shift = shift};
    memset(seen, 0, sizeof seen);
    for (share.thread = 0; share.thread < share.threads; share.thread++)
        for (uint32_t q = 0; q < HELD; q++) {
            const uint32_t at = fst_share_element(&share, 0, q);
            if (CHECK(at < FST_DEVICE_BLOCK * HELD))
                seen[at]++;
            CHECK_INT(at % (1u << shift), q % (1u << shift));
        }
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
        CHECK_INT(seen[i], 1);
}

int main(void)
{
    const fst_device_operand absent = {.layout = -1}, there = operand(FST_BF16, ALIGNED);
    for (int wide = 0; wide < 2; wide++)
        for (int a = 0; a < FST_DTYPE_COUNT; a++)
            for (int b = 0; b < FST_DTYPE_COUNT; b++) {
                aligned_operands(wide, (fst_dtype)a, (fst_dtype)b);
                other_operands(wide, (fst_dtype)a, (fst_dtype)b);
                loose_operands(wide, (fst_dtype)a, (fst_dtype)b);
            }
    CHECK_INT(share_of(0, &absent, &there, 0).whole, COUNT / 8 * 8);
    for (unsigned shift = 0; shift <= 3; shift++)
        threads_share_a_tile(shift);
    return check_report();
}
