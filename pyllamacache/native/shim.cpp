#include "shim.h"

#include "constraint.h"
#include "guard.h"

#include "ggml-backend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// ---- log ring ----

// Native threads log whenever they like; Python reads when it likes. Bounded: the oldest record goes first.
class LogRing {
  public:
    static constexpr size_t k_max_records = 1024;

    void add(int level, const char * text) {
        if (level == GGML_LOG_LEVEL_CONT) {
            level = last_level.load(std::memory_order_relaxed);
        } else {
            last_level.store(level, std::memory_order_relaxed);
        }
        if (level < min_level.load(std::memory_order_relaxed)) {
            return;
        }
        std::lock_guard<std::mutex> guard(mutex);
        if (records.size() == k_max_records) {
            records.pop_front();
        }
        records.emplace_back(level, text ? text : "");
        pending.store((int32_t) records.size(), std::memory_order_relaxed);
    }

    int next(char * buf, size_t size) {
        std::lock_guard<std::mutex> guard(mutex);
        if (records.empty()) {
            return 0;
        }
        auto & [level, text] = records.front();
        const size_t n = std::min(text.size(), size - 1);
        std::memcpy(buf, text.data(), n);
        buf[n] = 0;
        const int res = level;
        records.pop_front();
        pending.store((int32_t) records.size(), std::memory_order_relaxed);
        return res;
    }

    std::atomic<int>     min_level { GGML_LOG_LEVEL_WARN };
    std::atomic<int>     last_level { GGML_LOG_LEVEL_INFO };
    std::atomic<int32_t> pending { 0 };
    std::mutex           mutex;

  private:
    std::deque<std::pair<int, std::string>> records;
};

// never destroyed: native threads may log while the process exits
LogRing & log_ring() {
    static LogRing * ring = new LogRing();
    return *ring;
}

void log_callback(ggml_log_level level, const char * text, void *) {
    try {
        log_ring().add((int) level, text);
    } catch (...) { // out of memory while logging: the record is lost, nothing else
    }
}

} // namespace

void log_error(const char * where, const char * what) {
    try {
        log_ring().add(GGML_LOG_LEVEL_ERROR, (std::string(where) + ": " + what + "\n").c_str());
    } catch (...) {
    }
}

namespace {

} // namespace

// ---- library ----

const char * plc_llama_tag(void) noexcept { return PLC_LLAMA_TAG; }

const char * plc_source_digest(void) noexcept { return PLC_SOURCE_DIGEST; }

const char * plc_patches(void) noexcept { return PLC_PATCHES; }

int32_t plc_is_portable(void) noexcept { return PLC_PORTABLE; }

void plc_init(int32_t log_level) noexcept {
    log_ring().min_level = log_level;
    llama_log_set(log_callback, nullptr);
    guarded("llama_backend_init", 0, [] {
        llama_backend_init();
        return 0;
    });
}

void plc_log_level(int32_t level) noexcept { log_ring().min_level = level; }

int32_t plc_log_pending(void) noexcept { return log_ring().pending.load(std::memory_order_relaxed); }

int32_t plc_log_next(char * buf, size_t size) noexcept { return size == 0 ? 0 : log_ring().next(buf, size); }

// ---- model ----

llama_model * plc_model_load(const char * path, const plc_model_params * params, plc_progress_fn progress,
                             void * user_data) noexcept {
    return guarded<llama_model *>("llama_model_load_from_file", nullptr, [&] {
        llama_model_params mparams = llama_model_default_params();

        mparams.n_gpu_layers                = params->n_gpu_layers;
        mparams.main_gpu                    = params->main_gpu;
        mparams.check_tensors               = params->check_tensors != 0;
        mparams.progress_callback           = progress;
        mparams.progress_callback_user_data = user_data;
        if (params->use_mmap >= 0) {
            mparams.load_mode = params->use_mmap ? (params->use_mlock ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MMAP)
                                                 : (params->use_mlock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE);
        } else if (params->use_mlock) {
            mparams.load_mode = LLAMA_LOAD_MODE_MMAP_MLOCK;
        }
        return llama_model_load_from_file(path, mparams);
    });
}

void plc_model_free(llama_model * model) noexcept {
    guarded("llama_model_free", 0, [&] {
        llama_model_free(model);
        return 0;
    });
}

int32_t plc_tokenize(const llama_vocab * vocab, const char * text, int32_t text_len, int32_t * tokens, int32_t n_max,
                     int32_t add_special, int32_t parse_special) noexcept {
    int32_t res = std::numeric_limits<int32_t>::min();
    with_stack_for("llama_tokenize", (size_t) text_len, [&]() noexcept {
        res = guarded("llama_tokenize", res, [&] {
            return llama_tokenize(vocab, text, text_len, tokens, n_max, add_special != 0, parse_special != 0);
        });
    });
    return res;
}

int32_t plc_detokenize(const llama_vocab * vocab, const int32_t * tokens, int32_t n_tokens, char * text, int32_t n_max,
                       int32_t remove_special, int32_t unparse_special) noexcept {
    return guarded("llama_detokenize", std::numeric_limits<int32_t>::min(), [&] {
        return llama_detokenize(vocab, tokens, n_tokens, text, n_max, remove_special != 0, unparse_special != 0);
    });
}

