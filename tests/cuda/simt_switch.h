/* simt_switch.h - one thread of the system, many stacks. swapcontext() enters the kernel at every
 * switch to keep the signal mask, which takes a hundred times as long: the few instructions that
 * are needed are written out for x86-64. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)

typedef struct {
    void *stack_pointer;
} simt_context;

/* Changes the stack, and goes on where the other one was left. Part of its caller: the processor
 * predicts a jump between fibers that wait in one place, and not a return to another stack's. */
__attribute__((always_inline)) static inline void simt_switch(simt_context *from,
                                                              const simt_context *to)
{
    __asm__ volatile("leaq -128(%%rsp), %%rsp\n" /* what the caller may use without saying so */
                     "pushq %%rbp\n pushq %%rbx\n leaq 1f(%%rip), %%rax\n pushq %%rax\n"
                     "movq %%rsp, (%0)\n movq (%1), %%rsp\n popq %%rax\n jmp *%%rax\n"
                     "1: popq %%rbx\n popq %%rbp\n leaq 128(%%rsp), %%rsp\n"
                     : "+D"(from), "+S"(to)
                     :
                     : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                       "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc",
                       "memory");
}

/* Makes `context` start in `entry`, which never returns. */
static void simt_context_make(simt_context *context, char *stack, size_t size, void (*entry)(void))
{
    uintptr_t *top = (uintptr_t *)(((uintptr_t)stack + size) & ~(uintptr_t)15);
    *--top = 0; /* a return address for entry, which keeps the stack aligned */
    *--top = (uintptr_t)entry;
    context->stack_pointer = top;
}

#else
#include <ucontext.h>

typedef struct {
    ucontext_t context;
} simt_context;

static void simt_switch(simt_context *from, const simt_context *to)
{
    swapcontext(&from->context, &to->context);
}

static void simt_context_make(simt_context *context, char *stack, size_t size, void (*entry)(void))
{
    getcontext(&context->context);
    context->context.uc_stack.ss_sp = stack;
    context->context.uc_stack.ss_size = size;
    context->context.uc_link = NULL;
    makecontext(&context->context, entry, 0);
}

#endif
