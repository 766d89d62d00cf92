// A call on a stack of its own size. Where the C library can switch stacks, the calling thread runs it: a new thread
// would wait for a core while ggml's threads spin on all of them, some milliseconds for every token that is parsed.
#include "guard.h"

#include <cstdint>

#include <pthread.h>

#if defined(__has_feature)
#    if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#        define PLC_IS_WATCHED
#    endif
#endif

#if defined(PLC_IS_WATCHED) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#    define PLC_SWITCHES_STACKS 0 // sanitizers follow threads, and not these stacks
#elif defined(__linux__) && defined(__GLIBC__)
#    define PLC_SWITCHES_STACKS 1
#else
#    define PLC_SWITCHES_STACKS 0
#endif

#if PLC_SWITCHES_STACKS

#    include <sys/mman.h>
#    include <ucontext.h>

namespace {
struct switched_call {
    ucontext_t caller;
    ucontext_t callee;
    void (*run)(void *);
    void * arg;
};
} // namespace

// makecontext passes ints only
static void enter(unsigned high, unsigned low) {
    const auto * call = reinterpret_cast<switched_call *>(((uintptr_t) high << 32) | low);
    call->run(call->arg);
}

bool run_on_stack(size_t stack_bytes, void (*run)(void *), void * arg) noexcept {
    constexpr size_t k_guard = 1u << 16;
    void * memory = mmap(nullptr, stack_bytes + k_guard, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    switched_call call;
    bool          ok = mprotect(memory, k_guard, PROT_NONE) == 0 && getcontext(&call.callee) == 0;
    if (ok) {
        call.run                     = run;
        call.arg                     = arg;
        call.callee.uc_stack.ss_sp   = (char *) memory + k_guard;
        call.callee.uc_stack.ss_size = stack_bytes;
        call.callee.uc_link          = &call.caller;
        const uintptr_t self         = (uintptr_t) &call;
        makecontext(&call.callee, (void (*)()) enter, 2, (unsigned) (self >> 32), (unsigned) self);
        ok = swapcontext(&call.caller, &call.callee) == 0;
    }
    munmap(memory, stack_bytes + k_guard);
    return ok;
}

#else

bool run_on_stack(size_t stack_bytes, void (*run)(void *), void * arg) noexcept {
    struct call {
        void (*run)(void *);
        void * arg;
    } task { run, arg };
    const auto start = [](void * self) -> void * {
        static_cast<call *>(self)->run(static_cast<call *>(self)->arg);
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_t      thread;
    if (pthread_attr_init(&attributes) != 0) {
        return false;
    }
    const bool ok = pthread_attr_setstacksize(&attributes, stack_bytes) == 0 &&
                    pthread_create(&thread, &attributes, start, &task) == 0;
    pthread_attr_destroy(&attributes);
    if (ok) {
        pthread_join(thread, nullptr);
    }
    return ok;
}

#endif
