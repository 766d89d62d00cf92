// What a capture of a sequence's state costs beside a prefill on a device, and whether its bytes are right.
//
//   capture-bench MODEL [N_UBATCH [N_CAPTURES]]
//
// Prints one JSON object per line; ends with 1 at the first byte that differs. Every figure that is compared with another
// one comes from the same run, the two interleaved.

#include "llama.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using bytes = std::vector<uint8_t>;

static const char * const MODE_NAMES[] = { "sync", "host", "staging", "snapshot" };

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "capture-bench: %s\n", what.c_str());
    _Exit(1); // not exit(): a capture may be in flight
}

static void check(bool ok, const char * what) {
    if (!ok) {
        fail(what);
    }
}

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct series {
    std::vector<double> values;

    void add(double value) { values.push_back(value); }

    double at(double quantile) {
        std::sort(values.begin(), values.end());
        return values.empty() ? 0.0 : values[std::min(values.size() - 1, (size_t) (quantile*values.size()))];
    }

    std::string json() {
        char buf[128];
        snprintf(buf, sizeof(buf), "{\"median\": %.4f, \"p95\": %.4f, \"max\": %.4f, \"n\": %zu}", at(0.5), at(0.95),
            at(1.0), values.size());
        return buf;
    }
};

static int n_ubatch   = 512;
static int n_captures = 24;

static llama_model * model;
static llama_context * ctx;

static void clear_memory() {
    llama_synchronize(ctx);
    llama_memory_clear(llama_get_memory(ctx), true);
}

// One ubatch of sequence 0; without an output, so that it returns before the device is done.
static void decode(int i_ubatch) {
    auto batch = llama_batch_init(n_ubatch, 0, 1);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < n_ubatch; ++i) {
        const int pos = i_ubatch*n_ubatch + i;
        batch.token   [i]    = (llama_token) ((pos*2654435761u >> 8) % (uint32_t) n_vocab);
        batch.pos     [i]    = pos;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = 0;
        batch.logits  [i]    = 0;
    }
    batch.n_tokens = n_ubatch;
    const int ret = llama_decode(ctx, batch);
    llama_batch_free(batch);
    check(ret == 0, "llama_decode failed");
}

