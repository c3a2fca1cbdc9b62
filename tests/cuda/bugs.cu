/* bugs.cu - kernels with the mistakes that the simulator is there to find. */
#include "../../cuda/words.h"
#include "bugs.h"

/* Threads of a block wait in different places. */
FST_KERNEL(bug_two_barriers, bug_launch)
{
    (void)launch;
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();
}

FST_KERNEL(bug_leaves_early, bug_launch)
{
    (void)launch;
    if (threadIdx.x == 7)
        return;
    __syncthreads();
}

FST_KERNEL(bug_half_a_shuffle, bug_launch)
{
    if (threadIdx.x % 32 < 16)
        launch.numbers[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, 1.0, 1);
    __syncthreads();
}

/* Each thread reads what its neighbor writes. */
FST_KERNEL(bug_missing_barrier, bug_launch)
{
    FST_SHARED(bug_shared, shared);
    shared->values[threadIdx.x] = (double)threadIdx.x;
    if (launch.right)
        __syncthreads();
    launch.numbers[blockIdx.x * FST_DEVICE_BLOCK + threadIdx.x] =
        shared->values[(threadIdx.x + 1) % FST_DEVICE_BLOCK];
}

/* Takes shared memory to be zero at first. */
FST_KERNEL(bug_fresh_shared, bug_launch)
{
    FST_SHARED(bug_shared, shared);
    if (threadIdx.x == 0)
        launch.numbers[blockIdx.x] = shared->values[0] + 1.0;
}

FST_KERNEL(bug_beyond_memory, bug_launch)
{
    launch.numbers[threadIdx.x + launch.right] = 1.0;
}

FST_KERNEL(bug_beyond_shared, bug_launch)
{
    FST_SHARED(bug_shared, shared);
    shared->values[threadIdx.x + launch.right] = 1.0;
}

/* Reads a word of 16 bytes where none begins: on a device that is a fault, on a CPU often right. */
FST_KERNEL(bug_misaligned_word, bug_launch)
{
    const fst_words *words = (const fst_words *)(launch.numbers + launch.right);
    if (threadIdx.x == 0)
        *launch.ticket = words->word[0];
}

/* Adds without an atomic operation. */
FST_KERNEL(bug_adds_at_once, bug_launch)
{
    if (threadIdx.x % 32 == 0)
        launch.numbers[0] += 1.0;
}

/* The last block reads what every other wrote. `right`: 1 with both fences, 2 without the writer's,
 * 3 without the reader's. */
FST_KERNEL(bug_missing_fence, bug_launch)
{
    FST_SHARED(bug_shared, shared);
    launch.numbers[1 + blockIdx.x * FST_DEVICE_BLOCK + threadIdx.x] = 1.0;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (launch.right != 2)
            __threadfence();
        shared->last = atomicInc(launch.ticket, gridDim.x - 1u) == gridDim.x - 1u;
        if (launch.right != 3)
            __threadfence();
    }
    __syncthreads();
    if (shared->last && threadIdx.x == 0)
        for (unsigned i = 0; i < gridDim.x * FST_DEVICE_BLOCK; i++)
            launch.numbers[0] += launch.numbers[1 + i];
}