int32_t plc_token_to_piece(const llama_vocab * vocab, int32_t token, char * buf, int32_t size, int32_t special) noexcept {
    return guarded("llama_token_to_piece", std::numeric_limits<int32_t>::min(),
                   [&] { return llama_token_to_piece(vocab, token, buf, size, 0, special != 0); });
}

int32_t plc_eog_tokens(const llama_vocab * vocab, int32_t * ids, int32_t n_max) noexcept {
    return guarded("llama_vocab_is_eog", 0, [&] {
        int32_t n = 0;
        for (int32_t id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
            if (llama_vocab_is_eog(vocab, id)) {
                if (n < n_max) {
                    ids[n] = id;
                }
                n++;
            }
        }
        return n;
    });
}

// ---- context ----

struct plc_context {
    llama_context * ctx   = nullptr;
    llama_memory_t  mem   = nullptr;
    llama_memory_t  span  = nullptr; // parts of mem, NULL where it has none
    llama_memory_t  state = nullptr;

    std::vector<llama_adapter_lora *> adapters;

    int32_t  kind      = LLAMA_MEMORY_KIND_OTHER;
    int32_t  n_vocab   = 0;
    int32_t  n_swa     = 0;
    uint32_t n_seq_max = 0;
    bool     unified   = true;

    // batch arrays of n_batch entries
    std::vector<llama_pos>      pos;
    std::vector<int32_t>        n_seq_id;
    std::vector<llama_seq_id>   seq_id;
    std::vector<llama_seq_id *> seq_id_ptr;
    std::vector<int8_t>         output;

    int32_t fail_in    = 0;
    int32_t fail_code  = 0;
    bool    fail_after = false;

    bool has_seq(int32_t id) const { return id >= 0 && (uint32_t) id < n_seq_max; }

    // Ids above n_seq_max exist in the attention cache alone, and only where all sequences share one stream.
    bool has_span(int32_t id) const {
        return span && (has_seq(id) || (unified && id >= 0 && (size_t) id < llama_max_parallel_sequences()));
    }

    ~plc_context() {
        if (ctx) {
            llama_free(ctx);
        }
        for (auto * adapter : adapters) {
            llama_adapter_lora_free(adapter);
        }
    }
};

plc_context * plc_context_new(llama_model * model, const plc_context_params * params, const plc_adapter * adapters,
                              int32_t n_adapters, int32_t * failed_adapter) noexcept {
    *failed_adapter = -1;
    return guarded<plc_context *>("llama_init_from_model", nullptr, [&]() -> plc_context * {
        auto res = std::make_unique<plc_context>();

        llama_context_params cparams = llama_context_default_params();

        cparams.n_ctx             = params->n_cells;
        cparams.n_seq_max         = params->n_seq_max;
        cparams.n_batch           = params->n_batch;
        cparams.n_ubatch          = params->n_ubatch;
        cparams.n_threads         = params->n_threads;
        cparams.n_threads_batch   = params->n_threads_batch;
        cparams.type_k            = (ggml_type) params->type_k;
        cparams.type_v            = (ggml_type) params->type_v;
        cparams.flash_attn_type   = (llama_flash_attn_type) params->flash_attn;
        cparams.kv_unified        = params->kv_unified != 0;
        cparams.swa_full          = params->swa_full != 0;
        cparams.offload_kqv       = params->offload_kqv != 0;
        cparams.rope_scaling_type = (llama_rope_scaling_type) params->rope_scaling;
        cparams.rope_freq_base    = params->rope_freq_base;
        cparams.rope_freq_scale   = params->rope_freq_scale;
        cparams.no_perf           = true;
        // one row of logits per sequence is all a step asks for; the default reserves n_batch rows
        cparams.n_outputs_max     = params->n_seq_max;

        res->ctx = llama_init_from_model(model, cparams);
        if (!res->ctx) {
            return nullptr;
        }

        std::vector<float> scales;
        for (int32_t i = 0; i < n_adapters; ++i) {
            llama_adapter_lora * adapter = llama_adapter_lora_init(model, adapters[i].path);
            if (!adapter) {
                *failed_adapter = i;
                return nullptr;
            }
            res->adapters.push_back(adapter);
            scales.push_back(adapters[i].scale);
        }
        if (n_adapters > 0 &&
            llama_set_adapters_lora(res->ctx, res->adapters.data(), res->adapters.size(), scales.data()) != 0) {
            *failed_adapter = 0;
            return nullptr;
        }

        res->mem       = llama_get_memory(res->ctx);
        res->kind      = res->mem ? (int32_t) llama_memory_get_kind(res->mem) : -1;
        res->n_swa     = llama_model_n_swa(model);
        res->n_vocab   = llama_vocab_n_tokens(llama_model_get_vocab(model));
        res->n_seq_max = llama_n_seq_max(res->ctx);
        res->unified   = params->kv_unified != 0;
        // a window inside a plain KV cache is masked by a rule this library does not know
        if (res->kind == LLAMA_MEMORY_KIND_KV && res->n_swa > 0) {
            res->kind = LLAMA_MEMORY_KIND_OTHER;
        }
        if (res->mem && res->kind != LLAMA_MEMORY_KIND_OTHER) {
            res->span  = llama_memory_get_part(res->mem, LLAMA_MEMORY_PART_SPAN);
            res->state = llama_memory_get_part(res->mem, LLAMA_MEMORY_PART_STATE);
        }

        const size_t n_batch = llama_n_batch(res->ctx);
        res->pos.resize(n_batch);
        res->n_seq_id.assign(n_batch, 1);
        res->seq_id.resize(n_batch);
        res->output.resize(n_batch);
        res->seq_id_ptr.resize(n_batch + 1, nullptr);
        for (size_t i = 0; i < n_batch; ++i) {
            res->seq_id_ptr[i] = &res->seq_id[i];
        }
        return res.release();
    });
}

