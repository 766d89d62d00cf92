// Drives captures of sequence states against synchronous reads of the same states, on one tiny model.
//
//   capture-driver MODEL [--device cpu|gpu] [--layers N] [--mode sync|host|staging|snapshot] [--type f32|f16|q8_0]
//                  [--flash 0|1] [--seed N] [--captures N] [--bench]
//
// The same schedule of decode calls runs from cleared memory several times, so that a capture can be compared with what
// a synchronous read gave at the same point. Exits with 1 and a message at the first difference. Prints JSON lines.

#include "llama.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

using bytes = std::vector<uint8_t>;

static const uint8_t UNTOUCHED = 0xA5;

struct options {
    std::string model;
    std::string device = "cpu";
    std::string mode;
    std::string type   = "f16";
    int         layers = 99;
    int         flash  = 0;
    uint32_t    seed   = 1;
    int         captures = 40;
    bool        bench  = false;
};

static options opt;

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "capture-driver: %s (seed %u)\n", what.c_str(), opt.seed);
    // Not exit(): a capture may be in flight, and static objects of a driver with threads of its own would go first.
    _Exit(1);
}

static void check(bool ok, const std::string & what) {
    if (!ok) {
        fail(what);
    }
}

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[values.size()/2];
}

static double percentile95(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[(values.size()*95)/100];
}

static bool quiet = false; // errors that a check provokes

static void log_line(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT && !quiet) {
        fputs(text, stderr);
    }
}

static bool asynchronous(llama_capture_mode mode) {
    return mode == LLAMA_CAPTURE_MODE_STAGING || mode == LLAMA_CAPTURE_MODE_SNAPSHOT;
}

//
// one context
//

static const int N_SEQ   = 3;
static const int N_VOCAB = 256;

// On lavapipe each row of a norm takes milliseconds, and flash attention with 2 to 4 tokens crashes: few tokens, and one
// at a time then.
static int n_ubatch() {
    return opt.flash ? 1 : 4;
}

static llama_model * model = nullptr;

struct context_deleter { void operator()(llama_context * ctx) { llama_free(ctx); } };
using context_ptr = std::unique_ptr<llama_context, context_deleter>;

static void select_mode(llama_context * ctx) {
    if (opt.mode.empty()) {
        return;
    }
    const llama_capture_mode mode =
        opt.mode == "sync"    ? LLAMA_CAPTURE_MODE_SYNC    :
        opt.mode == "host"    ? LLAMA_CAPTURE_MODE_HOST    :
        opt.mode == "staging" ? LLAMA_CAPTURE_MODE_STAGING : LLAMA_CAPTURE_MODE_SNAPSHOT;
    check(llama_state_capture_set_mode(ctx, mode), "the context refuses the mode " + opt.mode);
    check(llama_state_capture_info(ctx, 0).mode == mode || llama_memory_seq_pos_max(llama_get_memory(ctx), 0) < 0,
        "the mode is not the one that was set");
}

static context_ptr new_context() {
    auto params = llama_context_default_params();
    params.n_ctx           = 1024;
    params.n_batch         = 32;
    params.n_ubatch        = n_ubatch();
    params.n_seq_max       = N_SEQ;
    params.n_threads       = 1; // its threads spin at every barrier, for long where others use the cores
    params.n_threads_batch = 1;
    params.swa_full        = false;
    params.kv_unified      = true;
    params.flash_attn_type = opt.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

    const ggml_type type = opt.type == "f32" ? GGML_TYPE_F32 : opt.type == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    params.type_k = type;
    params.type_v = type;

    context_ptr ctx(llama_init_from_model(model, params));
    check(ctx != nullptr, "no context");
    select_mode(ctx.get());

    return ctx;
}

// decode n tokens of each given sequence, without asking for an output; returns at once where the device is asynchronous
static void decode(llama_context * ctx, std::mt19937 & rng, const std::vector<int> & seqs, int n, bool output = false) {
    auto batch = llama_batch_init(n*(int) seqs.size(), 0, 1);
    for (int seq : seqs) {
        const llama_pos pos = llama_memory_seq_pos_max(llama_get_memory(ctx), seq) + 1;
        for (int i = 0; i < n; ++i) {
            const int k = batch.n_tokens++;
            batch.token   [k]    = (llama_token) (rng() % N_VOCAB);
            batch.pos     [k]    = pos + i;
            batch.n_seq_id[k]    = 1;
            batch.seq_id  [k][0] = seq;
            batch.logits  [k]    = output && i == n - 1;
        }
    }
    const int res = llama_decode(ctx, batch);
    llama_batch_free(batch);
    check(res == 0, "llama_decode returned " + std::to_string(res));
}

