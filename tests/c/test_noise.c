/* Noise: Philox's known answers, and that rounding by it has the mean of what is rounded. */
#include "base/noise.h"
#include "common.h"

/* Of Random123 1.14, kat_vectors. */
static void known_answers(void)
{
    static const uint32_t known[][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8},
        {0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x408F276D,
         0x41C83B0E, 0xA20BC7C6, 0x6D5451FD},
        {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0xD16CFE09,
         0x94FDCCEB, 0x5001E420, 0x24126EA1},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        uint32_t words[4];
        memcpy(words, known[i], sizeof words);
        fst_philox(words, known[i][4], known[i][5]);
        CHECK_BYTES(words, &known[i][6], sizeof words);
    }
}

/* Over all noise a value goes away from zero as often as its lower half says. */
static void the_mean_is_the_value(void)
{
    static const uint32_t values[] = {0,          1,          0x3F800000, 0x3F800001, 0x3F804000,
                                      0xBF80FFFF, 0xBF7F8000, 0x007F1234, 0x7F7F0000, 0x7F800000,
                                      0xFF800000, 0x80000000, 0x80008000};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        uint32_t away = 0;
        int wrong = 0;
        for (uint32_t noise = 0; noise < 0x10000; noise++) {
            const uint32_t half = fst_f32_to_bf16_by(fst_f32_of_bits(values[i]), noise);
            away += half != values[i] >> 16;
            wrong += half != values[i] >> 16 && half != (values[i] >> 16) + 1;
        }
        CHECK_INT((int64_t)away, (int64_t)(values[i] & 0xFFFFu));
        CHECK_INT(wrong, 0);
    }
    for (uint32_t noise = 0; noise < 0x10000; noise += 0xFF)
        CHECK_INT(fst_f32_to_bf16_by(fst_f32_of_bits(0xFFFFFFFF), noise), 0x7FC0);
}

int main(void)
{
    known_answers();
    the_mean_is_the_value();
    return check_report();
}
