/* planted.cu - loops whose machine code is known, and faults that tests/machine must report. Each
 * loop adds 8 floats to 8 others, as words of 16 bytes. */
typedef struct __attribute__((aligned(16))) {
    float x[4];
} word;

static __device__ __forceinline__ word sum(word a, word b)
{
    for (int i = 0; i < 4; i++)
        a.x[i] += b.x[i];
    return a;
}

/* Four loads, then the sums, then two stores. */
extern "C" __global__ void plain(word *__restrict__ p, const word *__restrict__ q, unsigned count)
{
#pragma unroll 1
    for (unsigned i = threadIdx.x * 2; i < count; i += 512) {
        const word a = p[i], b = p[i + 1], c = q[i], d = q[i + 1];
        p[i] = sum(a, c);
        p[i + 1] = sum(b, d);
    }
}

/* The addresses may be the same, so that the store comes before the next load. */
extern "C" __global__ void waits(word *p, const word *q, unsigned count)
{
#pragma unroll 1
    for (unsigned i = threadIdx.x * 2; i < count; i += 512) {
        p[i] = sum(p[i], q[i]);
        p[i + 1] = sum(p[i + 1], q[i + 1]);
    }
}

/* What an element is, is asked of each. */
extern "C" __global__ void asks(word *__restrict__ p, const word *__restrict__ q, unsigned count,
                                const volatile int *type)
{
#pragma unroll 1
    for (unsigned i = threadIdx.x * 2; i < count; i += 512) {
        word a = p[i], b = p[i + 1];
        const word c = q[i], d = q[i + 1];
        for (int k = 0; k < 4; k++) {
            if (*type == 1)
                a.x[k] = sqrtf(a.x[k]), b.x[k] /= 3.0f;
            a.x[k] += c.x[k];
            b.x[k] += d.x[k];
        }
        p[i] = a;
        p[i + 1] = b;
    }
}

/* More values at a time than 32 registers hold. */
extern "C" __global__ void __launch_bounds__(1024, 2)
    spills(word *__restrict__ p, const word *__restrict__ q, unsigned count)
{
    word a[8];
#pragma unroll 1
    for (unsigned i = threadIdx.x * 8; i < count; i += 2048) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            a[k] = sum(p[i + k], q[i + k]);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++)
            p[i + k] = sum(a[k], a[7 - k]);
    }
}

/* The square in fp64 of what is read in fp32: a conversion and one operation per element. */
extern "C" __global__ void squares(const word *__restrict__ q, double *out, unsigned count)
{
    double lane[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < count; i += 256) {
        const word a = q[i];
        for (int k = 0; k < 4; k++)
            lane[k] = fma((double)a.x[k], (double)a.x[k], lane[k]);
    }
    out[threadIdx.x] = lane[0] + lane[1] + lane[2] + lane[3];
}