static size_t state_size(llama_context * ctx, int seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
    return llama_state_seq_get_size_ext(ctx, seq, flags);
}

static bytes read_state(llama_context * ctx, int seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
    bytes res(state_size(ctx, seq, flags), UNTOUCHED);
    check(llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq, flags) == res.size(), "the synchronous read failed");
    return res;
}

// A capture with its destination, and one guard byte behind it
struct flight {
    bytes dst;
    size_t size = 0;
    llama_state_capture * capture = nullptr;
    size_t point = 0;

    llama_capture_result begin(llama_context * ctx, int seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        size = state_size(ctx, seq, flags);
        dst.assign(size + 1, UNTOUCHED);
        const auto res = llama_state_capture_begin(ctx, seq, flags, dst.data(), size, &capture);
        check((res == LLAMA_CAPTURE_OK) == (capture != nullptr), "result and handle do not agree");
        return res;
    }

    void must_begin(llama_context * ctx, int seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        check(begin(ctx, seq, flags) == LLAMA_CAPTURE_OK, "a capture could not be begun");
    }

    bool ready() const {
        return llama_state_capture_ready(capture);
    }

    void finish() {
        check(llama_state_capture_finish(capture) == size, "a capture did not give its bytes");
        capture = nullptr;
        check(dst.back() == UNTOUCHED, "a capture wrote behind its destination");
        dst.pop_back();
    }

    void cancel() {
        llama_state_capture_cancel(capture);
        capture = nullptr;
    }
};

static void same(const bytes & got, const bytes & want, const std::string & what) {
    if (got == want) {
        return;
    }
    size_t at = 0;
    while (at < std::min(got.size(), want.size()) && got[at] == want[at]) {
        ++at;
    }
    fail(what + ": " + std::to_string(got.size()) + " and " + std::to_string(want.size()) + " bytes, different from " + std::to_string(at));
}

//
// captures while decoding goes on
//

struct step {
    std::vector<int> seqs;
    int  n       = 0;     // tokens each
    bool output  = false; // and read the logits, which waits
    int  capture = -1;    // sequence to capture afterwards
    bool pair    = false; // and the next one with it
    int  remove  = -1;    // sequence to remove right after that
    int  copy    = -1;    // sequence that becomes a copy of sequence 0 then
};

static std::vector<step> make_schedule(std::mt19937 & rng, int captures) {
    const std::vector<int> sizes = { 1, 1, 1, 2, 3, 4, 6 };

    std::vector<step> res;
    std::vector<int>  used(N_SEQ, 0);
    for (int seq = 0; seq < N_SEQ; ++seq) {
        res.push_back({});
        res.back().seqs = { seq };
        res.back().n    = 2 + 4*seq;
        used[seq]       = res.back().n;
    }
    while (captures > 0) {
        step s;
        s.n = sizes[rng() % sizes.size()];
        if (s.n == 1 && rng() % 3 == 0) {
            for (int seq = 0; seq < N_SEQ; ++seq) {
                s.seqs.push_back(seq);
            }
        } else {
            s.seqs.push_back((int) (rng() % N_SEQ));
        }
        s.output = rng() % 8 == 0;
        if (rng() % 2) {
            s.capture = rng() % 4 ? s.seqs[0] : (int) (rng() % N_SEQ);
            captures--;
            s.pair = rng() % 2;
        }
        if (s.capture >= 0 && rng() % 3 == 0) {
            s.remove = s.capture;
        }
        for (int seq : s.seqs) {
            used[seq] += s.n;
        }
        if (s.remove < 0 && rng() % 6 == 0) {
            s.remove = s.copy = 1 + (int) (rng() % (N_SEQ - 1));
        }
        if (s.remove >= 0) {
            used[s.remove] = s.copy >= 0 ? used[0] : 0;
        }
        for (int seq = 0; seq < N_SEQ && s.remove < 0; ++seq) {
            if (used[seq] > 40) {
                s.remove  = seq;
                used[seq] = 0;
            }
        }
        res.push_back(s);
    }
    return res;
}

