/* States in 8 bits: where blocks begin and end, what a code is, and an update of such states on
 * every level against one of floats that are converted one by one. The conversion here is written
 * without that of rules/codes.h. */
#include "reference.h"
#include "rules/codes.h"

static const fst_cpu_kernels *levels[MAX_LEVELS];
static size_t level_count;

/* Lengths of rows as a tensor has them, and counts of elements that end anywhere. */
static const int64_t lengths[] = {1,    63,    64,    65,    100,   128,   129,   191,
                                  1000, 16320, 16383, 16384, 16385, 20000, 40001, 100000};

/* Where a block begins, and its place among the scales, found by walking. */
typedef struct {
    int64_t begin, end, scale;
} block;

static size_t list_blocks(int64_t count, int64_t length, int64_t room, block *blocks)
{
    const int counts = length > 64 && length % 64 != 0;
    int64_t in_chunk = 0;
    size_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        const int edge = i % 16384 == 0 || (counts && i % length == 0);
        if (i % 16384 == 0)
            in_chunk = 0;
        if (edge || i - blocks[found - 1].begin == 64) {
            blocks[found++] = (block){.begin = i, .scale = i / 16384 * room + in_chunk++};
            CHECK(in_chunk <= room);
        }
        blocks[found - 1].end = i + 1;
    }
    return found;
}

static void blocks_end_where_they_should(int64_t length)
{
    enum { COUNT = 5 * 16384 + 77 };
    block *blocks = must_alloc((COUNT + 1) * sizeof *blocks);
    const uint32_t row = fst_code_row(length);
    CHECK_INT(row, length > 64 && length % 64 ? length : 0);
    const size_t found = list_blocks(COUNT, length, fst_scale_room(row), blocks);
    CHECK(blocks[found - 1].scale < fst_scale_count(COUNT, row));
    if (!row)
        CHECK_INT(fst_scale_count(COUNT, row), (int64_t)found);
    for (size_t b = 0; b < found; b++)
        for (int64_t i = blocks[b].begin; i < blocks[b].end; i++) {
            const fst_segment segment = fst_segment_at(i, row);
            CHECK((blocks[b].begin - segment.begin) % 64 == 0 && segment.begin <= i);
            CHECK(segment.scale + (i - segment.begin) / 64 == blocks[b].scale);
            CHECK(blocks[b].end == COUNT || blocks[b].end == segment.end ||
                  blocks[b].end == blocks[b].begin + 64);
            CHECK(blocks[b].end <= segment.end);
        }
    free(blocks);
}

/* The scale of a block of `count` numbers. */
static uint16_t scale_of(const float *x, int64_t count, int is_signed)
{
    double largest = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (isnan(x[i]) || fabs((double)x[i]) > 0x1p126 || (!is_signed && signbit(x[i])))
            return 0x7FC0;
        largest = fmax(largest, fabs((double)x[i]));
    }
    const float size = (float)(is_signed ? largest : narrowed(sqrt(largest)));
    const uint32_t bits = fst_bits_of_f32(size);
    const float least = fst_f32_of_bits(bits < 16 ? 0 : bits - 16); /* that it may be */
    uint16_t scale = fst_f32_to_bf16(least);
    scale = (uint16_t)(scale + (fst_bf16_to_f32(scale) < least));
    return fst_bf16_to_f32(scale) < 0x1p-126f ? 0 : scale;
}

static uint8_t code_of(float number, uint16_t scale, int is_signed)
{
    const double s = fst_bf16_to_f32(scale), x = number;
    if (!(s > 0.0))
        return 0;
    if (is_signed) {
        const double part = narrowed(x / narrowed(s + fabs(x)));
        return (uint8_t)(int8_t)rint(narrowed(part * 254.0));
    }
    const double q = rint(narrowed(narrowed(sqrt(x)) * narrowed(255.0 / s)));
    return (uint8_t)(x > 0.0 && q < 1.0 ? 1.0 : q);
}

