/* Elements of a span beyond the 2^32nd, without its memory: an address that lies as far before it,
 * and a layout that sees the same few elements again and again. */
#include "../cuda/device.h"
#include "core/passes.h"

static void far_elements(fst_dtype dtype, int by_layout)
{
    const int64_t far = INT64_C(7) << 33;
    const fst_cpu_kernels *cpu = fst_cpu_select(NULL);
    fst_plan plan;
    device d;
    array *a = by_layout ? array_new(dtype, EXPANDED, 5000) : array_new_aligned(dtype, 5000);
    array_fill(a, random_unit);
    device_make_of(&d, &plan, a);
    const uint32_t count = d.chunks[0].count;
    d.chunks[0].begin = far;
    if (by_layout)
        d.layouts[0].shape[0] = INT64_C(1) << 34;
    else
        d.operands[0].data -= (uint64_t)far * fst_dtype_size(dtype);
    fst_norm_launch norm = {.tables = d.tables, .kind = FST_NORM_ABS};
    device_launch(&d, "fst_norm", 1, &norm);
    const double want = cpu->reduce(&a->op, 0, count, FST_NORM_ABS, 1.0, 1.0);
    CHECK(same_double(d.outcome->norm, want));
    if (!by_layout) {
        array *scaled = array_clone(a);
        fst_scale_launch scale = {.tables = d.tables, .factor = 0.7};
        cpu->scale(&scaled->op, 0, count, 0.7);
        device_launch(&d, "fst_scale", 1, &scale);
        CHECK(same_memory(a, scaled));
        array_free(scaled);
    }
    array_free(a);
    fst_plan_free(&plan);
    device_free(&d);
}

int main(void)
{
    for (int dtype = 0; dtype < FST_DTYPE_COUNT; dtype++)
        for (int by_layout = 0; by_layout < 2; by_layout++)
            far_elements((fst_dtype)dtype, by_layout);
    return check_report();
}
