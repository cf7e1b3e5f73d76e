/* A small libllama that behaves, and misbehaves on request.
 *
 * The exported names and struct layouts are those of llama.cpp's C API at the epoch named by STUB_EPOCH
 * (2606, 2608, 2609 or 2610: the xllamacpp releases of 2026). The "model" is a pure function: the logits of a
 * token depend on the tokens and positions of its sequence, never on the split mode, so that equality across a
 * switch can be checked exactly. Everything it does is written to a log of calls.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef STUB_EPOCH
#define STUB_EPOCH 2610
#endif
#ifndef STUB_ID
#define STUB_ID "1"
#endif

#define API __attribute__((visibility("default")))

enum { N_BYTES = 256, TOKEN_BOS = 256, TOKEN_EOS = 257, TOKEN_EOT = 258, TOKEN_PAD = 259, N_VOCAB = 260 };
enum { MODE_NONE, MODE_LAYER, MODE_ROW, MODE_TENSOR, N_MODES, MODE_ANY = -1 };
enum { LOG_INFO = 2, LOG_WARN = 3, LOG_ERROR = 4 };
enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8, TYPE_BF16 = 30 };
enum { MAX_DEVICES = 16, MAX_SEQ = 64 };

typedef void (*log_callback)(int level, const char *text, void *user_data);
typedef bool (*progress_callback)(float progress, void *user_data);
typedef bool (*abort_callback)(void *user_data);
typedef void (*free_function)(void);

/* ---- parameter structs, one layout for an epoch (Source: llama.h of that epoch) ---- */

#ifdef STUB_FORK
struct model_params { /* a fork's: devices is a string, more integers between the fields */
    const char *devices;
    int32_t n_gpu_layers, mla, split_mode, main_gpu, max_gpu, ncmoe, type_kv;
    const float *tensor_split;
    const char *rpc_servers;
    progress_callback progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides, *tensor_buft_overrides;
    bool vocab_only, use_mmap, use_mlock, check_tensors, repack_tensors, use_thp;
};
struct context_params {
    uint32_t seed, n_ctx, n_batch, n_ubatch, n_seq_max, n_threads, n_threads_batch;
    int32_t max_extra_alloc, rope_scaling_type, pooling_type, attention_type;
    float rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval, *cb_eval_user_data;
    int32_t type_k, type_v;
    bool logits_all, embeddings, offload_kqv, flash_attn;
    int32_t mla_attn, attn_max_batch;
    abort_callback abort_callback;
    void *abort_callback_data;
};
#else
struct model_params {
    void *const *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int32_t split_mode;
#if STUB_EPOCH >= 2608
    int32_t load_mode;
#endif
#if STUB_EPOCH >= 2609
    int32_t lazy_mode;
#endif
    int32_t main_gpu;
    const float *tensor_split;
    progress_callback progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
#if STUB_EPOCH < 2608
    bool use_mmap, use_direct_io, use_mlock;
#endif
    bool check_tensors, use_extra_bufts, no_host, no_alloc;
#if STUB_EPOCH >= 2608
    bool load_mtp;
#endif
};
struct context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max;
#if STUB_EPOCH >= 2608
    uint32_t n_outputs_max_per_seq;
#endif
#ifdef STUB_EXTRA_U32
    uint32_t n_unheard_of;
#endif
    int32_t n_threads, n_threads_batch;
    int32_t ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval, *cb_eval_user_data;
    int32_t type_k, type_v;
#if STUB_EPOCH >= 2610
    size_t moe_cache_size;
#endif
    abort_callback abort_callback;
    void *abort_callback_data;
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
#ifndef STUB_SHORT_CONTEXT
    void *samplers;
    size_t n_samplers;
#endif
    void *ctx_other;
};
#endif

struct batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
#ifdef STUB_FORK
    int32_t all_pos_0, all_pos_1, all_seq_id;
#endif
};

/* ---- objects; a freed one keeps its shell, so that a second free or a late use is seen and counted ---- */

struct device {
    const char *name, *description;
    int type;
    int64_t total, used;
};

struct handle {
    int id;
    bool live;
};

struct model {
    struct handle handle;
    char arch[64];
    char path[1024];
    int32_t n_layer, n_embd, n_head, n_head_kv, n_ctx_train, n_swa, n_embd_k, n_embd_v;
    char chat_template[4096];
    int64_t n_bytes;
    int mode, main_gpu, n_devices, n_contexts;
    struct device *devices[MAX_DEVICES];
    int64_t weights[MAX_DEVICES];
    struct adapter *adapters;
};

struct adapter {
    struct handle handle;
    struct model *model;
    struct adapter *next;
    uint64_t hash;
};

struct cell {
    int32_t pos, token;
    uint64_t seqs;
};

struct context;
struct memory {
    struct context *context;
    bool stale;
};

struct context {
    struct handle handle;
    struct model *model;
    struct context_params params;
    struct memory *memory;
    uint32_t n_ctx, n_ctx_seq, n_stream;
    bool flash_attn;
    struct cell *cells; /* n_stream x n_ctx_seq (one stream of n_ctx when unified) */
    float *logits, *embeddings;
    int32_t *output_of; /* batch index -> output row, -1 where none was asked for */
    int32_t n_batch_last, n_outputs;
    uint64_t adapters_hash;
    int64_t kv_bytes[MAX_DEVICES];
    abort_callback abort_callback;
    void *abort_callback_data;
    int inside; /* threads inside this context right now */
    bool busy;  /* decoded since the last synchronize */
};

/* ---- control.c: the log of calls, the faults, the counters ---- */

struct rule {
    char call[32], action[32], text[96];
    int64_t value;
    int mode;
    long from, seen;
    bool onward, from_file;
};

void stub_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void stub_tally(const char *name);
void stub_mistake(const char *format, ...) __attribute__((format(printf, 1, 2)));
void stub_say(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The fault that applies to this call now, or NULL. The actions abort, segv, kill, stop and hang are done here. */
const struct rule *stub_fault(const char *call, int mode);
bool stub_is(const struct rule *rule, const char *action);
int64_t stub_setting(const char *call, const char *action, int64_t otherwise);
const char *stub_mode_name(int mode);
void stub_enter(struct context *context);
void stub_leave(struct context *context);
int stub_next_id(const char *kind);
void stub_born(const char *kind);
void stub_died(const char *kind);

/* ---- model.c, vocab.c, adapters.c, context.c, state.c ---- */

struct device *stub_device(const char *name);
/* The first bytes of a file (to be freed), NULL where it cannot be read. */
uint8_t *stub_read_start(const char *path, size_t *n, int64_t *n_bytes);
bool stub_place(struct device *const *devices, int n, const int64_t *shares, int mode);
void stub_unplace(struct device *const *devices, int n, const int64_t *shares);
bool stub_share_weights(struct model *model, int mode, const float *tensor_split, int64_t *shares);
void stub_set_mode(struct model *model, int mode, const int64_t *shares);
bool stub_alive(const struct handle *handle, const char *function);
uint64_t stub_row_bytes(int32_t type, int32_t n);
void stub_row(uint8_t *out, int32_t type, int32_t n, int32_t token, int32_t layer, bool value);
int32_t stub_row_token(const uint8_t *row, int32_t type);
uint32_t stub_element_bytes(int32_t type);
void stub_element(uint8_t *out, int32_t type, int32_t token, int32_t layer, int32_t j);