static float number_of(uint8_t code, uint16_t scale, int is_signed)
{
    const double s = fst_bf16_to_f32(scale), q = is_signed ? (double)(int8_t)code : (double)code;
    if (is_signed)
        return (float)(s * narrowed(q / (254.0 - fabs(q))));
    const double root = narrowed(q * narrowed(s * narrowed(1.0 / 255.0)));
    return (float)(root * root);
}

/* Numbers of all sizes; with `wild` also infinities and NaN. */
static void fill(float *x, int64_t count, int is_signed, int wild)
{
    for (int64_t i = 0; i < count; i++) {
        const double size = ldexp(1.0, (int)(i / 500 % 80) - 60);
        const double value = wild && random_below(300) == 0 ? random_value() : random_unit() * size;
        x[i] = (float)(i / 700 % 5 == 4 ? 0.0 : value);
        x[i] = is_signed ? x[i] : fabsf(x[i]);
    }
}

typedef struct {
    int64_t count;
    float *x;
    uint8_t *codes;
    uint16_t *scales;
    size_t scale_count;
} state;

/* Converts a state's floats to codes, or back. */
static void convert(state *s, const block *blocks, size_t found, int is_signed, int back)
{
    for (size_t b = 0; b < found; b++) {
        uint16_t *scale = &s->scales[blocks[b].scale];
        if (!back)
            *scale = scale_of(s->x + blocks[b].begin, blocks[b].end - blocks[b].begin, is_signed);
        for (int64_t i = blocks[b].begin; i < blocks[b].end; i++)
            if (back)
                s->x[i] = number_of(s->codes[i], *scale, is_signed);
            else
                s->codes[i] = code_of(s->x[i], *scale, is_signed);
    }
}

static int signs(const update_case *c, unsigned k)
{
    return c->rule == FST_RULE_momentum || k == 0;
}

static void run(const fst_cpu_kernels *level, const fst_operand *op, int64_t count,
                const update_case *c)
{
    const fst_update_args args = args_of(c);
    for (int64_t at = 0; at < count; at += FST_CHUNK)
        level->update(op, at, (size_t)(count - at < FST_CHUNK ? count - at : FST_CHUNK), &args,
                      c->inv_scale, c->write_grad);
}

