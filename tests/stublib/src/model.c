/* Defaults, devices, model files, placing weights on devices. */
#define _GNU_SOURCE
#include "stub.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- defaults: written field by field, so that the padding stays as the caller left it ---- */

static void model_defaults(volatile struct model_params *p) {
    p->devices = NULL;
    p->tensor_buft_overrides = NULL;
    p->split_mode = MODE_LAYER;
    p->main_gpu = 0;
    p->tensor_split = NULL;
    p->progress_callback = NULL;
    p->progress_callback_user_data = NULL;
    p->kv_overrides = NULL;
    p->vocab_only = false;
    p->check_tensors = false;
    p->n_gpu_layers = -1;
#ifdef STUB_FORK
    p->mla = p->max_gpu = p->ncmoe = p->type_kv = 0;
    p->rpc_servers = NULL;
    p->use_mmap = true;
    p->use_mlock = p->repack_tensors = p->use_thp = false;
#else
    p->use_extra_bufts = true;
    p->no_host = false;
    p->no_alloc = false;
#if STUB_EPOCH < 2608
    p->use_mmap = true;
    p->use_direct_io = false;
    p->use_mlock = false;
#else
    p->load_mode = -1;
    p->load_mtp = false;
#endif
#if STUB_EPOCH >= 2609
    p->lazy_mode = 1;
#endif
#endif
}

static void context_defaults(volatile struct context_params *p) {
    p->n_ctx = 512;
    p->n_batch = 2048;
    p->n_ubatch = 512;
    p->n_seq_max = 1;
    p->n_threads = 4;
    p->n_threads_batch = 4;
    p->rope_scaling_type = -1;
    p->pooling_type = -1;
    p->attention_type = -1;
    p->rope_freq_base = 0.0f;
    p->rope_freq_scale = 0.0f;
    p->yarn_ext_factor = -1.0f;
    p->yarn_attn_factor = -1.0f;
    p->yarn_beta_fast = -1.0f;
    p->yarn_beta_slow = -1.0f;
    p->yarn_orig_ctx = 0;
    p->defrag_thold = -1.0f;
    p->cb_eval = NULL;
    p->cb_eval_user_data = NULL;
    p->type_k = TYPE_F16;
    p->type_v = TYPE_F16;
    p->abort_callback = NULL;
    p->abort_callback_data = NULL;
    p->embeddings = false;
    p->offload_kqv = true;
#ifdef STUB_JUNK_CALLBACK
    p->abort_callback = (abort_callback) (uintptr_t) 0x7f00deadbeef;
#endif
#ifdef STUB_FORK
    p->seed = 0xffffffff;
    p->max_extra_alloc = 256;
    p->logits_all = p->flash_attn = false;
    p->mla_attn = p->attn_max_batch = 0;
#else
    p->n_rs_seq = 0;
    p->n_outputs_max = 0;
#if STUB_EPOCH >= 2608
    p->n_outputs_max_per_seq = 1;
#endif
#ifdef STUB_EXTRA_U32
    p->n_unheard_of = 0;
#endif
    p->ctx_type = 0;
    p->flash_attn_type = -1;
#if STUB_EPOCH >= 2610
    p->moe_cache_size = 0;
#endif
    p->no_perf = true;
    p->op_offload = true;
    p->swa_full = true;
    p->kv_unified = false;
#ifndef STUB_SHORT_CONTEXT
    p->samplers = NULL;
    p->n_samplers = 0;
#endif
    p->ctx_other = NULL;
#endif
}

#if defined(__x86_64__)
/* System V returns a large struct through a hidden first pointer, which is also what the prober calls. */
API void *llama_model_default_params(void *out) { model_defaults(out); return out; }
API void *llama_context_default_params(void *out) { context_defaults(out); return out; }
#else
API struct model_params llama_model_default_params(void) { struct model_params p; model_defaults(&p); return p; }
API struct context_params llama_context_default_params(void) { struct context_params p; context_defaults(&p); return p; }
#endif

