// The C face of the native library, as pyllamacache/native/*.py sees it.
//
// Every function here is noexcept and checks what it is handed; C++ exceptions and llama.cpp's return codes come out
// as numbers. No policy: which tokens to feed, what to keep and what to drop is decided in Python.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define PLC_API extern "C"
#define PLC_NOEXCEPT noexcept
#else
#define PLC_API
#define PLC_NOEXCEPT
#endif

enum { PLC_MAX_TOP_LOGPROBS = 20 };

// What our own checks return; llama_decode's codes pass through unchanged.
enum plc_code {
    PLC_OK          = 0,
    PLC_BUSY        = 1,    // as many captures are in flight as there can be
    PLC_E_EXCEPTION = -100, // a C++ exception; its text is in the log ring
    PLC_E_ARGUMENT  = -101, // a caller's mistake: a bug in this library
    PLC_E_POSITION  = -102, // a part of a sequence's memory does not end where the batch begins
    PLC_E_STATE     = -103, // saved bytes were refused; what was there before is back
    PLC_E_LOST      = -104, // saved bytes were refused and what was there before could not be put back
};

struct plc_context;
struct plc_sampler;

// ---- library ----

PLC_API const char * plc_llama_tag(void) PLC_NOEXCEPT;
PLC_API const char * plc_source_digest(void) PLC_NOEXCEPT;
PLC_API const char * plc_patches(void) PLC_NOEXCEPT; // comma-separated names
PLC_API int32_t      plc_is_portable(void) PLC_NOEXCEPT;
PLC_API void         plc_init(int32_t log_level) PLC_NOEXCEPT; // once, before anything else; also installs the log ring
PLC_API void         plc_log_level(int32_t level) PLC_NOEXCEPT; // ggml_log_level below which nothing is kept
PLC_API int32_t      plc_log_pending(void) PLC_NOEXCEPT;
// Moves one record out: its level is returned (0: the ring is empty), its text truncated into buf and terminated.
PLC_API int32_t      plc_log_next(char * buf, size_t size) PLC_NOEXCEPT;

// ---- model ----

struct plc_model_params {
    int32_t n_gpu_layers;
    int32_t main_gpu;
    int32_t use_mmap;      // 0, 1, or -1 for llama.cpp's choice
    int32_t use_mlock;
    int32_t check_tensors;
};

typedef bool (*plc_progress_fn)(float progress, void * user_data);

PLC_API struct llama_model * plc_model_load(const char * path, const struct plc_model_params * params,
                                            plc_progress_fn progress, void * user_data) PLC_NOEXCEPT;
PLC_API void plc_model_free(struct llama_model * model) PLC_NOEXCEPT;

// Number of tokens, or minus the number needed, INT32_MIN on overflow or failure.
PLC_API int32_t plc_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, int32_t * tokens,
                             int32_t n_max, int32_t add_special, int32_t parse_special) PLC_NOEXCEPT;
PLC_API int32_t plc_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int32_t n_tokens, char * text,
                               int32_t n_max, int32_t remove_special, int32_t unparse_special) PLC_NOEXCEPT;
PLC_API int32_t plc_token_to_piece(const struct llama_vocab * vocab, int32_t token, char * buf, int32_t size,
                                   int32_t special) PLC_NOEXCEPT;

// Number of end-of-generation tokens; the first n_max of them are written to ids.
PLC_API int32_t plc_eog_tokens(const struct llama_vocab * vocab, int32_t * ids, int32_t n_max) PLC_NOEXCEPT;

// ---- context ----

struct plc_context_params {
    uint32_t n_cells;        // KV cells over all sequences
    uint32_t n_seq_max;
    uint32_t n_batch;
    uint32_t n_ubatch;
    int32_t  n_threads;
    int32_t  n_threads_batch;
    int32_t  type_k;         // ggml_type
    int32_t  type_v;
    int32_t  flash_attn;     // llama_flash_attn_type
    int32_t  kv_unified;
    int32_t  swa_full;
    int32_t  offload_kqv;
    int32_t  rope_scaling;   // llama_rope_scaling_type
    float    rope_freq_base; // 0: from the model
    float    rope_freq_scale;
};

struct plc_adapter {
    const char * path;
    float        scale;
};

// NULL on failure; the log ring says why, and *failed_adapter is the index of the adapter that was refused, else -1.
PLC_API struct plc_context * plc_context_new(struct llama_model * model, const struct plc_context_params * params,
                                             const struct plc_adapter * adapters, int32_t n_adapters,
                                             int32_t * failed_adapter) PLC_NOEXCEPT;