/* One update of states in codes, and one of the floats that they stand for. */
static void same_as_of_floats(const update_case *c, int64_t count, int64_t length, int wild)
{
    const unsigned states = fst_rules[c->rule].states;
    const uint32_t row = fst_code_row(length);
    const size_t size = (size_t)count;
    const fst_dtype dtype = c->wide ? FST_F64 : FST_F32;
    block *blocks = must_alloc((size + 1) * sizeof *blocks);
    const size_t found = list_blocks(count, length, fst_scale_room(row), blocks);
    array *param = array_new(dtype, FLAT, count), *grad = array_new(dtype, FLAT, count);
    array_fill(param, random_unit);
    array_fill(grad, random_unit);
    state s[FST_MAX_STATES];
    for (unsigned k = 0; k < states; k++) {
        s[k] = (state){.count = count, .scale_count = (size_t)fst_scale_count(count, row)};
        s[k].x = must_alloc(size * sizeof(float));
        s[k].codes = must_alloc(size);
        s[k].scales = must_alloc(s[k].scale_count * sizeof(uint16_t));
        memset(s[k].scales, 0, s[k].scale_count * sizeof(uint16_t));
        fill(s[k].x, count, signs(c, k), wild);
        convert(&s[k], blocks, found, signs(c, k), 0);
        convert(&s[k], blocks, found, signs(c, k), 1);
    }
    for (size_t i = 0; i < level_count; i++) {
        array *p[2], *g[2];
        float *x[FST_MAX_STATES];
        uint8_t *codes[FST_MAX_STATES];
        uint16_t *scales[FST_MAX_STATES];
        for (int in_codes = 0; in_codes < 2; in_codes++) {
            fst_operand op[FST_OP_COUNT] = {{.data = NULL}};
            p[in_codes] = array_clone(param);
            g[in_codes] = array_clone(grad);
            op[FST_OP_PARAM] = p[in_codes]->op;
            op[FST_OP_GRAD] = g[in_codes]->op;
            for (unsigned k = 0; k < states; k++) {
                fst_operand *of_state = &op[FST_OP_STATE + k];
                if (!in_codes) {
                    x[k] = must_copy(s[k].x, size * sizeof(float));
                    *of_state = (fst_operand){.data = x[k], .dtype = FST_F32};
                    continue;
                }
                codes[k] = must_copy(s[k].codes, size);
                scales[k] = must_copy(s[k].scales, s[k].scale_count * sizeof(uint16_t));
                *of_state = (fst_operand){.data = codes[k],
                                          .dtype = signs(c, k) ? FST_I8 : FST_U8,
                                          .row = row,
                                          .scales = scales[k]};
            }
            run(levels[i], op, count, c);
        }
        int same = same_memory(p[0], p[1]) && same_memory(g[0], g[1]);
        for (unsigned k = 0; k < states; k++) {
            state want = {.x = x[k], .codes = must_alloc(size)};
            want.scales = must_copy(s[k].scales, s[k].scale_count * sizeof(uint16_t));
            convert(&want, blocks, found, signs(c, k), 0);
            same = same && !memcmp(want.codes, codes[k], size) &&
                   !memcmp(want.scales, scales[k], s[k].scale_count * sizeof(uint16_t));
            free(want.codes);
            free(want.scales);
            free(x[k]);
            free(codes[k]);
            free(scales[k]);
        }
        if (!CHECK(same))
            fprintf(stderr, "%s: %s%s, %" PRId64 " elements in rows of %" PRId64 "\n",
                    levels[i]->name, fst_rules[c->rule].name, c->wide ? " in fp64" : "", count,
                    length);
        for (int in_codes = 0; in_codes < 2; in_codes++) {
            array_free(p[in_codes]);
            array_free(g[in_codes]);
        }
    }
    for (unsigned k = 0; k < states; k++) {
        free(s[k].x);
        free(s[k].codes);
        free(s[k].scales);
    }
    array_free(param);
    array_free(grad);
    free(blocks);
}

