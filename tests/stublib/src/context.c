/* Contexts: the cells of every sequence, decode, logits, and the memory calls. */
#define _GNU_SOURCE
#include "stub.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef STUB_FORK
/* the names by which a fork is known, and nothing more: it must be refused before any of them is called */
API void *llama_new_context_with_model(void *model, struct context_params params) { (void) model; (void) params; return NULL; }
API void *llama_load_model_from_file(const char *path, struct model_params params) { (void) path; (void) params; return NULL; }
API void llama_set_offload_policy(void *context, int op, bool on) { (void) context; (void) op; (void) on; }
API void llama_free(void *context) { (void) context; }
API int32_t llama_decode(void *context, struct batch batch) { (void) context; (void) batch; return -1; }
#else

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int64_t kv_bytes(const struct context *c) {
    uint64_t row = stub_row_bytes(c->params.type_k, c->model->n_embd_k) + stub_row_bytes(c->params.type_v, c->model->n_embd_v);
    return (int64_t) (row * (uint64_t) c->model->n_layer * c->n_ctx);
}

API struct context *llama_init_from_model(struct model *model, struct context_params params) {
    stub_note("llama_init_from_model model=%d n_ctx=%u n_batch=%u n_ubatch=%u n_seq_max=%u type_k=%d type_v=%d flash_attn=%d "
              "offload_kqv=%d kv_unified=%d n_threads=%d", model->handle.id, params.n_ctx, params.n_batch, params.n_ubatch,
              params.n_seq_max, params.type_k, params.type_v, params.flash_attn_type, params.offload_kqv, params.kv_unified,
              params.n_threads);
    if (!stub_alive(&model->handle, "llama_init_from_model")) return NULL;
    const struct rule *fault = stub_fault("init", model->mode);
    if (stub_is(fault, "pipeline"))
        stub_say(LOG_WARN, "llama_context: compute buffer allocation failed, retrying without pipeline parallelism\n");
    struct context *c = calloc(1, sizeof *c);
    c->model = model;
    c->params = params;
    uint32_t n_ctx = params.n_ctx ? params.n_ctx : (uint32_t) model->n_ctx_train;
    n_ctx = (n_ctx + 255) / 256 * 256;
    c->n_stream = params.kv_unified ? 1 : params.n_seq_max;
    c->n_ctx_seq = params.kv_unified ? n_ctx : params.n_seq_max ? (n_ctx / params.n_seq_max + 255) / 256 * 256 : 0;
    c->n_ctx = c->n_ctx_seq * c->n_stream;
    c->flash_attn = params.flash_attn_type != 0;
    if (params.flash_attn_type < 0) stub_say(LOG_INFO, "llama_context: Flash Attention was auto, set to enabled\n");
    const char *why = NULL;
    if (stub_is(fault, "null")) why = "failed to allocate compute buffers";
    else if (params.n_seq_max < 1 || params.n_seq_max > MAX_SEQ || !c->n_ctx_seq) why = "n_seq_max or n_ctx out of range";
    else if (model->mode == MODE_TENSOR && !c->flash_attn) why = "SPLIT_MODE_TENSOR requires flash_attn to be enabled";
    else if (!stub_row_bytes(params.type_k, model->n_embd_k) || !stub_row_bytes(params.type_v, model->n_embd_v))
        why = "the stub has no such cache type";
    else if (!c->flash_attn && params.type_v == TYPE_Q8_0) why = "quantized V cache requires flash_attn";
    for (int i = 0; i < model->n_devices; i++) c->kv_bytes[i] = kv_bytes(c) / model->n_devices;
    if (!why && !stub_place(model->devices, model->n_devices, c->kv_bytes, MODE_LAYER)) why = "failed to allocate kv cache";
    if (why) {
        stub_say(LOG_ERROR, "llama_init_from_model: failed to initialize the context: %s\n", why);
        free(c);
        return NULL;
    }
    c->cells = calloc((size_t) c->n_ctx, sizeof *c->cells);
    c->memory = calloc(1, sizeof *c->memory);
    c->memory->context = c;
    c->abort_callback = params.abort_callback;
    c->abort_callback_data = params.abort_callback_data;
    c->handle = (struct handle){stub_next_id("contexts"), true};
    model->n_contexts++;
    stub_born("contexts");
    return c;
}