void plc_context_free(plc_context * ctx) noexcept {
    guarded("llama_free", 0, [&] {
        delete ctx;
        return 0;
    });
}

int32_t plc_context_memory_kind(const plc_context * ctx) noexcept { return ctx->kind; }

uint32_t plc_context_n_batch(const plc_context * ctx) noexcept { return llama_n_batch(ctx->ctx); }

uint32_t plc_context_n_ubatch(const plc_context * ctx) noexcept { return llama_n_ubatch(ctx->ctx); }

uint32_t plc_context_n_cells(const plc_context * ctx) noexcept { return llama_n_ctx(ctx->ctx); }

uint32_t plc_context_n_cells_seq(const plc_context * ctx) noexcept { return llama_n_ctx_seq(ctx->ctx); }

// ---- sequences ----

static plc_extent extent_of(const plc_context * ctx, int32_t seq_id) {
    plc_extent res = { -2, -2, -2, -2 };
    if (ctx->kind == LLAMA_MEMORY_KIND_OTHER) {
        res.span_min = llama_memory_seq_pos_min(ctx->mem, seq_id);
        res.span_max = llama_memory_seq_pos_max(ctx->mem, seq_id);
        return res;
    }
    if (ctx->span) {
        res.span_min = llama_memory_seq_pos_min(ctx->span, seq_id);
        res.span_max = llama_memory_seq_pos_max(ctx->span, seq_id);
    }
    if (ctx->state) {
        res.state_min = llama_memory_seq_pos_min(ctx->state, seq_id);
        res.state_max = llama_memory_seq_pos_max(ctx->state, seq_id);
    }
    return res;
}

// Whether the sequence holds exactly [0, n_tokens) in every part, window included.
static bool holds(const plc_context * ctx, int32_t seq_id, int32_t n_tokens) {
    const plc_extent extent = extent_of(ctx, seq_id);
    const int32_t    last   = n_tokens - 1;

    if (extent.span_max != -2 && extent.span_max != last) {
        return false;
    }
    if (extent.state_max != -2 && extent.state_max != last) {
        return false;
    }
    if (n_tokens == 0) {
        return true;
    }
    if (ctx->span && extent.span_min != 0) {
        return false;
    }
    if (ctx->kind == LLAMA_MEMORY_KIND_KV_WINDOW) {
        return extent.state_min <= std::max(0, n_tokens - ctx->n_swa + 1);
    }
    return true;
}

int32_t plc_seq_extent(const plc_context * ctx, int32_t seq_id, plc_extent * out) noexcept {
    if (!ctx->has_seq(seq_id)) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_pos_max", PLC_E_EXCEPTION, [&] {
        *out = extent_of(ctx, seq_id);
        return PLC_OK;
    });
}

int32_t plc_seq_trim(plc_context * ctx, int32_t seq_id, int32_t n_tokens) noexcept {
    if (!ctx->has_seq(seq_id) || n_tokens < 1) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_rm", PLC_E_EXCEPTION, [&] {
        if (holds(ctx, seq_id, n_tokens)) {
            return 1;
        }
        // true says nothing: a sliding window answers true when the window before the cut is gone
        return llama_memory_seq_rm(ctx->mem, seq_id, n_tokens, -1) && holds(ctx, seq_id, n_tokens) ? 1 : 0;
    });
}

int32_t plc_seq_erase(plc_context * ctx, int32_t seq_id) noexcept {
    if (!ctx->has_seq(seq_id)) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_rm", PLC_E_EXCEPTION, [&] {
        llama_memory_seq_rm(ctx->mem, seq_id, -1, -1);
        return holds(ctx, seq_id, 0) ? PLC_OK : PLC_E_LOST;
    });
}

int32_t plc_seq_share(plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens) noexcept {
    if (!ctx->has_span(donor_id) || !ctx->has_seq(seq_id) || donor_id == seq_id || n_tokens < 1 ||
        ctx->kind != LLAMA_MEMORY_KIND_KV) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_cp", PLC_E_EXCEPTION, [&]() -> int32_t {
        const plc_extent donor = extent_of(ctx, donor_id);
        if (donor.span_min != 0 || donor.span_max < n_tokens - 1 || !holds(ctx, seq_id, 0)) {
            return PLC_E_POSITION;
        }
        if (ctx->unified) {
            llama_memory_seq_cp(ctx->mem, donor_id, seq_id, 0, n_tokens);
        } else {
            // between streams only whole buffers can be copied
            llama_memory_seq_cp(ctx->mem, donor_id, seq_id, -1, -1);
            llama_memory_seq_rm(ctx->mem, seq_id, n_tokens, -1);
        }
        return holds(ctx, seq_id, n_tokens) ? PLC_OK : PLC_E_POSITION;
    });
}