/* A number and its code: the error, and the numbers that are easy to get wrong. */
static void codes_are_near(void)
{
    for (int i = 0; i < 200000; i++) {
        const float largest = (float)ldexp(1.0 + fabs(random_unit()), (int)random_below(180) - 90);
        const float x = (float)(random_unit() * (double)largest), square = x * x;
        const uint16_t scale = fst_signed_scale(fst_signed_size(largest));
        const float s = fst_bf16_to_f32(scale);
        const uint8_t code = (uint8_t)fst_to_signed(x, fst_signed_divisor(s));
        const double back = (double)fst_of_signed((int8_t)code, fst_signed_factor(s));
        CHECK(s >= largest * 0.999998f && s <= largest * 1.0079f && abs((int8_t)code) <= 127);
        CHECK_NEAR(back, (double)x, (double)s / 127.0 * 1.001);
        CHECK(code == code_of(x, scale, 1) && (float)back == number_of(code, scale, 1));
        if (square < 0x1p-126f)
            continue;
        const uint16_t root = fst_root_scale(fst_root_size(fst_root_term(largest)));
        const float v = fabsf(x), r = fst_bf16_to_f32(root);
        const uint8_t of_v = (uint8_t)fst_to_root(fst_root_term(v), fst_root_divisor(r));
        const double v_back = (double)fst_of_root(of_v, fst_root_factor(r));
        CHECK(of_v >= 1 || v == 0.0f);
        CHECK(of_v == code_of(v, root, 0) && (float)v_back == number_of(of_v, root, 0));
        CHECK_NEAR(sqrt(v_back), sqrt((double)v), (double)r / 255.0 * (of_v > 1 ? 0.501 : 1.001));
    }
    for (int sign = 0; sign < 512; sign++) { /* both kinds of codes, with the largest beside */
        const int is_signed = sign < 256, q = is_signed ? sign - 128 : sign - 256;
        const uint16_t scale = (uint16_t)(0x80 + random_below(0x7E80 - 0x80 + 1));
        const float most = number_of(is_signed ? 127 : 255, scale, is_signed);
        const double exact = is_signed ? q / (254.0 - abs(q)) : q / 255.0 * (q / 255.0);
        const double s = (double)fst_bf16_to_f32(scale);
        const float number = number_of((uint8_t)q, scale, is_signed);
        if (q == -128 || (!is_signed && (s > 0x1p60 || s < 0x1p-50)))
            continue;
        CHECK_INT(scale_of(&most, 1, is_signed), scale);
        CHECK_INT(code_of(number, scale, is_signed), (uint8_t)q);
        CHECK_NEAR((double)number / s / (is_signed ? 1.0 : s), exact,
                   (is_signed ? 1.2e-7 : 4e-7) * fabs(exact));
    }
    CHECK_INT(fst_signed_scale(fst_signed_size(0.0f)), 0);
    CHECK_INT(fst_signed_scale(fst_signed_size(0x1p-127f)), 0);
    CHECK_INT(fst_signed_scale(fst_signed_size(0x1p-126f)), 0x80);
    CHECK_INT(fst_root_scale(fst_root_size(0.0f)), 0);
    CHECK_INT(fst_signed_scale(fst_signed_size(-NAN)), FST_SCALE_NAN);
    CHECK_INT(fst_root_scale(fst_root_size(fst_root_term(-NAN))), FST_SCALE_NAN);
    CHECK_INT(fst_root_scale(fst_root_size(fst_root_term(-1e-30f))), FST_SCALE_NAN);
    CHECK_INT(fst_signed_scale(fst_signed_size(-INFINITY)), FST_SCALE_NAN);
    CHECK_INT(fst_signed_scale(fst_signed_size(0x1p126f)), 0x7E80);
    CHECK_INT(fst_signed_scale(fst_signed_size(0x1.000002p126f)), FST_SCALE_NAN);
    CHECK((uint8_t)fst_to_signed(0.0f, 1.0f) == 0 && (uint8_t)fst_to_root(0.0f, 1.0f) == 0);
    CHECK((uint8_t)fst_to_root(fst_root_term(0x1p-149f), 1.0f) == 1 &&
          (int8_t)fst_to_signed(-3.0f, 3.0f) == -127);
}

int main(void)
{
    static const fst_rule rules[] = {FST_RULE_momentum, FST_RULE_adam, FST_RULE_amsgrad};
    static const int64_t counts[] = {4096, 4097, 16384, 16448, 3 * 16384 + 77};
    level_count = supported_levels(levels);
    codes_are_near();
    for (size_t n = 0; n < sizeof lengths / sizeof lengths[0]; n++)
        blocks_end_where_they_should(lengths[n]);
    for (size_t r = 0; r < 3; r++)
        for (int kind = 0; kind < 8; kind++)
            for (size_t n = 0; n < sizeof lengths / sizeof lengths[0]; n++) {
                update_case c = {.rule = rules[r], .step = 2.0, .inv_scale = 0.5, .clip = 0.37};
                const double momentum[FST_MAX_HYPER] = {0.1, 0.9, 0.3, 0.01, 1.0};
                const double adam[FST_MAX_HYPER] = {0.01, 0.9, 0.999, 1e-8, 0.1, 1.0};
                memcpy(c.hyper, r == 0 ? momentum : adam, sizeof c.hyper);
                c.sign = kind & 1 ? -1.0 : 1.0;
                c.wide = kind & 2;
                c.write_grad = kind & 4;
                same_as_of_floats(&c, counts[(n + (size_t)kind) % 5], lengths[n], kind % 3 == 0);
            }
    return check_report();
}
