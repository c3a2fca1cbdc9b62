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

/* Keeps what a function must preserve, changes the stack, and returns on the other one. */
__attribute__((naked, noinline)) static void simt_switch(simt_context *from __attribute__((unused)),
                                                         const simt_context *to
                                                         __attribute__((unused)))
{
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n movq (%rsi), %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

/* Makes `context` start in `entry`, which never returns. */
static void simt_context_make(simt_context *context, char *stack, size_t size, void (*entry)(void))
{
    uintptr_t *top = (uintptr_t *)(((uintptr_t)stack + size) & ~(uintptr_t)15);
    *--top = 0; /* a return address for entry, which keeps the stack aligned */
    *--top = (uintptr_t)entry;
    for (int i = 0; i < 6; i++)
        *--top = 0;
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