API struct batch llama_batch_get_one(int32_t *tokens, int32_t n_tokens) {
    struct batch batch = {.n_tokens = n_tokens, .token = tokens};
    return batch;
}

API const char *llama_version(void) { return "0.0." STUB_ID "-stub"; }
API const char *llama_print_system_info(void) { return "STUB : ID = " STUB_ID " | "; }
API void llama_backend_init(void) {
    stub_note("llama_backend_init");
    stub_say(LOG_INFO, "stub: backend init\n");
}
API void llama_backend_free(void) { stub_note("llama_backend_free"); }
API size_t llama_max_devices(void) { return MAX_DEVICES; }
API bool llama_supports_gpu_offload(void) { return true; }
API bool llama_supports_rpc(void) { return false; }

/* ---- devices: two with a budget, and the CPU ---- */

static struct device devices[] = {
    {"STUB0", "Stub device 0", 1, (int64_t) 1 << 30, 0},
    {"STUB1", "Stub device 1", 1, (int64_t) 1 << 30, 0},
    {"CPU", "Stub CPU", 0, (int64_t) 1 << 40, 0},
};
enum { N_DEVICES = sizeof devices / sizeof *devices };

struct device *stub_device(const char *name) {
    for (int i = 0; i < N_DEVICES; i++)
        if (!strcmp(devices[i].name, name)) return &devices[i];
    return NULL;
}

static int64_t budget(const struct device *device) { return stub_setting("budget", device->name, device->total); }

API size_t ggml_backend_dev_count(void) { return N_DEVICES; }
API void *ggml_backend_dev_get(size_t index) { return index < N_DEVICES ? &devices[index] : NULL; }
API void *ggml_backend_dev_by_name(const char *name) { return stub_device(name); }
API const char *ggml_backend_dev_name(struct device *device) { return device->name; }
API const char *ggml_backend_dev_description(struct device *device) { return device->description; }
API int ggml_backend_dev_type(struct device *device) { return device->type; }
API void ggml_backend_dev_memory(struct device *device, size_t *free, size_t *total) {
    stub_note("ggml_backend_dev_memory device=%s", device->name);
    stub_fault("dev_memory", MODE_ANY);
    *total = (size_t) budget(device);
    *free = (size_t) (budget(device) - device->used);
}

static char registry[] = "STUB";
API void *ggml_backend_dev_backend_reg(struct device *device) { (void) device; return registry; }
API const char *ggml_backend_reg_name(void *reg) { (void) reg; return registry; }
API size_t ggml_backend_reg_count(void) { return 1; }
API void *ggml_backend_reg_get(size_t index) { return index ? NULL : registry; }
API void *ggml_backend_reg_by_name(const char *name) { return strcmp(name, registry) ? NULL : registry; }
API void *ggml_backend_reg_get_proc_address(void *reg, const char *name) { (void) reg; (void) name; return NULL; }
API void ggml_backend_load_all_from_path(const char *path) { stub_note("ggml_backend_load_all_from_path path=%s", path); }

bool stub_place(struct device *const *where, int n, const int64_t *shares, int mode) {
    for (int i = 0; i < n; i++) {
        if (where[i]->used + shares[i] > budget(where[i])) {
            if (mode == MODE_TENSOR) { /* as the Meta buffer of 2026 does */
                fputs("/stub/ggml/src/ggml-backend-meta.cpp:1: GGML_ASSERT(meta_buf_ctx->bufs[i]) failed\n", stderr);
                abort();
            }
            stub_say(LOG_ERROR, "alloc_tensor_range: failed to allocate %s buffer of size %lld\n", where[i]->name,
                     (long long) shares[i]);
            stub_unplace(where, i, shares);
            return false;
        }
        where[i]->used += shares[i];
    }
    return true;
}