size_t plc_state_size(plc_context * ctx, int32_t seq_id) noexcept {
    if (!ctx->has_seq(seq_id)) {
        return 0;
    }
    return guarded<size_t>("llama_state_seq_get_size_ext", 0,
                           [&] { return llama_state_seq_get_size_ext(ctx->ctx, seq_id, 0); });
}

size_t plc_state_get(plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size) noexcept {
    if (!ctx->has_seq(seq_id)) {
        return 0;
    }
    return guarded<size_t>("llama_state_seq_get_data_ext", 0,
                           [&] { return llama_state_seq_get_data_ext(ctx->ctx, dst, size, seq_id, 0); });
}

int32_t plc_state_set(plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size, int32_t n_tokens) noexcept {
    if (!ctx->has_seq(seq_id) || n_tokens < 1) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_state_seq_set_data_ext", PLC_E_LOST, [&]() -> int32_t {
        const auto       is_expected = [&] { return holds(ctx, seq_id, n_tokens); };
        const plc_extent before      = extent_of(ctx, seq_id);

        const size_t n_read = llama_state_seq_set_data_if(
            ctx->ctx, src, size, seq_id, 0, [](void * data) { return (*(decltype(is_expected) *) data)(); },
            (void *) &is_expected);
        if (n_read == size && n_read > 0) {
            return PLC_OK;
        }
        // some memory of the kind "other" cannot be put back
        const plc_extent after = extent_of(ctx, seq_id);
        if (std::memcmp(&before, &after, sizeof(before)) != 0) {
            llama_memory_seq_rm(ctx->mem, seq_id, -1, -1);
            return PLC_E_LOST;
        }
        return PLC_E_STATE;
    });
}

size_t plc_span_size(plc_context * ctx, int32_t seq_id, int32_t start, int32_t end) noexcept {
    if (!ctx->has_span(seq_id)) {
        return 0;
    }
    return guarded<size_t>("llama_state_seq_range_size", 0,
                           [&] { return llama_state_seq_range_size(ctx->ctx, seq_id, start, end); });
}

size_t plc_span_get(plc_context * ctx, int32_t seq_id, int32_t start, int32_t end, uint8_t * dst,
                    size_t size) noexcept {
    if (!ctx->has_span(seq_id)) {
        return 0;
    }
    return guarded<size_t>("llama_state_seq_get_range", 0,
                           [&] { return llama_state_seq_get_range(ctx->ctx, seq_id, start, end, dst, size); });
}

int32_t plc_span_append(plc_context * ctx, int32_t seq_id, int32_t start, int32_t end, const uint8_t * src,
                        size_t size) noexcept {
    if (!ctx->has_seq(seq_id) || !ctx->span) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_state_seq_append_range", PLC_E_EXCEPTION, [&] {
        const size_t n_read = llama_state_seq_append_range(ctx->ctx, seq_id, start, end, src, size);
        return n_read == size && n_read > 0 ? PLC_OK : PLC_E_STATE;
    });
}

// The other part of what is captured: the KV cells, which a donor shares.
static bool take_span(plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens) {
    const plc_extent donor = extent_of(ctx, donor_id);
    if (donor.span_min != 0 || donor.span_max < n_tokens - 1) {
        return false;
    }
    if (ctx->unified) {
        llama_memory_seq_cp(ctx->span, donor_id, seq_id, 0, n_tokens);
    } else {
        // between streams only whole buffers can be copied
        llama_memory_seq_cp(ctx->span, donor_id, seq_id, -1, -1);
        llama_memory_seq_rm(ctx->span, seq_id, n_tokens, -1);
    }
    return true;
}

int32_t plc_span_share(plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens) noexcept {
    if (!ctx->has_span(donor_id) || !ctx->has_span(seq_id) || donor_id == seq_id || n_tokens < 1) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_cp", PLC_E_EXCEPTION, [&]() -> int32_t {
        // copying onto cells that are there would add to them
        if (extent_of(ctx, seq_id).span_max != -1 || !take_span(ctx, donor_id, seq_id, n_tokens)) {
            return PLC_E_POSITION;
        }
        return extent_of(ctx, seq_id).span_max == n_tokens - 1 ? PLC_OK : PLC_E_POSITION;
    });
}

int32_t plc_span_trim(plc_context * ctx, int32_t seq_id, int32_t n_tokens) noexcept {
    if (!ctx->has_span(seq_id) || n_tokens < 0) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_rm", PLC_E_EXCEPTION, [&]() -> int32_t {
        // of the part: a recurrent part refuses ids it has no cell for before anything is removed
        llama_memory_seq_rm(ctx->span, seq_id, n_tokens, -1);
        return extent_of(ctx, seq_id).span_max < n_tokens ? PLC_OK : PLC_E_LOST;
    });
}