// `at` is called with the number of the capture point and the sequence
static void run_schedule(llama_context * ctx, const std::vector<step> & schedule, const std::function<void(size_t, int)> & at) {
    auto * mem = llama_get_memory(ctx);
    llama_memory_clear(mem, true);

    std::mt19937 rng(opt.seed + 1);
    size_t point = 0;
    for (const auto & s : schedule) {
        decode(ctx, rng, s.seqs, s.n, s.output);
        if (s.output) {
            check(llama_get_logits_ith(ctx, -1) != nullptr, "no logits");
        }
        if (s.capture >= 0) {
            at(point++, s.capture);
        }
        if (s.pair) {
            at(point++, (s.capture + 1) % N_SEQ);
        }
        if (s.remove >= 0) {
            check(llama_memory_seq_rm(mem, s.remove, -1, -1), "a sequence could not be removed");
        }
        if (s.copy >= 0) {
            llama_memory_seq_cp(mem, 0, s.copy, -1, -1);
        }
    }
}

static void check_equal(llama_context * ctx, int round) {
    std::mt19937 rng(opt.seed + 1000*round);
    const auto schedule = make_schedule(rng, opt.captures);

    std::vector<bytes> want;
    run_schedule(ctx, schedule, [&](size_t, int seq) { want.push_back(read_state(ctx, seq)); });
    run_schedule(ctx, schedule, [&](size_t i, int seq) { same(read_state(ctx, seq), want[i], "the schedule is not deterministic"); });

    size_t pending = 0;
    size_t busy    = 0;
    size_t paired  = 0;
    size_t cancelled = 0;

    std::deque<std::unique_ptr<flight>> flights;
    std::vector<std::pair<std::unique_ptr<flight>, bytes>> left; // cancelled, with what the destination held then

    auto settle = [&] {
        auto f = std::move(flights.front());
        flights.pop_front();
        switch (rng() % 4) {
            case 0: // from another thread
                std::thread([&] {
                    while (!f->ready()) {
                        std::this_thread::yield();
                    }
                    f->finish();
                }).join();
                same(f->dst, want[f->point], "a capture finished on another thread");
                break;
            case 1:
                if (round % 2) {
                    f->cancel();
                    cancelled++;
                    auto held = f->dst;
                    left.emplace_back(std::move(f), std::move(held));
                    break;
                }
                // fall through
            default:
                f->finish();
                same(f->dst, want[f->point], "a capture taken at point " + std::to_string(f->point));
        }
    };

    run_schedule(ctx, schedule, [&](size_t i, int seq) {
        auto f = std::make_unique<flight>();
        f->point = i;
        for (auto res = f->begin(ctx, seq); res != LLAMA_CAPTURE_OK; res = f->begin(ctx, seq)) {
            check(res == LLAMA_CAPTURE_BUSY && !flights.empty(), "a capture failed");
            busy++;
            settle();
        }
        pending += !f->ready();
        paired  += !f->ready() && !flights.empty() && !flights.back()->ready();
        flights.push_back(std::move(f));
    });
    while (!flights.empty()) {
        settle();
    }
    for (const auto & [f, held] : left) {
        same(f->dst, held, "a destination was touched after its capture was cancelled");
    }

    printf("{\"check\": \"equal\", \"round\": %d, \"captures\": %zu, \"in_flight\": %zu, \"two_in_flight\": %zu, \"busy\": %zu, \"cancelled\": %zu}\n",
        round, want.size(), pending, paired, busy, cancelled);
}

//
// single situations
//

// sequences of different lengths, with work queued at the end
static void fill(llama_context * ctx, std::mt19937 & rng) {
    llama_memory_clear(llama_get_memory(ctx), true);
    for (int seq = 0; seq < N_SEQ; ++seq) {
        decode(ctx, rng, { seq }, 4*(seq + 1));
    }
}