void stub_unplace(struct device *const *where, int n, const int64_t *shares) {
    for (int i = 0; i < n; i++) where[i]->used -= shares[i];
}

bool stub_share_weights(struct model *model, int mode, const float *tensor_split, int64_t *shares) {
    int n = model->n_devices;
    double sum = 0;
    for (int i = 0; i < n; i++) sum += tensor_split ? tensor_split[i] : 0;
    for (int i = 0; i < n; i++) {
        double part = mode == MODE_NONE ? i == model->main_gpu : sum > 0 ? tensor_split[i] / sum : 1.0 / n;
        shares[i] = (int64_t) ((double) model->n_bytes * part);
    }
    return n > 0;
}

void stub_set_mode(struct model *model, int mode, const int64_t *shares) {
    model->mode = mode;
    memcpy(model->weights, shares, sizeof *shares * (size_t) model->n_devices);
}

/* ---- a GGUF header, read with every count bounded ---- */

#ifndef STUB_FORK
struct reader { const uint8_t *at, *end; };

static bool take(struct reader *r, void *out, uint64_t n) {
    if ((uint64_t) (r->end - r->at) < n) return false;
    if (out) memcpy(out, r->at, n);
    r->at += n;
    return true;
}

static bool take_string(struct reader *r, char *out, size_t room) {
    uint64_t n;
    if (!take(r, &n, 8) || (uint64_t) (r->end - r->at) < n) return false;
    if (out) snprintf(out, room, "%.*s", (int) (n < room ? n : room - 1), (const char *) r->at);
    r->at += n;
    return true;
}

static bool take_value(struct reader *r, uint32_t type, double *number, char *text, size_t room, int depth) {
    static const uint8_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint8_t raw[8] = {0};
    if (type > 12 || depth > 2) return false;
    if (type == 8) return take_string(r, text, room);
    if (type == 9) {
        uint32_t of;
        uint64_t n;
        if (!take(r, &of, 4) || !take(r, &n, 8)) return false;
        for (uint64_t i = 0; i < n; i++)
            if (!take_value(r, of, i ? &(double){0} : number, NULL, 0, depth + 1)) return false;
        return true;
    }
    if (!take(r, raw, sizes[type])) return false;
    uint64_t integer = 0;
    float f32;
    memcpy(&integer, raw, 8);
    memcpy(&f32, raw, 4);
    if (type == 6) *number = f32;
    else if (type == 12) memcpy(number, raw, 8);
    else *number = (double) integer;
    return true;
}

static bool read_header(struct model *model, const uint8_t *bytes, size_t n) {
    struct reader r = {bytes, bytes + n};
    uint32_t version, type;
    uint64_t n_tensors, n_pairs;
    int32_t key_length = 0, value_length = 0;
    if (n < 4 || memcmp(bytes, "GGUF", 4)) return false;
    r.at += 4;
    strcpy(model->arch, "llama");
    model->n_layer = 2, model->n_embd = 64, model->n_head = 4, model->n_head_kv = 2, model->n_ctx_train = 2048;
    if (take(&r, &version, 4) && take(&r, &n_tensors, 8) && take(&r, &n_pairs, 8))
        for (uint64_t i = 0; i < n_pairs; i++) {
            char key[128] = "", text[4096] = "";
            double number = 0;
            if (!take_string(&r, key, sizeof key) || !take(&r, &type, 4)) break;
            if (!take_value(&r, type, &number, text, sizeof text, 0)) break;
            const char *dot = strchr(key, '.'), *name = dot ? dot + 1 : key;
            int32_t value = (int32_t) number;
            if (!strcmp(key, "general.architecture")) snprintf(model->arch, sizeof model->arch, "%.63s", text);
            else if (!strcmp(key, "tokenizer.chat_template")) snprintf(model->chat_template, 4096, "%s", text);
            else if (!strcmp(name, "block_count")) model->n_layer = value;
            else if (!strcmp(name, "embedding_length")) model->n_embd = value;
            else if (!strcmp(name, "context_length")) model->n_ctx_train = value;
            else if (!strcmp(name, "attention.head_count")) model->n_head = model->n_head_kv = value;
            else if (!strcmp(name, "attention.head_count_kv")) model->n_head_kv = value;
            else if (!strcmp(name, "attention.key_length")) key_length = value;
            else if (!strcmp(name, "attention.value_length")) value_length = value;
        }
    if (model->n_layer < 1 || model->n_layer > 512 || model->n_head < 1 || model->n_embd < 1) return false;
    int32_t head = model->n_embd / model->n_head;
    model->n_embd_k = (key_length ? key_length : head) * model->n_head_kv;
    model->n_embd_v = (value_length ? value_length : head) * model->n_head_kv;
    return model->n_embd_k >= 2 && model->n_embd_k < 1 << 20 && model->n_embd_v >= 1 && model->n_embd_v < 1 << 20;
}
#endif