int32_t plc_span_length(const plc_context * ctx, int32_t seq_id) noexcept {
    if (!ctx->has_span(seq_id)) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_pos_max", PLC_E_EXCEPTION,
                            [&] { return llama_memory_seq_pos_max(ctx->span, seq_id) + 1; });
}

int32_t plc_seq_resume(plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens, const uint8_t * src,
                       size_t size) noexcept {
    const bool has_donor = donor_id >= 0;
    if (!ctx->has_seq(seq_id) || (has_donor && !ctx->has_span(donor_id)) || donor_id == seq_id || n_tokens < 1 ||
        !ctx->state) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_state_seq_set_data_ext", PLC_E_LOST, [&]() -> int32_t {
        const plc_extent before = extent_of(ctx, seq_id);
        if (has_donor ? !holds(ctx, seq_id, 0) : ctx->span && before.span_max < n_tokens - 1) {
            return PLC_E_POSITION;
        }
        // bytes of another position: whoever keeps them has mixed them up
        const auto is_expected = [&] {
            const plc_extent now = extent_of(ctx, seq_id);
            return now.state_max == n_tokens - 1 && (ctx->kind != LLAMA_MEMORY_KIND_KV_WINDOW ||
                                                     now.state_min <= std::max(0, n_tokens - ctx->n_swa + 1));
        };
        if (has_donor && !take_span(ctx, donor_id, seq_id, n_tokens)) {
            return PLC_E_POSITION;
        }
        const size_t n_read = llama_state_seq_set_data_if(
            ctx->ctx, src, size, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY,
            [](void * data) { return (*(decltype(is_expected) *) data)(); }, (void *) &is_expected);
        if (n_read != size || n_read == 0) {
            if (has_donor) {
                llama_memory_seq_rm(ctx->span, seq_id, -1, -1);
            }
            return PLC_E_STATE;
        }
        if (!has_donor && ctx->span) {
            llama_memory_seq_rm(ctx->span, seq_id, n_tokens, -1);
        }
        if (!holds(ctx, seq_id, n_tokens)) {
            llama_memory_seq_rm(ctx->mem, seq_id, -1, -1);
            return PLC_E_LOST;
        }
        return PLC_OK;
    });
}

// ---- captures ----

static llama_state_capture * capture_of(plc_capture * capture) {
    return reinterpret_cast<llama_state_capture *>(capture);
}

