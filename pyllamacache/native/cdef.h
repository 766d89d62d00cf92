/* What Python calls, in the order of llama.h and shim.h. Enums and macros take their values from the compiler. */

/* ---- llama.h, ggml.h, ggml-backend.h: functions that cannot throw ---- */

struct llama_vocab;
struct llama_model;

enum ggml_log_level { GGML_LOG_LEVEL_NONE = ..., GGML_LOG_LEVEL_DEBUG = ..., GGML_LOG_LEVEL_INFO = ...,
                      GGML_LOG_LEVEL_WARN = ..., GGML_LOG_LEVEL_ERROR = ..., GGML_LOG_LEVEL_CONT = ... };

enum ggml_type { GGML_TYPE_F32 = ..., GGML_TYPE_F16 = ..., GGML_TYPE_BF16 = ..., GGML_TYPE_Q8_0 = ..., GGML_TYPE_Q4_0 = ...,
                 GGML_TYPE_Q4_1 = ..., GGML_TYPE_IQ4_NL = ..., GGML_TYPE_Q5_0 = ..., GGML_TYPE_Q5_1 = ..., ... };

enum llama_vocab_type { LLAMA_VOCAB_TYPE_NONE = ..., ... };

enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO = ..., LLAMA_FLASH_ATTN_TYPE_DISABLED = ...,
                             LLAMA_FLASH_ATTN_TYPE_ENABLED = ... };

enum llama_rope_scaling_type { LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED = ..., LLAMA_ROPE_SCALING_TYPE_NONE = ...,
                               LLAMA_ROPE_SCALING_TYPE_LINEAR = ..., LLAMA_ROPE_SCALING_TYPE_YARN = ...,
                               LLAMA_ROPE_SCALING_TYPE_LONGROPE = ... };

enum llama_memory_kind { LLAMA_MEMORY_KIND_OTHER = ..., LLAMA_MEMORY_KIND_KV = ..., LLAMA_MEMORY_KIND_KV_WINDOW = ...,
                         LLAMA_MEMORY_KIND_HYBRID = ..., LLAMA_MEMORY_KIND_RECURRENT = ... };

enum llama_capture_mode { LLAMA_CAPTURE_MODE_SYNC = ..., LLAMA_CAPTURE_MODE_HOST = ...,
                          LLAMA_CAPTURE_MODE_STAGING = ..., LLAMA_CAPTURE_MODE_SNAPSHOT = ... };

const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t      llama_model_n_ctx_train(const struct llama_model * model);
int32_t      llama_model_n_head(const struct llama_model * model);
int32_t      llama_model_n_swa(const struct llama_model * model);
int32_t      llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
uint64_t     llama_model_size(const struct llama_model * model);
uint64_t     llama_model_n_params(const struct llama_model * model);
bool         llama_model_has_decoder(const struct llama_model * model);
bool         llama_supports_gpu_offload(void);
enum llama_vocab_type llama_vocab_type(const struct llama_vocab * vocab);
int32_t      llama_vocab_n_tokens(const struct llama_vocab * vocab);
int32_t      llama_vocab_bos(const struct llama_vocab * vocab);
int32_t      llama_vocab_eos(const struct llama_vocab * vocab);
bool         llama_vocab_get_add_bos(const struct llama_vocab * vocab);
bool         llama_vocab_is_control(const struct llama_vocab * vocab, int32_t token);
const char * llama_print_system_info(void);

typedef struct ggml_backend_device * ggml_backend_dev_t;
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU = ..., GGML_BACKEND_DEVICE_TYPE_GPU = ...,
                             GGML_BACKEND_DEVICE_TYPE_IGPU = ..., GGML_BACKEND_DEVICE_TYPE_ACCEL = ..., ... };
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
size_t             ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char *       ggml_backend_dev_name(ggml_backend_dev_t device);
const char *       ggml_backend_dev_description(ggml_backend_dev_t device);
void               ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);

/* ---- shim.h ---- */

#define PLC_BUSY ...
#define PLC_E_ARGUMENT ...
#define PLC_E_POSITION ...

struct plc_context;
struct plc_sampler;

const char * plc_llama_tag(void);
const char * plc_source_digest(void);
const char * plc_patches(void);
int32_t      plc_is_portable(void);
void         plc_init(int32_t log_level);
void         plc_log_level(int32_t level);
int32_t      plc_log_pending(void);
int32_t      plc_log_next(char * buf, size_t size);

struct plc_model_params {
    int32_t n_gpu_layers;
    int32_t main_gpu;
    int32_t use_mmap;
    int32_t use_mlock;
    int32_t check_tensors;
};

typedef bool (*plc_progress_fn)(float progress, void * user_data);
extern "Python" bool plc_on_progress(float progress, void * user_data);

struct llama_model * plc_model_load(const char * path, const struct plc_model_params * params, plc_progress_fn progress,
                                    void * user_data);
void    plc_model_free(struct llama_model * model);
int32_t plc_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, int32_t * tokens,
                     int32_t n_max, int32_t add_special, int32_t parse_special);
int32_t plc_detokenize(const struct llama_vocab * vocab, const int32_t * tokens, int32_t n_tokens, char * text,
                       int32_t n_max, int32_t remove_special, int32_t unparse_special);
int32_t plc_token_to_piece(const struct llama_vocab * vocab, int32_t token, char * buf, int32_t size, int32_t special);
int32_t plc_eog_tokens(const struct llama_vocab * vocab, int32_t * ids, int32_t n_max);

