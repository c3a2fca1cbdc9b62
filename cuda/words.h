/* words.h - the macros that kernels are written in, for nvcc. To test without a GPU a C compiler
 * compiles them: the simulator (tests/cuda) then defines these macros, and CUDA's own names,
 * first. */
#pragma once

#include "base/device.h"
#include "base/portable.h"

#if defined(__CUDACC__)
#define FST_DEVICE static __device__ __forceinline__
#define FST_DEVICE_CALL static __device__ __noinline__
#define FST_UNROLL _Pragma("unroll")
#define FST_ROLLED _Pragma("unroll 1")
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
    FST_SMALL = 1024,                        /* elements of a chunk that a warp may update alone */
    FST_AT_ONCE = 8, /* loads of a thread that are in flight together, in loops of one block */
    FST_LANE_AT_ONCE = 16, /* the same, where a load is one element */
};

/* What one instruction moves: 16 bytes, over elements of any type. */
typedef struct __attribute__((aligned(16), may_alias)) {
    uint32_t word[4];
} fst_words;

/* An element, of which a word holds 4 or 8. */
typedef uint32_t __attribute__((may_alias)) fst_item_4;
typedef uint16_t __attribute__((may_alias)) fst_item_8;
#define FST_ITEM_OF(items) fst_item_##items
#define FST_ITEM(items) FST_ITEM_OF(items)

/* A pointer to global memory. nvcc uses faster instructions where it knows the kind of memory. */
FST_DEVICE void *fst_global(uint64_t address)
{
#if defined(__CUDACC__)
    return __cvta_global_to_generic(address);
#else
    return (void *)(uintptr_t)address;
#endif
}

/* The same number. nvcc does not see that, and so makes no copy of a loop for each number that
 * might stay the same in it: with a few of these it would take hours. */
FST_DEVICE int32_t fst_hidden(int32_t number)
{
#if defined(__CUDACC__)
    asm volatile("" : "+r"(number));
#endif
    return number;
}

/* Whether a condition holds that is the same for all threads of a warp. nvcc then knows that it is,
 * and that a branch keeps them together. */
FST_DEVICE int fst_uniform(int condition)
{
#if defined(__CUDACC__)
    return __any_sync(0xFFFFFFFFu, condition);
#else
    return condition;
#endif
}

/* nvcc keeps nothing in registers across this that it can read from memory again. */
FST_DEVICE void fst_read_again(void)
{
#if defined(__CUDACC__)
    asm volatile("" ::: "memory");
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

/* Element q of a word that holds 4 or 8. */
FST_DEVICE uint32_t fst_item_of(const fst_words *word, unsigned q, unsigned items)
{
    return items == 4 ? word->word[q] : word->word[q / 2] >> q % 2 * 16 & 0xFFFFu;
}

/* A word of 8 elements of 16 bits, of which `items` hold one in each place. */
FST_DEVICE fst_words fst_pack(const fst_words *items)
{
    fst_words word;
    FST_UNROLL
    for (unsigned n = 0; n < 4; n++)
        word.word[n] = items[n / 2].word[n % 2 * 2] | items[n / 2].word[n % 2 * 2 + 1] << 16;
    return word;
}

FST_DEVICE uint32_t fst_lowest_bit(uint64_t bits)
{
#if defined(__CUDACC__)
    return (uint32_t)__ffsll((long long)bits) - 1;
#else
    return (uint32_t)__builtin_ctzll(bits);
#endif
}

/* The largest of neighbouring lanes, of which there is a power of two. All lanes call it. */
FST_DEVICE uint32_t fst_largest(uint32_t x, unsigned lanes)
{
    FST_UNROLL
    for (unsigned apart = 1; apart < lanes; apart *= 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, x, apart);
        x = other > x ? other : x;
    }
    return x;
}

/* Brings what lies there in global memory into the cache, without waiting for it. */
FST_DEVICE void fst_ask_for(const void *at)
{
#if defined(__CUDACC__)
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(at)));
#else
    (void)at;
#endif
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

/* Two numbers rounded to bf16, `low` in the lower half. A NaN becomes 0x7FFF
 * where hardware rounds. */
FST_DEVICE uint32_t fst_narrow_two_bf16(float low, float high)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#elif defined(__CUDACC__)
    return fst_f32_to_bf16(low) | (uint32_t)fst_f32_to_bf16(high) << 16;
#else
    const uint32_t first = low != low ? 0x7FFFu : fst_f32_to_bf16(low);
    return first | (high != high ? 0x7FFFu : (uint32_t)fst_f32_to_bf16(high)) << 16;
#endif
}

/* As fst_narrow_two_bf16, to fp16. */
FST_DEVICE uint32_t fst_narrow_two_f16(float low, float high)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#elif defined(__CUDACC__)
    uint16_t first, second;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(first) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(second) : "f"(high));
    return first | (uint32_t)second << 16;
#else
    const uint32_t first = low != low ? 0x7FFFu : fst_f32_to_f16(low);
    return first | (high != high ? 0x7FFFu : (uint32_t)fst_f32_to_f16(high)) << 16;
#endif
}