static void check_busy(llama_context * ctx) {
    std::mt19937 rng(opt.seed);
    fill(ctx, rng);
    const bool async = asynchronous(llama_state_capture_info(ctx, 0).mode);

    // that the third finds two in flight is likely, not certain: a device may be fast
    int seen = 0;
    for (int i = 0; i < 20 && !seen; ++i) {
        decode(ctx, rng, { 0 }, 4);
        flight f[3];
        f[0].must_begin(ctx, 0);
        f[1].must_begin(ctx, 1);
        const bool before = f[0].ready() || f[1].ready();
        const auto res = f[2].begin(ctx, 2);
        if (res == LLAMA_CAPTURE_BUSY) {
            seen++;
            check(async, "busy without anything in flight");
            f[0].finish();
            f[2].must_begin(ctx, 2);
        } else {
            check(res == LLAMA_CAPTURE_OK, "the third capture failed");
            check(before || f[0].ready() || f[1].ready(), "a third capture was begun with two in flight");
            f[0].finish();
        }
        f[1].finish();
        f[2].finish();
        for (int seq = 0; seq < N_SEQ; ++seq) {
            same(f[seq].dst, read_state(ctx, seq), "one of three captures");
        }
        if (llama_memory_seq_pos_max(llama_get_memory(ctx), 0) > 100) {
            fill(ctx, rng);
        }
    }
    check(seen || !async, "the third capture in flight was never refused");
}

// a state longer than the one before in the same slot, with no decode in between
static void check_growth(llama_context * ctx) {
    std::mt19937 rng(opt.seed);
    for (int i = 0; i < 2; ++i) {
        fill(ctx, rng);
        for (int seq : { 0, 1, 2, 0, 2, 1 }) {
            flight f;
            f.must_begin(ctx, seq);
            f.finish();
            same(f.dst, read_state(ctx, seq), "captures one after the other");
            flight g;
            g.must_begin(ctx, (seq + 1) % N_SEQ);
            g.finish();
        }
        // the same without a synchronous read, which lets the backends forget
        for (int seq : { 0, 0, 1, 2, 2, 0 }) {
            flight f;
            f.must_begin(ctx, seq);
            f.finish();
        }
        select_mode(ctx);
    }
}

static void check_cancel(llama_context * ctx) {
    std::mt19937 rng(opt.seed);
    fill(ctx, rng);
    for (int i = 0; i < 12; ++i) {
        decode(ctx, rng, { i % N_SEQ }, 1 + i % 4);
        flight a;
        flight b;
        a.must_begin(ctx, 0);
        b.must_begin(ctx, 1);
        if (i % 2) {
            std::thread([&] { a.cancel(); }).join();
        } else {
            a.cancel();
        }
        const auto held = a.dst;
        b.cancel();
        if (i % 3 == 0) {
            llama_synchronize(ctx);
        }
        flight c; // both slots are still taken until the device is done
        while (c.begin(ctx, 2) == LLAMA_CAPTURE_BUSY) {
            std::this_thread::yield();
        }
        c.finish();
        same(c.dst, read_state(ctx, 2), "a capture after two cancelled ones");
        same(a.dst, held, "a destination was touched after its capture was cancelled");
    }
}