struct plc_context_params {
    uint32_t n_cells;
    uint32_t n_seq_max;
    uint32_t n_batch;
    uint32_t n_ubatch;
    int32_t  n_threads;
    int32_t  n_threads_batch;
    int32_t  type_k;
    int32_t  type_v;
    int32_t  flash_attn;
    int32_t  kv_unified;
    int32_t  swa_full;
    int32_t  offload_kqv;
    int32_t  rope_scaling;
    float    rope_freq_base;
    float    rope_freq_scale;
};

struct plc_adapter {
    const char * path;
    float        scale;
};

struct plc_context * plc_context_new(struct llama_model * model, const struct plc_context_params * params,
                                     const struct plc_adapter * adapters, int32_t n_adapters, int32_t * failed_adapter);
void     plc_context_free(struct plc_context * ctx);
int32_t  plc_context_memory_kind(const struct plc_context * ctx);
uint32_t plc_context_n_batch(const struct plc_context * ctx);
uint32_t plc_context_n_ubatch(const struct plc_context * ctx);
uint32_t plc_context_n_cells(const struct plc_context * ctx);
uint32_t plc_context_n_cells_seq(const struct plc_context * ctx);

struct plc_extent {
    int32_t span_min;
    int32_t span_max;
    int32_t state_min;
    int32_t state_max;
};

int32_t plc_seq_extent(const struct plc_context * ctx, int32_t seq_id, struct plc_extent * out);
int32_t plc_seq_trim(struct plc_context * ctx, int32_t seq_id, int32_t n_tokens);
int32_t plc_seq_erase(struct plc_context * ctx, int32_t seq_id);
int32_t plc_seq_share(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens);
size_t  plc_state_size(struct plc_context * ctx, int32_t seq_id);
size_t  plc_state_get(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size);
int32_t plc_state_set(struct plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size, int32_t n_tokens);

size_t  plc_span_size(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end);
size_t  plc_span_get(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end, uint8_t * dst, size_t size);
int32_t plc_span_append(struct plc_context * ctx, int32_t seq_id, int32_t start, int32_t end, const uint8_t * src,
                        size_t size);
int32_t plc_span_share(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens);
int32_t plc_span_trim(struct plc_context * ctx, int32_t seq_id, int32_t n_tokens);
int32_t plc_span_length(const struct plc_context * ctx, int32_t seq_id);
int32_t plc_seq_resume(struct plc_context * ctx, int32_t donor_id, int32_t seq_id, int32_t n_tokens,
                       const uint8_t * src, size_t size);

struct plc_capture;

size_t  plc_capture_size(struct plc_context * ctx, int32_t seq_id);
size_t  plc_capture_staging(const struct plc_context * ctx, size_t size);
int32_t plc_capture_mode(const struct plc_context * ctx, int32_t seq_id);
int32_t plc_capture_begin(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size,
                          struct plc_capture ** out);
int32_t plc_capture_ready(struct plc_capture * capture);
size_t  plc_capture_finish(struct plc_capture * capture);
void    plc_capture_cancel(struct plc_capture * capture);

struct plc_chat;
struct plc_chat_reply;

void   plc_text_free(char * text);
struct plc_chat * plc_chat_new(const struct llama_model * model, const char * source, const char * bos, const char * eos,
                               char ** error);
void   plc_chat_free(struct plc_chat * chat);
char * plc_chat_facts(const struct plc_chat * chat, char ** error);
char * plc_chat_render(struct plc_chat * chat, const struct llama_model * model, const char * request,
                       struct plc_chat_reply ** reply, char ** error);
char * plc_chat_feed(struct plc_chat_reply * reply, const char * text, size_t text_len, int32_t is_last, char ** error);
void   plc_chat_reply_free(struct plc_chat_reply * reply);

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
    const char *    grammar;
    const char *    constraint;
    int32_t  n_logprobs;
};

struct plc_sampler * plc_sampler_new(const struct llama_model * model, const struct plc_sampler_params * params,
                                     const int32_t * history, int32_t n_history);
void plc_sampler_free(struct plc_sampler * sampler);

struct plc_feed {
    int32_t              seq_id;
    int32_t              start;
    int32_t              n_tokens;
    struct plc_sampler * sampler;
    float *              logits;
};

struct plc_output {
    int32_t token;
    int32_t failed;
    int32_t has_logprob;
    float   logprob;
    int32_t n_top;
    int32_t top_ids[20];
    float   top_logprobs[20];
};

struct plc_step_result {
    int32_t n_groups_done;
    int32_t code;
    int32_t log_pending;
};

void plc_step(struct plc_context * ctx, const struct plc_feed * feeds, const int32_t * group_sizes, int32_t n_groups,
              const int32_t * tokens, struct plc_output * outputs, struct plc_step_result * result);

int32_t plc_test_part_rm(struct plc_context * ctx, int32_t part, int32_t seq_id, int32_t p0, int32_t p1);
size_t  plc_test_state_get(struct plc_context * ctx, int32_t seq_id, uint8_t * dst, size_t size, uint32_t flags);
size_t  plc_test_state_set(struct plc_context * ctx, int32_t seq_id, const uint8_t * src, size_t size, uint32_t flags);
size_t  plc_test_state_file(struct plc_context * ctx, int32_t seq_id, const char * path, int32_t save);
size_t  plc_test_all_get(struct plc_context * ctx, uint8_t * dst, size_t size);
size_t  plc_test_all_set(struct plc_context * ctx, const uint8_t * src, size_t size);
void    plc_test_fail_decode(struct plc_context * ctx, int32_t nth, int32_t code, int32_t after_decode);