PLC_API void     plc_context_free(struct plc_context * ctx) PLC_NOEXCEPT;
PLC_API int32_t  plc_context_memory_kind(const struct plc_context * ctx) PLC_NOEXCEPT; // llama_memory_kind, -1: none
PLC_API uint32_t plc_context_n_batch(const struct plc_context * ctx) PLC_NOEXCEPT;
PLC_API uint32_t plc_context_n_ubatch(const struct plc_context * ctx) PLC_NOEXCEPT;
PLC_API uint32_t plc_context_n_cells(const struct plc_context * ctx) PLC_NOEXCEPT;
PLC_API uint32_t plc_context_n_cells_seq(const struct plc_context * ctx) PLC_NOEXCEPT;

// ---- sequences ----

struct plc_extent {
    int32_t span_min;  // -1: empty; -2: this memory has no such part
    int32_t span_max;
    int32_t state_min;
    int32_t state_max;
};

PLC_API int32_t plc_seq_extent(const struct plc_context * ctx, int32_t seq_id, struct plc_extent * out) PLC_NOEXCEPT;
PLC_API int32_t plc_seq_trim(struct plc_context * ctx, int32_t seq_id, int32_t n_tokens) PLC_NOEXCEPT; // 1: done, 0: refused
PLC_API int32_t plc_seq_erase(struct plc_context * ctx, int32_t seq_id) PLC_NOEXCEPT;
PLC_API int32_t plc_seq_share(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens) PLC_NOEXCEPT;

PLC_API size_t  plc_state_size(struct plc_context * ctx, int32_t seq_id) PLC_NOEXCEPT; // 0 on failure
PLC_API size_t  plc_state_get(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size) PLC_NOEXCEPT;
PLC_API int32_t plc_state_set(struct plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size,
                              int32_t n_tokens) PLC_NOEXCEPT;

// The KV cells [start, end) of a sequence, of the span only: bytes that do not depend on the sequence, to be added to any
// sequence whose span ends at start. 0 on failure; what is not accepted changes nothing.
PLC_API size_t  plc_span_size(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end) PLC_NOEXCEPT;
PLC_API size_t  plc_span_get(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end, uint8_t * dst,
                             size_t size) PLC_NOEXCEPT;
PLC_API int32_t plc_span_append(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end,
                                const uint8_t * src, size_t size) PLC_NOEXCEPT;

// The span alone, of any sequence that has one: those below n_seq_max and, where all sequences share one stream, the ids
// up to llama_max_parallel_sequences() - 1, which nobody can decode and which have no state. Such an id can be a donor too.
PLC_API int32_t plc_span_share(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens) PLC_NOEXCEPT;
PLC_API int32_t plc_span_trim(struct plc_context * ctx, int32_t seq_id, int32_t n_tokens) PLC_NOEXCEPT;
PLC_API int32_t plc_span_length(const struct plc_context * ctx, int32_t seq_id) PLC_NOEXCEPT;

// Resume at n_tokens: what the sequence holds is cut there, or (donor_id >= 0, the sequence empty) the donor's cells
// [0, n_tokens) are taken; src is its state there, as a capture wrote it. PLC_E_STATE: refused, the sequence is as it was.
PLC_API int32_t plc_seq_resume(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens,
                               const uint8_t * src, size_t size) PLC_NOEXCEPT;

// ---- captures: the state part of a sequence, as it is now, while decoding goes on ----

struct plc_capture;

PLC_API size_t  plc_capture_size(struct plc_context * ctx, int32_t seq_id) PLC_NOEXCEPT; // 0 on failure
// Host memory that captures of states of this size take besides dst, all of them together.
PLC_API size_t  plc_capture_staging(const struct plc_context * ctx, size_t size) PLC_NOEXCEPT;
PLC_API int32_t plc_capture_mode(const struct plc_context * ctx, int32_t seq_id) PLC_NOEXCEPT; // llama_capture_mode
// PLC_OK and a capture that has to be finished or cancelled before the context is freed, PLC_BUSY, or an error. dst
// belongs to the capture until then.
PLC_API int32_t plc_capture_begin(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size,
                                  struct plc_capture ** out) PLC_NOEXCEPT;
PLC_API int32_t plc_capture_ready(struct plc_capture * capture) PLC_NOEXCEPT;
PLC_API size_t  plc_capture_finish(struct plc_capture * capture) PLC_NOEXCEPT; // waits; bytes written, 0: it failed
PLC_API void    plc_capture_cancel(struct plc_capture * capture) PLC_NOEXCEPT;

// ---- chat: templates, tool calls and schemas of llama-common; JSON in, JSON out ----

struct plc_chat;       // the templates of a model
struct plc_chat_reply; // the parser of one reply

// Texts that come out are freed with plc_text_free. *error is NULL or why nothing came out.
PLC_API void plc_text_free(char * text) PLC_NOEXCEPT;

// model: NULL for a template without one. source, bos, eos: NULL for the model's own.
PLC_API struct plc_chat * plc_chat_new(const struct llama_model * model, const char * source, const char * bos,
                                       const char * eos, char ** error) PLC_NOEXCEPT;