API void llama_free(struct context *c) {
    stub_note("llama_free context=%d", c ? c->handle.id : 0);
    if (!c || !stub_alive(&c->handle, "llama_free")) return;
    stub_alive(&c->model->handle, "llama_free of a context whose model is gone:");
    if (c->inside) stub_mistake("llama_free while %d calls are inside", c->inside);
    stub_fault("free", c->model->mode);
    c->handle.live = false;
    c->model->n_contexts--;
    stub_unplace(c->model->devices, c->model->n_devices, c->kv_bytes);
    free(c->cells), free(c->logits), free(c->embeddings), free(c->output_of);
    c->cells = NULL, c->logits = NULL, c->embeddings = NULL, c->output_of = NULL;
    c->memory->stale = true;
    stub_died("contexts");
}

API uint32_t llama_n_ctx(const struct context *c) { return c->n_ctx; }
API uint32_t llama_n_ctx_seq(const struct context *c) { return c->n_ctx_seq; }
API uint32_t llama_n_batch(const struct context *c) { return c->params.n_batch < c->n_ctx ? c->params.n_batch : c->n_ctx; }
API uint32_t llama_n_ubatch(const struct context *c) { return c->params.n_ubatch < llama_n_batch(c) ? c->params.n_ubatch : llama_n_batch(c); }
API uint32_t llama_n_seq_max(const struct context *c) { return c->params.n_seq_max; }
API const struct model *llama_get_model(const struct context *c) { return c->model; }
API int llama_pooling_type(const struct context *c) { (void) c; return 0; }

API void llama_set_n_threads(struct context *c, int32_t n, int32_t n_batch) {
    stub_note("llama_set_n_threads context=%d n=%d n_batch=%d", c->handle.id, n, n_batch);
}
API void llama_set_causal_attn(struct context *c, bool causal) {
    stub_note("llama_set_causal_attn context=%d causal=%d", c->handle.id, causal);
}
API void llama_set_embeddings(struct context *c, bool embeddings) { c->params.embeddings = embeddings; }
API void llama_set_abort_callback(struct context *c, abort_callback callback, void *data) {
    c->abort_callback = callback;
    c->abort_callback_data = data;
}

API void llama_synchronize(struct context *c) {
    stub_note("llama_synchronize context=%d", c->handle.id);
    if (!stub_alive(&c->handle, "llama_synchronize")) return;
    stub_fault("synchronize", c->model->mode);
    c->busy = false;
}

/* ---- cells ---- */

static struct cell *stream_of(struct context *c, int32_t seq) {
    return c->cells + (c->n_stream == 1 ? 0 : (uint32_t) seq % c->n_stream) * c->n_ctx_seq;
}

static int32_t pos_of(struct context *c, int32_t seq, bool largest) {
    struct cell *cells = stream_of(c, seq);
    int32_t found = -1;
    for (uint32_t i = 0; i < c->n_ctx_seq; i++)
        if (cells[i].seqs >> seq & 1 && (found < 0 || (largest ? cells[i].pos > found : cells[i].pos < found)))
            found = cells[i].pos;
    return found;
}

static struct cell *free_cell(struct context *c, int32_t seq) {
    struct cell *cells = stream_of(c, seq);
    for (uint32_t i = 0; i < c->n_ctx_seq; i++)
        if (!cells[i].seqs) return &cells[i];
    return NULL;
}

/* The hash of what a token at pos of a sequence can see. Order of cells in the cache does not matter. `mix`: it also sees
   what other sequences have in the same stream. */
static uint64_t history(struct context *c, int32_t seq, int32_t pos, bool mixes) {
    struct cell *cells = stream_of(c, seq);
    uint64_t sum = mix(c->adapters_hash);
    for (uint32_t i = 0; i < c->n_ctx_seq; i++)
        if ((mixes ? cells[i].seqs != 0 : cells[i].seqs >> seq & 1) && cells[i].pos <= pos)
            sum += mix((uint64_t) (uint32_t) cells[i].pos << 32 | (uint32_t) cells[i].token);
    return mix(sum);
}