uint8_t *stub_read_start(const char *path, size_t *n, int64_t *n_bytes) {
    enum { ROOM = 8 << 20 };
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    uint8_t *bytes = malloc(ROOM);
    *n = fread(bytes, 1, ROOM, file);
    fseek(file, 0, SEEK_END);
    *n_bytes = ftell(file);
    fclose(file);
    return bytes;
}

/* ---- models ---- */

#ifndef STUB_FORK
static void describe(const struct model_params *p, struct device *const *where, int n, char *out, size_t room) {
    char split[160] = "null", names[160] = "";
    for (int i = 0, at = 0; p->tensor_split && i < n; i++)
        at += snprintf(split + at, sizeof split - (size_t) at, "%s%g", i ? "," : "", (double) p->tensor_split[i]);
    for (int i = 0, at = 0; i < n; i++)
        at += snprintf(names + at, sizeof names - (size_t) at, "%s%s", i ? "," : "", where[i]->name);
    snprintf(out, room, "split_mode=%d main_gpu=%d n_gpu_layers=%d tensor_split=%s devices=%s%s", p->split_mode,
             p->main_gpu, p->n_gpu_layers, split, p->devices ? "" : "default:", names);
}

API struct model *llama_model_load_from_file(const char *path, struct model_params params) {
    struct model *model = calloc(1, sizeof *model);
    char text[640];
    for (; params.devices && params.devices[model->n_devices] && model->n_devices < MAX_DEVICES; model->n_devices++)
        model->devices[model->n_devices] = params.devices[model->n_devices];
    if (!params.devices)
        for (; model->n_devices < 2; model->n_devices++) model->devices[model->n_devices] = &devices[model->n_devices];
    model->main_gpu = params.main_gpu;
    describe(&params, model->devices, model->n_devices, text, sizeof text);
    stub_note("llama_model_load_from_file %s path=%s", text, path);
    const struct rule *fault = stub_fault("load", params.split_mode);
    if (stub_is(fault, "null")) {
        stub_say(LOG_ERROR, "llama_model_load: error loading model: unable to allocate STUB1 buffer\n");
        goto failed;
    }
    size_t n = 0;
    uint8_t *bytes = stub_read_start(path, &n, &model->n_bytes);
    if (!bytes) {
        stub_say(LOG_ERROR, "gguf_init_from_file: failed to open GGUF file '%s' (%s)\n", path, strerror(errno));
        goto failed;
    }
    bool good = read_header(model, bytes, n);
    free(bytes);
    if (!good) {
        stub_say(LOG_ERROR, "llama_model_load: error loading model: %s is not a model the stub can hold\n", path);
        goto failed;
    }
    if (params.split_mode == MODE_NONE && (params.main_gpu < 0 || params.main_gpu >= model->n_devices)) {
        stub_say(LOG_ERROR, "llama_model_load: invalid value for main_gpu: %d\n", params.main_gpu);
        goto failed;
    }
    for (int i = 0; i < 4; i++)
        if (params.progress_callback && !params.progress_callback(0.25f * (float) i, params.progress_callback_user_data)) {
            stub_say(LOG_INFO, "llama_model_load: load was cancelled\n");
            goto failed;
        }
    model->n_bytes = stub_setting("model", "weights", model->n_bytes);
    int64_t shares[MAX_DEVICES];
    stub_share_weights(model, params.split_mode, params.tensor_split, shares);
    if (!stub_place(model->devices, model->n_devices, shares, params.split_mode)) {
        stub_say(LOG_ERROR, "llama_model_load: error loading model: unable to allocate buffer\n");
        goto failed;
    }
    stub_set_mode(model, params.split_mode, shares);
    if (params.progress_callback) params.progress_callback(1.0f, params.progress_callback_user_data);
    snprintf(model->path, sizeof model->path, "%s", path);
    model->handle = (struct handle){stub_next_id("models"), true};
    stub_born("models");
    return model;
failed:
    free(model);
    return NULL;
}
#endif