static size_t state_size() {
    return llama_state_seq_get_size_ext(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}

static void read_state(bytes & dst) {
    check(llama_state_seq_get_data_ext(ctx, dst.data(), dst.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == dst.size(),
        "a synchronous read failed");
}

static llama_state_capture * begin(bytes & dst) {
    llama_state_capture * capture = nullptr;
    const auto res = llama_state_capture_begin(ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, dst.data(), dst.size(), &capture);
    check(res != LLAMA_CAPTURE_FAILED, "a capture could not be begun");
    return res == LLAMA_CAPTURE_OK ? capture : nullptr;
}

static void finish(llama_state_capture * capture, size_t size) {
    check(llama_state_capture_finish(capture) == size, "a capture failed");
}

// The schedule once from an empty memory, with what is to be done after each ubatch.
template <typename F> static double prefill(const F & after) {
    clear_memory();
    const double start = now_ms();
    for (int i = 0; i < n_captures; ++i) {
        decode(i);
        after(i);
    }
    llama_synchronize(ctx);
    return now_ms() - start;
}

//
// bytes: captures taken while the next ubatches are decoded, against synchronous reads at the same positions
//

static void compare_bytes(llama_capture_mode mode) {
    const int n = std::min(n_captures, 8);
    const int all = n_captures;
    n_captures = n;

    std::vector<bytes> expected(n, bytes(state_size()));
    std::vector<bytes> captured = expected;

    int n_again = 0;
    for (int pass = 0; pass < 2; ++pass) {
        prefill([&](int i) {
            bytes state(expected[i].size());
            read_state(state);
            n_again += pass == 1 && state == expected[i];
            expected[i] = std::move(state);
        });
    }

    // where kernels add up in another order each time, only captures before anything else is decoded can be compared
    const bool repeats = n_again == n;

    std::vector<llama_state_capture *> captures(n);
    int n_equal = 0;
    prefill([&](int i) {
        while (!(captures[i] = begin(captured[i]))) {
            for (int k = 0; k < i; ++k) {
                if (captures[k]) {
                    finish(captures[k], captured[k].size());
                    captures[k] = nullptr;
                    break;
                }
            }
        }
        if (!repeats) {
            read_state(expected[i]);
        }
    });
    for (int i = 0; i < n; ++i) {
        if (captures[i]) {
            finish(captures[i], captured[i].size());
        }
        n_equal += captured[i] == expected[i];
    }
    printf("{\"what\": \"bytes\", \"mode\": \"%s\", \"captures\": %d, \"equal\": %d, \"while_decoding\": %s}\n",
        MODE_NAMES[mode], n, n_equal, repeats ? "true" : "false");
    check(n_equal == n, "a capture differs from a synchronous read");
    n_captures = all;
}

//
// the call: begin with a ubatch queued, and what the next decode call waits for, against a synchronous read
//

static void measure_call(llama_capture_mode mode, bytes & dst) {
    series call, ready, next, read, next_plain;
    prefill([&](int i) {
        if (i < 2) { // buffers and graphs are made with the first ones
            if (auto * capture = begin(dst)) {
                finish(capture, dst.size());
            }
            return;
        }
        double start = now_ms();
        switch (i % 3) {
            case 0:
                {
                    auto * capture = begin(dst);
                    check(capture != nullptr, "busy although nothing is in flight");
                    call.add(now_ms() - start);
                    while (!llama_state_capture_ready(capture)) {
                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                    }
                    ready.add(now_ms() - start);
                    finish(capture, dst.size());
                } break;
            case 1:
                {
                    read_state(dst);
                    read.add(now_ms() - start);
                } break;
            case 2:
                {
                } break;
        }
    });
    // in a run of its own, since here the capture is in flight while the next ubatch is submitted and computed
    llama_state_capture * capture = nullptr;
    double start = 0.0;
    prefill([&](int i) {
        llama_synchronize(ctx); // what the decode call before has queued is not the capture's doing
        if (i >= 2) {
            (i % 2 ? next : next_plain).add(now_ms() - start);
        }
        if (capture) {
            finish(capture, dst.size());
            capture = nullptr;
        }
        if (i % 2 == 0) {
            capture = begin(dst);
        }
        start = now_ms();
    });
    if (capture) {
        finish(capture, dst.size());
    }
    printf("{\"what\": \"call_ms\", \"mode\": \"%s\", \"begin\": %s, \"until_ready\": %s, \"synchronous_read\": %s, "
           "\"next_ubatch\": %s, \"next_ubatch_without\": %s}\n",
        MODE_NAMES[mode], call.json().c_str(), ready.json().c_str(), read.json().c_str(), next.json().c_str(),
        next_plain.json().c_str());
}

//
// prefill: a checkpoint after every ubatch, against none and against synchronous ones
//

static void measure_prefill(llama_capture_mode mode, std::vector<bytes> & ring) {
    series without, with, with_reads;
    int n_busy = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
        without.add(prefill([](int) {}));

        std::vector<llama_state_capture *> captures(ring.size());
        with.add(prefill([&](int i) {
            const size_t k = i % ring.size();
            if (captures[k]) { // its memory is the next one's, as in a pool of recycled blocks
                finish(captures[k], ring[k].size());
            }
            captures[k] = begin(ring[k]);
            n_busy += captures[k] == nullptr;
        }));
        for (size_t k = 0; k < ring.size(); ++k) {
            if (captures[k]) {
                finish(captures[k], ring[k].size());
            }
        }

        with_reads.add(prefill([&](int i) { read_state(ring[i % ring.size()]); }));
    }
    printf("{\"what\": \"prefill_ms\", \"mode\": \"%s\", \"tokens\": %d, \"checkpoint_every\": %d, \"without\": %s, "
           "\"with\": %s, \"with_synchronous_reads\": %s, \"dropped_as_busy\": %d, \"of\": %d}\n",
        MODE_NAMES[mode], n_captures*n_ubatch, n_ubatch, without.json().c_str(), with.json().c_str(),
        with_reads.json().c_str(), n_busy, 5*n_captures);
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        fail("which model?");
    }
    if (argc > 2) {
        n_ubatch = atoi(argv[2]);
    }
    if (argc > 3) {
        n_captures = atoi(argv[3]);
    }
    check(n_ubatch > 0 && n_captures >= 12, "at least one token and 12 captures");
    setvbuf(stdout, nullptr, _IOLBF, 0); // what is done stays readable if the time runs out

    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();

    auto mparams = llama_model_default_params();
    mparams.n_gpu_layers = 999;
    model = llama_model_load_from_file(argv[1], mparams);
    check(model != nullptr, "the model could not be loaded");

    auto cparams = llama_context_default_params();
    cparams.n_ctx      = n_ubatch*n_captures;
    cparams.n_batch    = n_ubatch;
    cparams.n_ubatch   = n_ubatch;
    cparams.n_seq_max  = 1;
    cparams.kv_unified = true;
    cparams.swa_full   = false;
    cparams.n_threads       = 1; // the device computes; threads that spin at barriers would disturb the worker's copies
    cparams.n_threads_batch = 1;
    ctx = llama_init_from_model(model, cparams);
    check(ctx != nullptr, "no context");

    decode(0);
    const size_t size = state_size();
    check(size > 0, "the model has no state to capture");

    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto dev = ggml_backend_dev_get(i);
        printf("{\"what\": \"device\", \"name\": \"%s\", \"description\": \"%s\"}\n", ggml_backend_dev_name(dev),
            ggml_backend_dev_description(dev));
    }
    const auto default_mode = llama_state_capture_info(ctx, 0).mode;
    printf("{\"what\": \"state\", \"bytes\": %zu, \"default_mode\": \"%s\"}\n", size, MODE_NAMES[default_mode]);

    std::vector<bytes> ring(4, bytes(size, 1)); // touched, as recycled memory is
    for (const auto mode : { LLAMA_CAPTURE_MODE_SNAPSHOT, LLAMA_CAPTURE_MODE_STAGING, LLAMA_CAPTURE_MODE_HOST, LLAMA_CAPTURE_MODE_SYNC }) {
        if (!llama_state_capture_set_mode(ctx, mode)) {
            printf("{\"what\": \"mode\", \"mode\": \"%s\", \"available\": false}\n", MODE_NAMES[mode]);
            continue;
        }
        clear_memory();
        decode(0);
        compare_bytes(mode);
        measure_call(mode, ring[0]);
        measure_prefill(mode, ring);
    }

    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