static void write_logits(struct context *c, const struct rule *fault, int32_t seq, int32_t pos, float *out) {
    uint64_t seen = history(c, seq, pos, stub_is(fault, "mix"));
    for (int32_t v = 0; v < N_VOCAB; v++) {
        float noise = (float) (mix(seen ^ (uint64_t) v * 0x9e3779b1u) >> 40) / (float) (1 << 22); /* 0 .. 4 */
        out[v] = noise + (v >= 32 && v < 127 ? 4.0f : v < N_BYTES ? -4.0f : -8.0f);
        if (stub_is(fault, "nan")) out[v] = NAN;
        if (stub_is(fault, "const")) out[v] = 1.0f;
    }
    if (stub_is(fault, "eos")) out[TOKEN_EOS] = 100.0f;
}

static int32_t reject(const char *why) {
    stub_say(LOG_ERROR, "decode: failed to decode, ret = -1: %s\n", why);
    return -1;
}

static int32_t decode(struct context *c, struct batch batch, const struct rule *fault) {
    int32_t n = batch.n_tokens;
    if (n < 1 || !batch.token) return reject("n_tokens == 0");
    if ((uint32_t) n > llama_n_batch(c)) return reject("n_tokens > n_batch");
    if (c->abort_callback && c->abort_callback(c->abort_callback_data)) return 2;
    struct cell **made = calloc((size_t) n, sizeof *made);
    int32_t rc = 0, n_made = 0, one = 0, *seq_zero = &one;
    c->output_of = realloc(c->output_of, sizeof *c->output_of * (size_t) n);
    c->n_batch_last = n;
    c->n_outputs = 0;
    for (int32_t i = 0; i < n && !rc; i++) {
        int32_t n_seq = batch.n_seq_id ? batch.n_seq_id[i] : 1;
        int32_t *seqs = batch.seq_id && batch.n_seq_id ? batch.seq_id[i] : seq_zero;
        uint64_t mask = 0;
        if (batch.token[i] < 0 || batch.token[i] >= N_VOCAB) rc = reject("invalid token");
        for (int32_t s = 0; s < n_seq && !rc; s++) {
            if (seqs[s] < 0 || (uint32_t) seqs[s] >= c->params.n_seq_max) rc = reject("invalid seq_id");
            else mask |= (uint64_t) 1 << seqs[s];
        }
        if (rc || !mask) break;
        int32_t last = pos_of(c, seqs[0], true), pos = batch.pos ? batch.pos[i] : last + 1;
        for (int32_t s = 0; s < n_seq && !rc; s++)
            if ((last = pos_of(c, seqs[s], true)) >= 0 && pos != last + 1) {
                stub_say(LOG_ERROR, "init: the last position stored in the memory for sequence %d is X = %d, the batch has Y = %d; "
                         "it is required that Y = X + 1\n", seqs[s], last, pos);
                rc = -1;
            }
        struct cell *cell = rc ? NULL : free_cell(c, seqs[0]);
        if (!rc && !cell) rc = 1; /* no slot: the caller can make room and try again */
        if (rc) break;
        *cell = (struct cell){pos, batch.token[i], mask};
        made[n_made++] = cell;
        bool wanted = batch.logits ? batch.logits[i] : i == n - 1;
        c->output_of[i] = wanted ? c->n_outputs++ : -1;
    }
    if (stub_is(fault, "fail")) rc = fault->value ? (int32_t) fault->value : -3;
    if (rc) {
        for (int32_t i = 0; i < n_made; i++) *made[i] = (struct cell){0};
        c->n_outputs = 0;
        stub_say(LOG_ERROR, "llama_decode: failed to decode, ret = %d\n", rc);
    } else {
        c->logits = realloc(c->logits, sizeof(float) * N_VOCAB * (size_t) (c->n_outputs + 1));
        c->embeddings = realloc(c->embeddings, sizeof(float) * (size_t) c->model->n_embd * (size_t) (c->n_outputs + 1));
        for (int32_t i = 0; i < n; i++) {
            if (c->output_of[i] < 0) continue;
            int32_t seq = __builtin_ctzll(made[i]->seqs);
            write_logits(c, fault, seq, made[i]->pos, c->logits + (size_t) c->output_of[i] * N_VOCAB);
            uint64_t seen = history(c, seq, made[i]->pos, false);
            for (int32_t j = 0; j < c->model->n_embd; j++)
                c->embeddings[(size_t) c->output_of[i] * (size_t) c->model->n_embd + (size_t) j] =
                    (float) (mix(seen + (uint64_t) j) >> 40) / (float) (1 << 24);
        }
        c->busy = true;
    }
    free(made);
    return rc;
}

