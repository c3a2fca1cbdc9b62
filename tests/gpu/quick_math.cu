/* quick_math.cu - the hardware's approximations and what is made of them, against / and sqrtf.
 *
 * Goes through all mantissas and prints a line per claim: how many were tried, how many were left
 * to the slow way, and how many were wrong. */
#include <cstdio>

#include "base/portable.h"
#undef FST_FN /* the rules call what is for the device alone */
#define FST_FN static __device__ __forceinline__
#include "../../cuda/quick_math.h"

typedef unsigned long long count_t;

__device__ count_t tried[4], left[4], wrong[4];

static __device__ uint32_t hashed(uint32_t n)
{
    n = (n ^ (n >> 16)) * 0x7feb352dU;
    n = (n ^ (n >> 15)) * 0x846ca68bU;
    return n ^ (n >> 16);
}

/* Any number between 2^-least and 2^(127 - least), and the sign of the hash. */
static __device__ float between(uint32_t n, uint32_t mantissa, uint32_t least)
{
    const uint32_t exponent = 127 - least + hashed(n) % 127;
    return fst_f32_of_bits(exponent << 23 | (mantissa & 0x7fffffU));
}

static __device__ void judge(int claim, float quick, float exact)
{
    atomicAdd(&tried[claim], 1ULL);
    if (isnan(quick))
        atomicAdd(&left[claim], 1ULL);
    else if (fst_bits_of_f32(quick) != fst_bits_of_f32(exact))
        atomicAdd(&wrong[claim], 1ULL);
}

__global__ void all_mantissas(uint32_t round)
{
    const uint32_t mantissa = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t seed = mantissa + (round << 23);
    const float y = between(3 * seed, mantissa, 63);
    const float x = between(3 * seed + 1, hashed(seed), 63);

    const float inverse = fst_inverse(y), nearest = __frcp_rn(y);
    const uint32_t apart = fst_bits_of_f32(inverse) - fst_bits_of_f32(nearest) + 1;
    atomicAdd(&tried[0], 1ULL);
    if (apart > 2)
        atomicAdd(&wrong[0], 1ULL);

    judge(1, fst_quick_sqrt(y), __fsqrt_rn(y));
    judge(2, fst_quick_divide(x, y), __fdiv_rn(x, y));

    const float p = between(3 * seed + 2, hashed(~seed), 30);
    const float size = 1e-3f, eps = 1e-8f;
    const float slow = p - size * __fdiv_rn(x, __fsqrt_rn(y) + eps);
    const float quick = fst_quick_descent(p, size, x, y, eps);
    judge(3, fabsf(quick) < FST_QUICK_MIN ? NAN : quick, slow);
}

int main()
{
    const char *claims[] = {"reciprocal within one place", "root", "quotient", "descent"};
    for (uint32_t round = 0; round < 64; round++)
        all_mantissas<<<(1 << 23) / 256, 256>>>(round);
    cudaError_t error = cudaDeviceSynchronize();
    count_t found[3][4];
    const cudaMemcpyKind back = cudaMemcpyDeviceToHost;
    if (!error)
        error = cudaMemcpyFromSymbol(found[0], tried, sizeof tried, 0, back);
    if (!error)
        error = cudaMemcpyFromSymbol(found[1], left, sizeof left, 0, back);
    if (!error)
        error = cudaMemcpyFromSymbol(found[2], wrong, sizeof wrong, 0, back);
    if (error) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        return 1;
    }
    for (int claim = 0; claim < 4; claim++)
        printf("%s: %llu tried, %llu left, %llu wrong\n", claims[claim], found[0][claim],
               found[1][claim], found[2][claim]);
    return 0;
}