static void check_overwritten(llama_context * ctx) {
    auto * mem = llama_get_memory(ctx);
    const std::vector<std::pair<std::string, std::function<void(const bytes & whole, const bytes & other)>>> ways = {
        { "cleared with data",    [&](const bytes &, const bytes &) { llama_memory_clear(mem, true); } },
        { "cleared",              [&](const bytes &, const bytes &) { llama_memory_clear(mem, false); } },
        { "cleared in its state", [&](const bytes &, const bytes &) {
            auto * part = llama_memory_get_part(mem, LLAMA_MEMORY_PART_STATE);
            llama_memory_clear(part ? part : mem, true);
        } },
        { "restored as a whole",  [&](const bytes & whole, const bytes &) {
            check(llama_state_set_data(ctx, whole.data(), whole.size()) == whole.size(), "the context could not be restored");
        } },
        { "restored",             [&](const bytes &, const bytes & other) {
            check(llama_state_seq_set_data_ext(ctx, other.data(), other.size(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == other.size(),
                "the sequence could not be restored");
        } },
        { "removed",              [&](const bytes &, const bytes &) { check(llama_memory_seq_rm(mem, 0, -1, -1), "not removed"); } },
    };

    for (const auto & [name, overwrite] : ways) {
        bytes want[2];
        for (int pass = 0; pass < 2; ++pass) { // the same tokens: read, capture
            std::mt19937 rng(opt.seed);
            fill(ctx, rng);
            bytes whole(llama_state_get_size(ctx));
            check(llama_state_get_data(ctx, whole.data(), whole.size()) == whole.size(), "the context could not be read");
            const bytes other = read_state(ctx, 0);
            decode(ctx, rng, { 0 }, 4);
            decode(ctx, rng, { 0 }, 4);
            if (pass == 0) {
                want[0] = read_state(ctx, 0);
                want[1] = read_state(ctx, 1);
                continue;
            }
            flight a;
            flight b;
            a.must_begin(ctx, 0);
            b.must_begin(ctx, 1);
            overwrite(whole, other);
            a.finish();
            b.finish();
            same(a.dst, want[0], "captured before its memory was " + name);
            same(b.dst, want[1], "captured before its neighbour's memory was " + name);
        }
    }
}

static void check_close() {
    for (int i = 0; i < 4; ++i) {
        bytes want[2];
        for (int pass = 0; pass < 2; ++pass) {
            auto ctx = new_context();
            std::mt19937 rng(opt.seed + i);
            fill(ctx.get(), rng);
            decode(ctx.get(), rng, { 0 }, 4);
            if (pass == 0) {
                want[0] = read_state(ctx.get(), 0);
                want[1] = read_state(ctx.get(), 1);
                continue;
            }
            flight a;
            flight b;
            a.must_begin(ctx.get(), 0);
            b.must_begin(ctx.get(), 1);
            if (i == 1) {
                a.cancel();
            }
            ctx.reset();
            if (i != 1) {
                check(a.ready(), "freeing the context did not complete its captures");
                a.finish();
                same(a.dst, want[0], "captured before its context was freed");
            }
            if (i == 2) {
                b.cancel();
            } else {
                b.finish();
                same(b.dst, want[1], "the second one captured before its context was freed");
            }
        }
    }
}

static void check_restore(llama_context * ctx) {
    std::mt19937 rng(opt.seed);
    fill(ctx, rng);
    flight f;
    f.must_begin(ctx, 1);
    decode(ctx, rng, { 1 }, 8);
    f.finish();
    check(llama_state_seq_set_data_ext(ctx, f.dst.data(), f.dst.size(), 1, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == f.dst.size(),
        "the setter refuses a captured state");
    same(read_state(ctx, 1), f.dst, "a captured state, restored and read again");

    fill(ctx, rng);
    flight g;
    g.must_begin(ctx, 1, LLAMA_STATE_SEQ_FLAGS_NONE);
    check(g.ready(), "a capture of the full state is not synchronous");
    g.finish();
    same(g.dst, read_state(ctx, 1, LLAMA_STATE_SEQ_FLAGS_NONE), "a capture of the full state");

    llama_memory_clear(llama_get_memory(ctx), true);
    flight e;
    e.must_begin(ctx, 1);
    e.finish();
    same(e.dst, read_state(ctx, 1), "the capture of an empty sequence");
}

static void check_arguments(llama_context * ctx) {
    std::mt19937 rng(opt.seed);
    fill(ctx, rng);
    const size_t size = state_size(ctx, 0);
    bytes dst(size);
    llama_state_capture * capture = (llama_state_capture *) &rng;
    const auto flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

    auto refused = [&](llama_context * c, int seq, llama_state_seq_flags f, uint8_t * to, size_t n, const char * what) {
        capture = (llama_state_capture *) &rng;
        check(llama_state_capture_begin(c, seq, f, to, n, &capture) == LLAMA_CAPTURE_FAILED, std::string("accepted: ") + what);
        check(capture == nullptr, std::string("a handle for: ") + what);
    };

    quiet = true;
    refused(nullptr, 0, flags, dst.data(), size, "no context");
    refused(ctx, -1, flags, dst.data(), size, "sequence -1");
    refused(ctx, N_SEQ, flags, dst.data(), size, "a sequence at the maximum");
    refused(ctx, 255, flags, dst.data(), size, "sequence 255");
    refused(ctx, 256, flags, dst.data(), size, "sequence 256");
    refused(ctx, 0, flags, nullptr, size, "no destination");
    refused(ctx, 0, flags, dst.data(), 0, "no bytes");
    refused(ctx, 0, flags, dst.data(), 7, "seven bytes");
    refused(ctx, 0, flags, dst.data(), size - 1, "a byte too few");
    refused(ctx, 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE, dst.data(), size, "states kept on the device");
    refused(ctx, 0, flags | LLAMA_STATE_SEQ_FLAGS_ON_DEVICE, dst.data(), size, "partial states kept on the device");
    refused(ctx, 0, 1u << 31, dst.data(), size, "an unknown flag");
    check(llama_state_capture_begin(ctx, 0, flags, dst.data(), size, nullptr) == LLAMA_CAPTURE_FAILED, "accepted: nowhere to put the handle");
    check(!llama_state_capture_set_mode(ctx, (llama_capture_mode) 17), "accepted: mode 17");
    check(!llama_state_capture_set_mode(nullptr, LLAMA_CAPTURE_MODE_SYNC), "a mode without a context");
    quiet = false;

    check(llama_state_capture_ready(nullptr), "nothing is not ready");
    check(llama_state_capture_finish(nullptr) == 0, "nothing has bytes");
    llama_state_capture_cancel(nullptr);

    // none of it cost a slot, and a destination may be larger than the state
    for (int i = 0; i < 3; ++i) {
        flight f;
        f.must_begin(ctx, 0);
        f.finish();
        same(f.dst, read_state(ctx, 0), "a capture after refused ones");
    }
    bytes wide(size + 1000, UNTOUCHED);
    check(llama_state_capture_begin(ctx, 0, flags, wide.data(), wide.size(), &capture) == LLAMA_CAPTURE_OK, "refused: room to spare");
    check(llama_state_capture_finish(capture) == size, "the size of the destination, not of the state");
}

// what is said about memory before it is allocated holds afterwards
static void check_accounting() {
    auto ctx = new_context();
    const auto before = llama_state_capture_info(ctx.get(), 0);
    check(before.host_bytes == 0 && before.device_bytes == 0, "memory is held before the first capture");
    check(before.n_slots == 2, "not two slots");

    std::mt19937 rng(opt.seed);
    fill(ctx.get(), rng);
    size_t most = 0;
    for (int seq = 0; seq < N_SEQ; ++seq) {
        most = std::max(most, state_size(ctx.get(), seq));
    }
    for (int round = 0; round < 2; ++round) {
        const size_t said = llama_state_capture_staging_size(ctx.get(), most);
        flight f[2];
        f[0].must_begin(ctx.get(), 2);
        f[1].must_begin(ctx.get(), 2);
        f[0].finish();
        f[1].finish();
        const auto info = llama_state_capture_info(ctx.get(), 2);
        check(info.host_bytes <= said, "more host memory than was said: " + std::to_string(info.host_bytes) + " of " + std::to_string(said));
        check(info.mode != LLAMA_CAPTURE_MODE_STAGING || (info.host_bytes >= most && info.device_bytes == 0), "staging without its memory");
        check((info.mode == LLAMA_CAPTURE_MODE_SNAPSHOT) == (info.device_bytes > 0), "snapshots without device memory, or device memory without snapshots");
    }
    check(llama_state_capture_set_mode(ctx.get(), LLAMA_CAPTURE_MODE_SYNC), "no synchronous mode");
    const auto after = llama_state_capture_info(ctx.get(), 0);
    check(after.host_bytes < 1u << 20 && after.device_bytes == 0, "memory is held by the synchronous mode");
}

//
// times
//

static void bench() {
    auto ctx = new_context();
    std::mt19937 rng(opt.seed);
    const int repeats = opt.captures;

    // the same work each time: one ubatch queued, then the read, then one more ubatch
    std::vector<double> begin, sync, next_with, next_without, done_with, done_without, finish, copy;
    size_t size = 0;
    for (int i = 0; i < 3*repeats + 3; ++i) {
        llama_memory_clear(llama_get_memory(ctx.get()), true);
        decode(ctx.get(), rng, { 0 }, 4);
        llama_synchronize(ctx.get());
        const int kind = i % 3;
        const bool warm = i >= 3;

        size = state_size(ctx.get(), 0);
        flight f;
        f.dst.assign(size + 1, UNTOUCHED);
        decode(ctx.get(), rng, { 0 }, 4);
        size = state_size(ctx.get(), 0);
        bytes dst(size, UNTOUCHED);

        const double t0 = now_ms();
        if (kind == 0) {
            f.size = size;
            check(llama_state_capture_begin(ctx.get(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, dst.data(), size, &f.capture) == LLAMA_CAPTURE_OK, "not begun");
        } else if (kind == 1) {
            check(llama_state_seq_get_data_ext(ctx.get(), dst.data(), size, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == size, "not read");
        }
        const double t1 = now_ms();
        decode(ctx.get(), rng, { 0 }, 4);
        const double t2 = now_ms();
        llama_synchronize(ctx.get());
        const double t3 = now_ms();
        if (kind == 0) {
            check(llama_state_capture_finish(f.capture) == size, "not finished");
        }
        const double t4 = now_ms();
        bytes other(size, UNTOUCHED);
        const double t5 = now_ms();
        memcpy(other.data(), dst.data(), size);
        const double t6 = now_ms();
        if (!warm) {
            continue;
        }
        copy.push_back(t6 - t5);
        if (kind == 0) {
            begin    .push_back(t1 - t0);
            next_with.push_back(t2 - t1);
            done_with.push_back(t3 - t1);
            finish   .push_back(t4 - t3);
        } else if (kind == 1) {
            sync.push_back(t1 - t0);
        } else {
            next_without.push_back(t2 - t1);
            done_without.push_back(t3 - t1);
        }
    }
    printf("{\"bench\": \"capture\", \"mode\": %d, \"state_bytes\": %zu, \"begin_ms\": %.4f, \"begin_p95_ms\": %.4f, \"sync_read_ms\": %.4f,"
        " \"next_decode_with_ms\": %.4f, \"next_decode_without_ms\": %.4f, \"next_done_with_ms\": %.4f, \"next_done_without_ms\": %.4f,"
        " \"finish_after_ms\": %.4f, \"memcpy_ms\": %.4f}\n",
        (int) llama_state_capture_info(ctx.get(), 0).mode, size, median(begin), percentile95(begin), median(sync), median(next_with), median(next_without),
        median(done_with), median(done_without), median(finish), median(copy));
}

static void parse(int argc, char ** argv) {
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--bench") {
            opt.bench = true;
            continue;
        }
        if (arg.compare(0, 2, "--") != 0) {
            opt.model = arg;
            continue;
        }
        check(i + 1 < argc, arg + " needs a value");
        const std::string value = argv[++i];
        if      (arg == "--device")   { opt.device   = value; }
        else if (arg == "--layers")   { opt.layers   = std::stoi(value); }
        else if (arg == "--mode")     { opt.mode     = value; }
        else if (arg == "--type")     { opt.type     = value; }
        else if (arg == "--flash")    { opt.flash    = std::stoi(value); }
        else if (arg == "--seed")     { opt.seed     = (uint32_t) std::stoul(value); }
        else if (arg == "--captures") { opt.captures = std::stoi(value); }
        else { fail("unknown argument " + arg); }
    }
    check(!opt.model.empty(), "no model given");
}

int main(int argc, char ** argv) {
    parse(argc, argv);
    setvbuf(stdout, nullptr, _IOLBF, 0); // a driver that hangs says how far it came
    llama_log_set(log_line, nullptr);
    llama_backend_init();

    auto params = llama_model_default_params();
    ggml_backend_dev_t none = nullptr;
    if (opt.device == "cpu") {
        params.devices      = &none;
        params.n_gpu_layers = 0;
    } else {
        check(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != nullptr || ggml_backend_dev_count() > 1, "no device beside the CPU");
        params.n_gpu_layers = opt.layers;
    }
    model = llama_model_load_from_file(opt.model.c_str(), params);
    check(model != nullptr, "the model could not be loaded");

    if (opt.bench) {
        bench();
    } else {
        auto ctx = new_context();
        std::mt19937 rng(opt.seed);
        fill(ctx.get(), rng);
        const auto info = llama_state_capture_info(ctx.get(), 0);
        printf("{\"check\": \"begin\", \"seed\": %u, \"mode\": %d, \"state_bytes\": %zu}\n", opt.seed, (int) info.mode, state_size(ctx.get(), 0));
        check_arguments(ctx.get());
        check_restore(ctx.get());
        check_busy(ctx.get());
        check_growth(ctx.get());
        check_overwritten(ctx.get());
        check_cancel(ctx.get());
        for (int round = 0; round < 2; ++round) {
            check_equal(ctx.get(), round);
        }
        ctx.reset();
        check_accounting();
        check_close();
        printf("{\"check\": \"end\"}\n");
    }

    llama_model_free(model);
    llama_backend_free();
    return 0;
}