static int32_t compute(struct context *c, struct batch batch, const char *name, const char *call) {
    int32_t seq = batch.seq_id && batch.n_seq_id && batch.n_tokens > 0 ? batch.seq_id[0][0] : 0;
    stub_note("%s context=%d mode=%d n_tokens=%d pos=%d seq=%d", name, c->handle.id, c->model->mode, batch.n_tokens,
              batch.pos && batch.n_tokens > 0 ? batch.pos[0] : -1, seq);
    if (!stub_alive(&c->handle, name)) return -1;
    stub_enter(c);
    /* `pace:decode=N`: a device that takes N microseconds for a batch, so that streams last */
    usleep((useconds_t) stub_setting("pace", call, 0));
    int32_t rc = decode(c, batch, stub_fault(call, c->model->mode));
    stub_leave(c);
    return rc;
}

API int32_t llama_decode(struct context *c, struct batch batch) { return compute(c, batch, "llama_decode", "decode"); }
API int32_t llama_encode(struct context *c, struct batch batch) { return compute(c, batch, "llama_encode", "encode"); }

static int32_t output_row(struct context *c, int32_t i, const char *name) {
    int32_t row = i < 0 ? c->n_outputs + i : i < c->n_batch_last ? c->output_of[i] : -1;
    stub_tally(name);
    if (!stub_alive(&c->handle, name)) return -1;
    c->busy = false; /* reading an output waits for it, as the library does */
    if (row < 0 || row >= c->n_outputs) {
        stub_say(LOG_ERROR, "%s: invalid logits id %d, no such output\n", name, i);
        return -1;
    }
    return row;
}

API float *llama_get_logits_ith(struct context *c, int32_t i) {
    int32_t row = output_row(c, i, "llama_get_logits_ith");
    return row < 0 ? NULL : c->logits + (size_t) row * N_VOCAB;
}

API float *llama_get_embeddings_ith(struct context *c, int32_t i) {
    int32_t row = output_row(c, i, "llama_get_embeddings_ith");
    return row < 0 || !c->params.embeddings ? NULL : c->embeddings + (size_t) row * (size_t) c->model->n_embd;
}

API float *llama_get_embeddings_seq(struct context *c, int32_t seq) { (void) c; (void) seq; return NULL; }

/* ---- memory operations, under the new names or the old ---- */

static bool seq_rm(struct context *c, int32_t seq, int32_t p0, int32_t p1) {
    stub_note("seq_rm context=%d seq=%d p0=%d p1=%d", c->handle.id, seq, p0, p1);
    bool whole = p0 <= 0 && p1 < 0;
    if (stub_is(stub_fault("seq_rm", c->model->mode), "false") && !whole) return false;
    if (!whole && (stub_setting("model", "recurrent", 0) || stub_setting("model", "hybrid", 0))) return false;
    for (uint32_t i = 0; i < c->n_ctx; i++) {
        struct cell *cell = &c->cells[i];
        uint64_t mask = seq < 0 ? ~(uint64_t) 0 : (uint64_t) 1 << seq;
        if (cell->seqs & mask && cell->pos >= p0 && (p1 < 0 || cell->pos < p1)) cell->seqs &= ~mask;
    }
    return true;
}

static void seq_cp(struct context *c, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    stub_note("seq_cp context=%d from=%d to=%d p0=%d p1=%d", c->handle.id, from, to, p0, p1);
    if (from == to) return;
    struct cell *cells = stream_of(c, from), *free;
    bool same = cells == stream_of(c, to);
    if (!same) seq_rm(c, to, -1, -1);
    for (uint32_t i = 0; i < c->n_ctx_seq; i++) {
        if (!(cells[i].seqs >> from & 1) || cells[i].pos < p0 || (p1 >= 0 && cells[i].pos >= p1)) continue;
        if (same) cells[i].seqs |= (uint64_t) 1 << to;
        else if ((free = free_cell(c, to))) *free = (struct cell){cells[i].pos, cells[i].token, (uint64_t) 1 << to};
    }
}