size_t plc_capture_size(plc_context * ctx, int32_t seq_id) noexcept {
    if (!ctx->has_seq(seq_id)) {
        return 0;
    }
    return guarded<size_t>("llama_state_seq_get_size_ext", 0, [&] {
        return llama_state_seq_get_size_ext(ctx->ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    });
}

size_t plc_capture_staging(const plc_context * ctx, size_t size) noexcept {
    return llama_state_capture_staging_size(ctx->ctx, size);
}

int32_t plc_capture_mode(const plc_context * ctx, int32_t seq_id) noexcept {
    return (int32_t) llama_state_capture_info(ctx->ctx, seq_id).mode;
}

int32_t plc_capture_begin(plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size, plc_capture ** out) noexcept {
    *out = nullptr;
    if (!ctx->has_seq(seq_id)) {
        return PLC_E_ARGUMENT;
    }
    llama_state_capture * capture = nullptr;
    switch (llama_state_capture_begin(ctx->ctx, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, dst, size, &capture)) {
        case LLAMA_CAPTURE_OK:
            *out = reinterpret_cast<plc_capture *>(capture);
            return PLC_OK;
        case LLAMA_CAPTURE_BUSY:
            return PLC_BUSY;
        case LLAMA_CAPTURE_FAILED:
            break;
    }
    return PLC_E_STATE;
}

int32_t plc_capture_ready(plc_capture * capture) noexcept { return llama_state_capture_ready(capture_of(capture)); }

size_t plc_capture_finish(plc_capture * capture) noexcept { return llama_state_capture_finish(capture_of(capture)); }

void plc_capture_cancel(plc_capture * capture) noexcept { llama_state_capture_cancel(capture_of(capture)); }

// ---- sampling ----

struct plc_sampler {
    sampler_ptr chain;   // NULL: greedy over the logits, with bias and end-of-generation tokens forbidden in place
    Constraint  constraint;

    std::vector<llama_token>      eog;
    std::vector<llama_logit_bias> bias;
    std::vector<float>            replaced; // what greedy sampling puts back after it
    std::vector<llama_token_data> candidates;

    int32_t min_tokens = 0;
    int32_t n_sampled  = 0;
    int32_t n_logprobs = -1;
};

plc_sampler * plc_sampler_new(const llama_model * model, const plc_sampler_params * params, const int32_t * history,
                              int32_t n_history) noexcept {
    return guarded<plc_sampler *>("llama_sampler_init", nullptr, [&]() -> plc_sampler * {
        const llama_vocab * vocab   = llama_model_get_vocab(model);
        const int32_t       n_vocab = llama_vocab_n_tokens(vocab);

        auto res = std::make_unique<plc_sampler>();

        res->min_tokens = params->min_tokens;
        res->n_logprobs = std::min<int32_t>(params->n_logprobs, PLC_MAX_TOP_LOGPROBS);
        if (res->min_tokens > 0) {
            for (int32_t id = 0; id < n_vocab; ++id) {
                if (llama_vocab_is_eog(vocab, id)) {
                    res->eog.push_back(id);
                }
            }
        }

        if (params->grammar || params->constraint) {
            const char * text = params->grammar ? params->grammar : params->constraint;
            with_stack_for("llama_sampler_init_grammar", std::strlen(text), [&]() noexcept {
                res->constraint = guarded<Constraint>("llama_sampler_init_grammar", Constraint(), [&] {
                    return params->grammar ? Constraint::from_grammar(vocab, text) : Constraint(vocab, text);
                });
            });
            if (!res->constraint) {
                return nullptr;
            }
        }

        const bool has_penalties =
            params->penalty_last_n > 0 &&
            (params->repeat_penalty != 1.0f || params->frequency_penalty != 0.0f || params->presence_penalty != 0.0f);
        const bool is_greedy = params->temperature <= 0.0f;

        for (int32_t i = 0; i < params->n_bias; ++i) {
            res->bias.push_back({ params->bias_ids[i], params->bias_values[i] });
        }
        if (is_greedy && !has_penalties && !res->constraint) {
            return res.release();
        }

        llama_sampler_chain_params cparams = llama_sampler_chain_default_params();
        cparams.no_perf                    = true;
        res->chain.reset(llama_sampler_chain_init(cparams));

        const auto add = [&](llama_sampler * sampler) {
            if (!sampler) {
                throw std::runtime_error("a sampler could not be made");
            }
            llama_sampler_chain_add(res->chain.get(), sampler);
        };

        if (!res->bias.empty()) {
            add(llama_sampler_init_logit_bias(n_vocab, (int32_t) res->bias.size(), res->bias.data()));
        }
        if (has_penalties) {
            llama_sampler * penalties =
                llama_sampler_init_penalties(n_vocab, params->penalty_last_n, params->repeat_penalty,
                                             params->frequency_penalty, params->presence_penalty);
            add(penalties);
            for (int32_t i = std::max(0, n_history - params->penalty_last_n); i < n_history; ++i) {
                llama_sampler_accept(penalties, history[i]);
            }
        }
        if (is_greedy) {
            add(llama_sampler_init_greedy());
        } else {
            if (params->top_k > 0) {
                add(llama_sampler_init_top_k(params->top_k));
            }
            if (params->top_p < 1.0f) {
                add(llama_sampler_init_top_p(params->top_p, 1));
            }
            if (params->min_p > 0.0f) {
                add(llama_sampler_init_min_p(params->min_p, 1));
            }
            add(llama_sampler_init_temp(params->temperature));
            add(llama_sampler_init_dist(params->seed));
        }
        res->candidates.reserve(n_vocab);
        return res.release();
    });
}

void plc_sampler_free(plc_sampler * sampler) noexcept {
    guarded("llama_sampler_free", 0, [&] {
        delete sampler;
        return 0;
    });
}

static void require_possible(float logit) {
    if (!(logit > -INFINITY)) { // also not a number
        throw std::runtime_error("no token is allowed here: every one is forbidden by grammar, logit_bias or min_tokens");
    }
}

// The first of the largest logits. Not a number never wins.
static int32_t arg_max(const float * logits, int32_t n_vocab) {
    constexpr int32_t k_lanes = 16; // independent maxima, which the compiler turns into vectors
    float   lane_max[k_lanes];
    float   best = -INFINITY;
    int32_t id   = 0;
    std::fill(lane_max, lane_max + k_lanes, -INFINITY);
    for (; id + k_lanes <= n_vocab; id += k_lanes) {
        for (int32_t lane = 0; lane < k_lanes; ++lane) {
            lane_max[lane] = logits[id + lane] > lane_max[lane] ? logits[id + lane] : lane_max[lane];
        }
    }
    for (int32_t lane = 0; lane < k_lanes; ++lane) {
        best = lane_max[lane] > best ? lane_max[lane] : best;
    }
    for (; id < n_vocab; ++id) {
        best = logits[id] > best ? logits[id] : best;
    }
    const float * found = std::find(logits, logits + n_vocab, best);
    return found == logits + n_vocab ? 0 : (int32_t) (found - logits);
}

// Greedy without a candidate array: what is biased or forbidden is changed in place and put back.
static int32_t sample_greedy(plc_sampler & sampler, float * logits, int32_t n_vocab) {
    sampler.replaced.clear();
    const bool forbids_end = sampler.n_sampled < sampler.min_tokens;
    for (const auto & bias : sampler.bias) {
        sampler.replaced.push_back(logits[bias.token]);
        logits[bias.token] += bias.bias;
    }
    if (forbids_end) {
        for (const llama_token id : sampler.eog) {
            sampler.replaced.push_back(logits[id]);
            logits[id] = -INFINITY;
        }
    }
    const int32_t best       = arg_max(logits, n_vocab);
    const float   best_logit = logits[best];
    size_t        n          = sampler.replaced.size();
    if (forbids_end) {
        for (size_t i = sampler.eog.size(); i > 0; --i) {
            logits[sampler.eog[i - 1]] = sampler.replaced[--n];
        }
    }
    for (size_t i = sampler.bias.size(); i > 0; --i) {
        logits[sampler.bias[i - 1].token] = sampler.replaced[--n];
    }
    require_possible(best_logit);
    return best;
}

static void fill_candidates(plc_sampler & sampler, const float * logits, int32_t n_vocab) {
    sampler.candidates.resize(n_vocab);
    for (int32_t id = 0; id < n_vocab; ++id) {
        sampler.candidates[id] = { id, logits[id], 0.0f };
    }
    if (sampler.n_sampled < sampler.min_tokens) {
        for (const llama_token id : sampler.eog) {
            sampler.candidates[id].logit = -INFINITY;
        }
    }
}

static llama_token_data apply_chain(plc_sampler & sampler) {
    llama_token_data_array cur = { sampler.candidates.data(), sampler.candidates.size(), -1, false };
    llama_sampler_apply(sampler.chain.get(), &cur);
    if (cur.selected < 0 || (size_t) cur.selected >= cur.size) {
        throw std::runtime_error("the sampler chain selected nothing");
    }
    return cur.data[cur.selected];
}

static int32_t sample_token(plc_sampler & sampler, float * logits, int32_t n_vocab) {
    if (!sampler.chain) {
        return sample_greedy(sampler, logits, n_vocab);
    }

    fill_candidates(sampler, logits, n_vocab);
    llama_token_data chosen = apply_chain(sampler);

    if (sampler.constraint) {
        // most tokens are allowed: test the chosen one before paying for the whole vocabulary
        llama_token_data       one    = { chosen.id, 1.0f, 0.0f };
        llama_token_data_array single = { &one, 1, -1, false };
        sampler.constraint.apply(single);
        if (one.logit == -INFINITY || !(chosen.logit > -INFINITY)) {
            fill_candidates(sampler, logits, n_vocab);
            llama_token_data_array all = { sampler.candidates.data(), sampler.candidates.size(), -1, false };
            sampler.constraint.apply(all);
            chosen = apply_chain(sampler);
        }
    }
    require_possible(chosen.logit);

    if (sampler.constraint) {
        sampler.constraint.accept(chosen.id);
    }
    llama_sampler_accept(sampler.chain.get(), chosen.id);
    return chosen.id;
}

static void fill_logprobs(const plc_sampler & sampler, const float * logits, int32_t n_vocab, plc_output & out) {
    const float max_logit = logits[arg_max(logits, n_vocab)];
    double      sum       = 0.0;
    for (int32_t id = 0; id < n_vocab; ++id) {
        sum += std::exp((double) (logits[id] - max_logit));
    }
    const double log_sum = (double) max_logit + std::log(sum);

    out.has_logprob = 1;
    out.logprob     = (float) ((double) logits[out.token] - log_sum);
    out.n_top       = std::min(sampler.n_logprobs, n_vocab);

    std::vector<int32_t> ids(n_vocab);
    for (int32_t id = 0; id < n_vocab; ++id) {
        ids[id] = id;
    }
    std::partial_sort(ids.begin(), ids.begin() + out.n_top, ids.end(), [&](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
    for (int32_t i = 0; i < out.n_top; ++i) {
        out.top_ids[i]      = ids[i];
        out.top_logprobs[i] = (float) ((double) logits[ids[i]] - log_sum);
    }
}

// ---- the step ----

static int32_t decode_group(plc_context & ctx, const plc_feed * feeds, int32_t n_feeds, const int32_t * tokens) {
    int32_t n_tokens = 0;
    int32_t previous = -1;

    for (int32_t f = 0; f < n_feeds; ++f) {
        const plc_feed & feed = feeds[f];
        if (!ctx.has_seq(feed.seq_id) || feed.seq_id <= previous || feed.n_tokens < 1 || feed.start < 0 ||
            (size_t) n_tokens + feed.n_tokens > ctx.pos.size()) {
            return PLC_E_ARGUMENT;
        }
        previous = feed.seq_id;
        // libllama checks one folded number, and on M-RoPE models not even that
        const plc_extent extent = extent_of(&ctx, feed.seq_id);
        if ((extent.span_max != -2 && extent.span_max != feed.start - 1) ||
            (extent.state_max != -2 && extent.state_max != feed.start - 1)) {
            log_error("plc_step", "a part of the sequence's memory does not end where the batch begins");
            return PLC_E_POSITION;
        }
        for (int32_t i = 0; i < feed.n_tokens; ++i) {
            ctx.pos[n_tokens]    = feed.start + i;
            ctx.seq_id[n_tokens] = feed.seq_id;
            ctx.output[n_tokens] = 0;
            n_tokens++;
        }
        if (feed.sampler || feed.logits) {
            ctx.output[n_tokens - 1] = 1;
        }
    }

    llama_batch batch = {};
    batch.n_tokens    = n_tokens;
    batch.token       = const_cast<llama_token *>(tokens);
    batch.pos         = ctx.pos.data();
    batch.n_seq_id    = ctx.n_seq_id.data();
    batch.seq_id      = ctx.seq_id_ptr.data();
    batch.logits      = ctx.output.data();

    const bool fails = ctx.fail_in > 0 && --ctx.fail_in == 0;
    if (fails && !ctx.fail_after) {
        return ctx.fail_code;
    }
    const int32_t code = llama_decode(ctx.ctx, batch);
    return fails ? ctx.fail_code : code;
}

static void sample_group(plc_context & ctx, const plc_feed * feeds, int32_t n_feeds, plc_output * outputs) {
    int32_t row = -1;
    for (int32_t f = 0; f < n_feeds; ++f) {
        const plc_feed & feed = feeds[f];
        row += feed.n_tokens;
        if (!feed.sampler && !feed.logits) {
            continue;
        }
        outputs[f].failed = guarded<int32_t>("sampling", 1, [&] {
            float * logits = llama_get_logits_ith(ctx.ctx, row);
            if (!logits) {
                throw std::runtime_error("no logits");
            }
            if (feed.logits) {
                std::memcpy(feed.logits, logits, (size_t) ctx.n_vocab * sizeof(float));
            }
            if (feed.sampler) {
                outputs[f].token = sample_token(*feed.sampler, logits, ctx.n_vocab);
                if (feed.sampler->n_logprobs >= 0) {
                    fill_logprobs(*feed.sampler, logits, ctx.n_vocab, outputs[f]);
                }
                feed.sampler->n_sampled++;
            }
            return 0;
        });
    }
}

void plc_step(plc_context * ctx, const plc_feed * feeds, const int32_t * group_sizes, int32_t n_groups,
              const int32_t * tokens, plc_output * outputs, plc_step_result * result) noexcept {
    *result = { 0, 0, 0 };
    for (int32_t g = 0; g < n_groups; ++g) {
        const int32_t n_feeds = group_sizes[g];
        for (int32_t f = 0; f < n_feeds; ++f) {
            outputs[f].token  = -1;
            outputs[f].failed = 0;
            outputs[f].n_top  = 0;
            outputs[f].has_logprob = 0;
        }
        const int32_t code = guarded<int32_t>("llama_decode", PLC_E_EXCEPTION,
                                              [&] { return decode_group(*ctx, feeds, n_feeds, tokens); });
        if (code != 0) {
            result->code = code;
            break;
        }
        sample_group(*ctx, feeds, n_feeds, outputs);
        for (int32_t f = 0; f < n_feeds; ++f) {
            tokens += feeds[f].n_tokens;
        }
        feeds += n_feeds;
        outputs += n_feeds;
        result->n_groups_done++;
    }
    result->log_pending = plc_log_pending();
}

// ---- for tests ----

int32_t plc_test_part_rm(plc_context * ctx, int32_t part, int32_t seq_id, int32_t p0, int32_t p1) noexcept {
    const llama_memory_t mem = part == LLAMA_MEMORY_PART_SPAN ? ctx->span : ctx->state;
    if (!mem || !ctx->has_seq(seq_id)) {
        return PLC_E_ARGUMENT;
    }
    return guarded<int32_t>("llama_memory_seq_rm", PLC_E_EXCEPTION,
                            [&] { return llama_memory_seq_rm(mem, seq_id, p0, p1) ? 1 : 0; });
}

size_t plc_test_state_get(plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size, uint32_t flags) noexcept {
    return guarded<size_t>("llama_state_seq_get_data_ext", 0, [&] {
        return dst ? llama_state_seq_get_data_ext(ctx->ctx, dst, size, seq_id, flags)
                   : llama_state_seq_get_size_ext(ctx->ctx, seq_id, flags);
    });
}

size_t plc_test_state_set(plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size, uint32_t flags) noexcept {
    return guarded<size_t>("llama_state_seq_set_data_ext", 0,
                           [&] { return llama_state_seq_set_data_ext(ctx->ctx, src, size, seq_id, flags); });
}

size_t plc_test_state_file(plc_context * ctx, int32_t seq_id, const char * path, int32_t save) noexcept {
    return guarded<size_t>("llama_state_seq_load_file", 0, [&] {
        llama_token token    = 0;
        size_t      n_tokens = 0;
        return save ? llama_state_seq_save_file(ctx->ctx, path, seq_id, &token, 1)
                    : llama_state_seq_load_file(ctx->ctx, path, seq_id, &token, 1, &n_tokens);
    });
}

size_t plc_test_all_get(plc_context * ctx, uint8_t * dst, size_t size) noexcept {
    return guarded<size_t>("llama_state_get_data", 0, [&] {
        return dst ? llama_state_get_data(ctx->ctx, dst, size) : llama_state_get_size(ctx->ctx);
    });
}

size_t plc_test_all_set(plc_context * ctx, const uint8_t * src, size_t size) noexcept {
    return guarded<size_t>("llama_state_set_data", 0, [&] { return llama_state_set_data(ctx->ctx, src, size); });
}

void plc_test_fail_decode(plc_context * ctx, int32_t nth, int32_t code, int32_t after_decode) noexcept {
    ctx->fail_in    = nth;
    ctx->fail_code  = code;
    ctx->fail_after = after_decode != 0;
}
