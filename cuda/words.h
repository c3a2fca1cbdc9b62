/* words.h - the macros that kernels are written in, for nvcc. To test without a GPU a C compiler
 * compiles them: the simulator (tests/cuda) then defines these macros, and CUDA's own names,
 * first. */
#ifndef FST_CUDA_WORDS_H
#define FST_CUDA_WORDS_H

#include "base/device.h"
#include "base/portable.h"

#if defined(__CUDACC__)
#define FST_DEVICE static __device__ __forceinline__
#define FST_DEVICE_CALL static __device__ __noinline__
#define FST_UNROLL _Pragma("unroll")
/* A kernel with one parameter, `launch`, a struct by value. */
#define FST_KERNEL(name, launch_type)                                 \
    extern "C" __global__ void __launch_bounds__(FST_DEVICE_BLOCK, 2) \
        name(const __grid_constant__ launch_type launch)
/* A pointer to memory that the threads of a block share. */
#define FST_SHARED(type, name)       \
    __shared__ type name##_of_block; \
    type *const name = &name##_of_block
#endif

enum {
    FST_WARP = 32,
    FST_WARPS = FST_DEVICE_BLOCK / FST_WARP, /* of a block */
    FST_AT_ONCE = 8, /* loads of a thread that are in flight together, in loops of one block */
    FST_LANE_AT_ONCE = 16, /* the same, where a load is one element */
};

/* What one instruction moves: 16 bytes, over elements of any type. */
typedef struct __attribute__((aligned(16), may_alias)) {
    uint32_t word[4];
} fst_words;

/* A pointer to global memory. nvcc uses faster instructions where it knows the kind of memory. */
FST_DEVICE void *fst_global(uint64_t address)
{
#if defined(__CUDACC__)
    return __cvta_global_to_generic(address);
#else
    return (void *)(uintptr_t)address;
#endif
}

/* As fst_f16_to_f32, but that a NaN may get other bits. */
FST_DEVICE float fst_widen_f16(uint16_t half)
{
#if defined(__CUDACC__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    return fst_f16_to_f32(half);
#endif
}

FST_DEVICE fst_words fst_words_zero(void)
{
    fst_words zero;
    for (unsigned k = 0; k < 4; k++)
        zero.word[k] = 0;
    return zero;
}

/* Stores what nobody reads before the next step, so that it leaves a cache first. */
FST_DEVICE void fst_store_once(fst_words *to, fst_words words)
{
#if defined(__CUDACC__)
    const uint4 value = {words.word[0], words.word[1], words.word[2], words.word[3]};
    __stcs((uint4 *)to, value);
#else
    *to = words;
#endif
}

/* Two numbers rounded to bf16, `low` in the lower half. Hardware writes a NaN as 0x7FFF. */
FST_DEVICE uint32_t fst_narrow_two_bf16(float low, float high)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return fst_f32_to_bf16(low) | (uint32_t)fst_f32_to_bf16(high) << 16;
#endif
}

/* A word of 8 numbers rounded to bf16, with the bits of fst_f32_to_bf16. */
FST_DEVICE fst_words fst_narrow_bf16(const float *x)
{
    fst_words word;
    int nan = 0;
    FST_UNROLL
    for (unsigned q = 0; q < 4; q++) {
        word.word[q] = fst_narrow_two_bf16(x[2 * q], x[2 * q + 1]);
        nan |= x[2 * q] != x[2 * q] || x[2 * q + 1] != x[2 * q + 1];
    }
    if (nan) {
        FST_UNROLL
        for (unsigned q = 0; q < 4; q++) {
            const uint32_t low = word.word[q] & 0xFFFFu, high = word.word[q] >> 16;
            word.word[q] = (low == 0x7FFFu ? 0x7FC0u : low) | (high == 0x7FFFu ? 0x7FC0u : high)
                                                                  << 16;
        }
    }
    return word;
}

#endif