bool stub_alive(const struct handle *handle, const char *function) {
    if (handle && handle->live) return true;
    stub_mistake("%s on a %s handle", function, handle ? "freed" : "null");
    return false;
}

#ifdef STUB_FORK
#define llama_model_free llama_free_model
#endif
API void llama_model_free(struct model *model) {
    stub_note("llama_model_free model=%d", model ? model->handle.id : 0);
    if (!model || !stub_alive(&model->handle, "llama_model_free")) return;
    if (model->n_contexts) stub_mistake("llama_model_free with %d contexts alive", model->n_contexts);
    stub_fault("free_model", model->mode);
    model->handle.live = false;
    for (struct adapter *adapter = model->adapters; adapter; adapter = adapter->next) /* they go with their model */
        if (adapter->handle.live) {
            adapter->handle.live = false;
            stub_died("adapters");
        }
    stub_unplace(model->devices, model->n_devices, model->weights);
    stub_died("models");
}

API const void *llama_model_get_vocab(const struct model *model) { return model; }
API int32_t llama_model_n_ctx_train(const struct model *model) { return model->n_ctx_train; }
API int32_t llama_model_n_embd(const struct model *model) { return model->n_embd; }
API int32_t llama_model_n_layer(const struct model *model) { return model->n_layer; }
API int32_t llama_model_n_head(const struct model *model) { return model->n_head; }
API int32_t llama_model_n_head_kv(const struct model *model) { return model->n_head_kv; }
API int32_t llama_model_n_swa(const struct model *model) { return model->n_swa; }
API int32_t llama_model_meta_val_str(const struct model *model, const char *key, char *out, size_t room) {
    if (strcmp(key, "general.architecture")) return -1;
    return snprintf(out, room, "%s", model->arch);
}
API int32_t llama_model_desc(const struct model *model, char *out, size_t room) {
    return snprintf(out, room, "%s stub", model->arch);
}
API uint64_t llama_model_size(const struct model *model) { return (uint64_t) model->n_bytes; }
API const char *llama_model_chat_template(const struct model *model, const char *name) {
    return !name && *model->chat_template ? model->chat_template : NULL;
}
API bool llama_model_has_encoder(const struct model *model) { (void) model; return stub_setting("model", "encoder", 0); }
API bool llama_model_has_decoder(const struct model *model) { (void) model; return !stub_setting("model", "encoder", 0); }
API int32_t llama_model_decoder_start_token(const struct model *model) { (void) model; return -1; }
API bool llama_model_is_recurrent(const struct model *model) { (void) model; return stub_setting("model", "recurrent", 0); }
API bool llama_model_is_hybrid(const struct model *model) { (void) model; return stub_setting("model", "hybrid", 0); }
API bool llama_model_is_diffusion(const struct model *model) { (void) model; return false; }