PLC_API void   plc_chat_free(struct plc_chat * chat) PLC_NOEXCEPT;
PLC_API char * plc_chat_facts(const struct plc_chat * chat, char ** error) PLC_NOEXCEPT;
// request: {messages, tools, tool_choice, parallel_tool_calls, json_schema, enable_thinking, template_kwargs, now_s,
// add_generation_prompt}. out: {prompt, parts: [[came from the request, bytes], ...], generation_prompt, stops, and what
// the sampler needs: constraint or null}. reply: NULL where none is expected.
PLC_API char * plc_chat_render(struct plc_chat * chat, const struct llama_model * model, const char * request,
                               struct plc_chat_reply ** reply, char ** error) PLC_NOEXCEPT;
// text: what was generated since the last call, control tokens included. out: {message, deltas}.
PLC_API char * plc_chat_feed(struct plc_chat_reply * reply, const char * text, size_t text_len, int32_t is_last,
                             char ** error) PLC_NOEXCEPT;
PLC_API void   plc_chat_reply_free(struct plc_chat_reply * reply) PLC_NOEXCEPT;

// ---- sampling ----

struct plc_sampler_params {
    float    temperature;
    int32_t  top_k;
    float    top_p;
    float    min_p;
    int32_t  penalty_last_n;
    float    repeat_penalty;
    float    frequency_penalty;
    float    presence_penalty;
    uint32_t seed;
    int32_t  min_tokens;
    int32_t  n_bias;
    const int32_t * bias_ids;
    const float *   bias_values;
    const char *    grammar;    // GBNF; NULL: none
    const char *    constraint; // instead: the "constraint" that plc_chat_render gave; NULL: none
    int32_t  n_logprobs;        // -1: none; 0: of the sampled token; n: and the n most probable
};

// NULL on failure, which with a grammar means that it does not parse. history: the end of the prompt, for penalties.
PLC_API struct plc_sampler * plc_sampler_new(const struct llama_model * model, const struct plc_sampler_params * params,
                                             const int32_t * history, int32_t n_history) PLC_NOEXCEPT;
PLC_API void plc_sampler_free(struct plc_sampler * sampler) PLC_NOEXCEPT;

// ---- the step ----

struct plc_feed {
    int32_t              seq_id;
    int32_t              start;    // position of the first token
    int32_t              n_tokens;
    struct plc_sampler * sampler;  // NULL: no output
    float *              logits;   // n_vocab floats to receive the last token's logits, or NULL
};

struct plc_output {
    int32_t token;      // -1: none
    int32_t failed;     // sampling failed; the log ring says why
    int32_t has_logprob;
    float   logprob;
    int32_t n_top;
    int32_t top_ids[20];
    float   top_logprobs[20];
};

struct plc_step_result {
    int32_t n_groups_done;
    int32_t code;       // of the group that failed
    int32_t log_pending;
};

// Decode n_groups groups of feeds one after the other; group g has group_sizes[g] feeds, in ascending order of
// sequence id; tokens holds the tokens of all feeds end to end. outputs has one entry per feed.
PLC_API void plc_step(struct plc_context * ctx, const struct plc_feed * feeds, const int32_t * group_sizes,
                      int32_t n_groups, const int32_t * tokens, struct plc_output * outputs,
                      struct plc_step_result * result) PLC_NOEXCEPT;

// ---- for tests ----

// Change a sequence behind the engine's back, so that a test can show that the change would be noticed: remove
// [p0, p1) from one part (llama_memory_part); read or write a state with llama.cpp's own flags and no check of ours.
PLC_API int32_t plc_test_part_rm(struct plc_context * ctx, int32_t part, int32_t seq_id, int32_t p0, int32_t p1) PLC_NOEXCEPT;
PLC_API size_t  plc_test_state_get(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size, uint32_t flags) PLC_NOEXCEPT;
PLC_API size_t  plc_test_state_set(struct plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size, uint32_t flags) PLC_NOEXCEPT;
PLC_API size_t  plc_test_state_file(struct plc_context * ctx, int32_t seq_id, const char * path, int32_t save) PLC_NOEXCEPT;
PLC_API size_t  plc_test_all_get(struct plc_context * ctx, uint8_t * dst, size_t size) PLC_NOEXCEPT; // of all sequences
PLC_API size_t  plc_test_all_set(struct plc_context * ctx, const uint8_t * src, size_t size) PLC_NOEXCEPT;

// Make the n-th llama_decode from now return this code after (after_decode 1) or instead of (0) the real one.
PLC_API void plc_test_fail_decode(struct plc_context * ctx, int32_t nth, int32_t code, int32_t after_decode) PLC_NOEXCEPT;
