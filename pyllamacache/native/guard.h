// Keeps C++ exceptions inside the native library, and gives recursion over a caller's text the stack it needs.
#pragma once

#include <cstddef>
#include <exception>
#include <type_traits>

void log_error(const char * where, const char * what); // into the log ring

template <typename R, typename F> R guarded(const char * where, R on_failure, F && body) noexcept {
    try {
        return body();
    } catch (const std::exception & err) {
        log_error(where, err.what());
    } catch (...) {
        log_error(where, "unknown exception");
    }
    return on_failure;
}

// Runs on a stack of stack_bytes, and waits for it. false: there was none, and nothing was run. `run` must not throw.
bool run_on_stack(size_t stack_bytes, void (*run)(void *), void * arg) noexcept;

// Some of llama.cpp recurses over a caller's text: std::regex, behind pre-tokenizers without a splitter of their own,
// once per character of a run of equal class (26,000 spaces overflow 8 MiB and end the process), the grammar parser
// once per bracket or rule. So a long text gets a stack to match. It costs what is touched of it.
template <typename F> void with_stack_for(const char * where, size_t text_len, F && body) noexcept {
    constexpr size_t k_short_text = 2048;
    constexpr size_t k_base_bytes = 8u << 20;
    constexpr size_t k_per_byte   = 1024; // three times what the recursion was seen to need
    constexpr size_t k_page       = 1u << 16;

    if (text_len <= k_short_text) {
        body();
        return;
    }
    const auto run = [](void * self) noexcept { (*static_cast<std::remove_reference_t<F> *>(self))(); };
    const size_t stack_bytes = (k_base_bytes + k_per_byte * text_len + k_page - 1) / k_page * k_page;
    if (!run_on_stack(stack_bytes, run, &body)) {
        log_error(where, "no stack for a text of this length");
    }
}