static void seq_keep(struct context *c, int32_t seq) {
    stub_note("seq_keep context=%d seq=%d", c->handle.id, seq);
    for (uint32_t i = 0; i < c->n_ctx; i++) c->cells[i].seqs &= (uint64_t) 1 << seq;
}

static void seq_add(struct context *c, int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
    stub_note("seq_add context=%d seq=%d p0=%d p1=%d delta=%d", c->handle.id, seq, p0, p1, delta);
    struct cell *cells = stream_of(c, seq);
    for (uint32_t i = 0; i < c->n_ctx_seq; i++)
        if (cells[i].seqs >> seq & 1 && cells[i].pos >= p0 && (p1 < 0 || cells[i].pos < p1)) cells[i].pos += delta;
}

static void clear(struct context *c) {
    stub_note("clear context=%d", c->handle.id);
    memset(c->cells, 0, sizeof *c->cells * c->n_ctx);
}

static bool can_shift(struct context *c) { return !stub_setting("model", "no_shift", 0) && c->model->mode != MODE_TENSOR; }

#if defined(STUB_OLD_MEMORY)
API struct memory *llama_get_kv_self(struct context *c) { return c->memory; }
API void llama_kv_self_clear(struct context *c) { clear(c); }
API bool llama_kv_self_seq_rm(struct context *c, int32_t seq, int32_t p0, int32_t p1) { return seq_rm(c, seq, p0, p1); }
API void llama_kv_self_seq_cp(struct context *c, int32_t from, int32_t to, int32_t p0, int32_t p1) { seq_cp(c, from, to, p0, p1); }
API void llama_kv_self_seq_keep(struct context *c, int32_t seq) { seq_keep(c, seq); }
API void llama_kv_self_seq_add(struct context *c, int32_t seq, int32_t p0, int32_t p1, int32_t delta) { seq_add(c, seq, p0, p1, delta); }
API int32_t llama_kv_self_seq_pos_min(struct context *c, int32_t seq) { return pos_of(c, seq, false); }
API int32_t llama_kv_self_seq_pos_max(struct context *c, int32_t seq) { return pos_of(c, seq, true); }
API bool llama_kv_self_can_shift(struct context *c) { return can_shift(c); }
#else
API struct memory *llama_get_memory(const struct context *c) {
    return stub_setting("model", "no_memory", 0) ? NULL : c->memory;
}

static struct context *behind(struct memory *memory, const char *name) {
    if (memory->stale) stub_mistake("%s on a stale memory handle", name);
    return memory->context;
}

API void llama_memory_clear(struct memory *m, bool data) { (void) data; clear(behind(m, "clear")); }
#ifndef STUB_NO_SEQ_RM
API bool llama_memory_seq_rm(struct memory *m, int32_t seq, int32_t p0, int32_t p1) { return seq_rm(behind(m, "seq_rm"), seq, p0, p1); }
#else
void stub_unused_seq_rm(struct memory *m);
void stub_unused_seq_rm(struct memory *m) { seq_rm(behind(m, "seq_rm"), 0, 0, 0); }
#endif
API void llama_memory_seq_cp(struct memory *m, int32_t from, int32_t to, int32_t p0, int32_t p1) { seq_cp(behind(m, "seq_cp"), from, to, p0, p1); }
API void llama_memory_seq_keep(struct memory *m, int32_t seq) { seq_keep(behind(m, "seq_keep"), seq); }
API void llama_memory_seq_add(struct memory *m, int32_t seq, int32_t p0, int32_t p1, int32_t delta) { seq_add(behind(m, "seq_add"), seq, p0, p1, delta); }
API int32_t llama_memory_seq_pos_min(struct memory *m, int32_t seq) { return pos_of(behind(m, "pos_min"), seq, false); }
API int32_t llama_memory_seq_pos_max(struct memory *m, int32_t seq) { return pos_of(behind(m, "pos_max"), seq, true); }
API bool llama_memory_can_shift(struct memory *m) { return can_shift(behind(m, "can_shift")); }
#endif
#endif
