/* State out and in: context blobs of version 11 and sequence blobs of version 4, checked as the library checks them. */
#define _GNU_SOURCE
#include "stub.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows: small whole numbers made from (token, layer, column), so that a token can be read back from its K row ---- */

static uint16_t to_half(float value) {
    uint32_t bits, sign, rounded;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    int32_t exponent = (int32_t) (bits >> 23 & 0xff) - 112;
    if (exponent <= 0) return (uint16_t) sign; /* too small to matter here */
    rounded = ((uint32_t) exponent << 10 | (bits >> 13 & 0x3ff));
    rounded += (bits >> 12 & 1) & ((bits & 0xfff) != 0 || (rounded & 1));
    return (uint16_t) (sign | rounded);
}

static float from_half(uint16_t half) {
    int exponent = half >> 10 & 31;
    float value = exponent ? ldexpf(1024.0f + (float) (half & 0x3ff), exponent - 25) : ldexpf((float) (half & 0x3ff), -24);
    return half & 0x8000 ? -value : value;
}

static float number(int32_t token, int32_t layer, int32_t j, bool value) {
    if (!value && j == 0) return (float) (token & 15);
    if (!value && j == 1) return (float) (token >> 4);
    return (float) ((token * 7 + layer * 3 + j * 5 + (value ? 8 : 0)) % 17);
}

uint32_t stub_element_bytes(int32_t type) { return type == TYPE_F32 ? 4 : 2; }

uint64_t stub_row_bytes(int32_t type, int32_t n) {
    switch (type) {
        case TYPE_F32: return 4 * (uint64_t) n;
        case TYPE_F16: case TYPE_BF16: return 2 * (uint64_t) n;
        case TYPE_Q8_0: return n % 32 ? 0 : 34 * (uint64_t) n / 32;
        default: return 0;
    }
}

static void put(uint8_t *out, int32_t type, float value) {
    uint32_t bits;
    uint16_t half = to_half(value);
    memcpy(&bits, &value, 4);
    if (type == TYPE_BF16) half = (uint16_t) (bits >> 16);
    memcpy(out, type == TYPE_F32 ? (void *) &bits : &half, stub_element_bytes(type));
}

void stub_element(uint8_t *out, int32_t type, int32_t token, int32_t layer, int32_t j) {
    put(out, type, number(token, layer, j, true));
}

void stub_row(uint8_t *out, int32_t type, int32_t n, int32_t token, int32_t layer, bool value) {
    if (type != TYPE_Q8_0) {
        for (int32_t j = 0; j < n; j++) put(out + (uint32_t) j * stub_element_bytes(type), type, number(token, layer, j, value));
        return;
    }
    for (int32_t block = 0; block < n / 32; block++, out += 34) {
        float most = 0;
        for (int32_t j = 0; j < 32; j++) most = fmaxf(most, number(token, layer, block * 32 + j, value));
        float scale = most / 127.0f;
        uint16_t half = to_half(scale);
        memcpy(out, &half, 2);
        for (int32_t j = 0; j < 32; j++)
            out[2 + j] = (uint8_t) (int8_t) (scale ? roundf(number(token, layer, block * 32 + j, value) / scale) : 0);
    }
}

int32_t stub_row_token(const uint8_t *row, int32_t type) {
    float pair[2];
    for (int j = 0; j < 2; j++) {
        uint32_t bits = 0;
        uint16_t half;
        if (type == TYPE_Q8_0) {
            memcpy(&half, row, 2);
            pair[j] = from_half(half) * (float) (int8_t) row[2 + j];
            continue;
        }
        memcpy(&half, row + 2 * j, 2);
        if (type == TYPE_F32) memcpy(&bits, row + 4 * j, 4);
        else bits = (uint32_t) half << 16;
        memcpy(&pair[j], &bits, 4);
        if (type == TYPE_F16) pair[j] = from_half(half);
    }
    int32_t token = (int32_t) lroundf(pair[0]) + 16 * (int32_t) lroundf(pair[1]);
    return token >= 0 && token < N_VOCAB ? token : 0;
}

#ifndef STUB_FORK

enum { SEQUENCE_MAGIC = (int) 0xaf143cd8 };

struct writer { uint8_t *at; uint64_t n, room; bool full; };

static void write_bytes(struct writer *w, const void *bytes, uint64_t n) {
    if (w->at) {
        if (w->n + n > w->room) { w->full = true; return; }
        memcpy(w->at + w->n, bytes, n);
    }
    w->n += n;
}

static void write_u32(struct writer *w, uint32_t value) { write_bytes(w, &value, 4); }
static void write_u64(struct writer *w, uint64_t value) { write_bytes(w, &value, 8); }

static bool has_memory(void) { return !stub_setting("model", "no_memory", 0); }

static bool picked(const struct cell *cell, int32_t seq) { return seq < 0 ? cell->seqs != 0 : cell->seqs >> seq & 1; }

static void write_rows(struct writer *w, struct context *c, const struct cell *cells, int32_t seq, int32_t layer, bool value) {
    int32_t n = value ? c->model->n_embd_v : c->model->n_embd_k, type = value ? c->params.type_v : c->params.type_k;
    uint64_t n_bytes = stub_row_bytes(type, n);
    uint8_t *row = malloc(n_bytes);
    write_u32(w, (uint32_t) type);
    if (value && !c->flash_attn) { /* V transposed: one row a column of the cache */
        write_u32(w, stub_element_bytes(type));
        write_u32(w, (uint32_t) n);
        for (int32_t j = 0; j < n; j++)
            for (uint32_t i = 0; i < c->n_ctx_seq; i++)
                if (picked(&cells[i], seq)) {
                    stub_element(row, type, cells[i].token, layer, j);
                    write_bytes(w, row, stub_element_bytes(type));
                }
    } else {
        write_u64(w, n_bytes);
        for (uint32_t i = 0; i < c->n_ctx_seq; i++)
            if (picked(&cells[i], seq)) {
                stub_row(row, type, n, cells[i].token, layer, value);
                write_bytes(w, row, n_bytes);
            }
    }
    free(row);
}

/* `model:lost_layers=N`: the last layers are left out, and nothing else shows it. */
static int32_t layers_of(struct context *c) { return c->model->n_layer - (int32_t) stub_setting("model", "lost_layers", 0); }

static void write_memory(struct writer *w, struct context *c, int32_t seq) {
    int32_t n_layer = layers_of(c);
    write_u32(w, c->n_stream);
    for (uint32_t s = 0; s < c->n_stream; s++) {
        const struct cell *cells = c->cells + s * c->n_ctx_seq;
        uint32_t n = 0;
        for (uint32_t i = 0; i < c->n_ctx_seq; i++) n += picked(&cells[i], seq);
        write_u32(w, n);
        if (!n) continue;
        for (uint32_t i = 0; i < c->n_ctx_seq; i++) {
            if (!picked(&cells[i], seq)) continue;
            write_u32(w, (uint32_t) cells[i].pos);
            write_u32(w, seq < 0 ? (uint32_t) __builtin_popcountll(cells[i].seqs) : 1);
            for (int32_t id = 0; id < MAX_SEQ; id++)
                if (cells[i].seqs >> id & 1 && (seq < 0 || seq == id)) write_u32(w, (uint32_t) id);
        }
        write_u32(w, !c->flash_attn);
        write_u32(w, (uint32_t) n_layer);
#if STUB_EPOCH >= 2610
        write_u32(w, 0); /* rows are stored unrotated */
        write_u32(w, 0);
#endif
        for (int32_t layer = 0; layer < n_layer; layer++) write_rows(w, c, cells, seq, layer, false);
        for (int32_t layer = 0; layer < n_layer; layer++) write_rows(w, c, cells, seq, layer, true);
    }
}

static void write_context(struct writer *w, struct context *c) {
    write_u32(w, (uint32_t) strlen(c->model->arch));
    write_bytes(w, c->model->arch, strlen(c->model->arch));
    if (has_memory()) write_memory(w, c, -1);
}

/* ---- in ---- */

struct input { const uint8_t *at, *end; const char *bad; };

static bool read_bytes(struct input *in, void *out, uint64_t n) {
    if (in->bad) return false;
    if ((uint64_t) (in->end - in->at) < n) { in->bad = "unexpectedly reached end of buffer"; return false; }
    if (out) memcpy(out, in->at, n);
    in->at += n;
    return true;
}

static uint32_t read_u32(struct input *in) { uint32_t value = 0; read_bytes(in, &value, 4); return value; }
static uint64_t read_u64(struct input *in) { uint64_t value = 0; read_bytes(in, &value, 8); return value; }

static void expect(struct input *in, uint64_t found, uint64_t wanted, const char *bad) {
    if (!in->bad && found != wanted) in->bad = bad;
}

static void read_rows(struct input *in, struct context *c, struct cell *cells, const uint32_t *where, uint32_t n_cells,
                      bool value, bool first) {
    int32_t n = value ? c->model->n_embd_v : c->model->n_embd_k, type = value ? c->params.type_v : c->params.type_k;
    uint64_t n_bytes = stub_row_bytes(type, n);
    expect(in, read_u32(in), (uint32_t) type, value ? "mismatched value type" : "mismatched key type");
    if (value && !c->flash_attn) {
        expect(in, read_u32(in), stub_element_bytes(type), "mismatched value element size");
        expect(in, read_u32(in), (uint32_t) n, "mismatched GQA embedding size");
        read_bytes(in, NULL, (uint64_t) n * n_cells * stub_element_bytes(type));
        return;
    }
    expect(in, read_u64(in), n_bytes, value ? "mismatched value row size" : "mismatched key row size");
    for (uint32_t i = 0; i < n_cells && !in->bad; i++) {
        const uint8_t *row = in->at;
        if (read_bytes(in, NULL, n_bytes) && first) cells[where[i]].token = stub_row_token(row, type);
    }
}

static void read_stream(struct input *in, struct context *c, struct cell *cells, uint32_t n_cells, int32_t seq) {
    uint32_t *where = calloc(c->n_ctx_seq, sizeof *where), next = 0;
    if (n_cells > c->n_ctx_seq) in->bad = "not enough cells in kv cache";
    for (uint32_t i = 0; i < n_cells && !in->bad; i++) {
        uint64_t seqs = 0;
        int32_t pos = (int32_t) read_u32(in);
        uint32_t n_seq = read_u32(in);
        if (seq >= 0) expect(in, n_seq, 1, "invalid seq_id-agnostic kv cell");
        for (uint32_t j = 0; j < n_seq && !in->bad; j++) {
            int32_t id = (int32_t) read_u32(in);
            if (seq >= 0) id = seq;
            if (id < 0 || (uint32_t) id >= c->params.n_seq_max) in->bad = "invalid seq_id, out of range";
            else seqs |= (uint64_t) 1 << id;
        }
        while (next < c->n_ctx_seq && cells[next].seqs) next++;
        if (next == c->n_ctx_seq) in->bad = "failed to find available cells in kv cache";
        if (in->bad) break;
        cells[next] = (struct cell){pos, 0, seqs};
        where[i] = next++;
    }
    expect(in, read_u32(in), !c->flash_attn, "incompatible V transposition");
    expect(in, read_u32(in), (uint32_t) c->model->n_layer, "mismatched layer count");
#if STUB_EPOCH >= 2610
    expect(in, read_u32(in), 0, "mismatched rotation of K");
    expect(in, read_u32(in), 0, "mismatched rotation of V");
#endif
    for (int32_t layer = 0; layer < c->model->n_layer && !in->bad; layer++) read_rows(in, c, cells, where, n_cells, false, !layer);
    for (int32_t layer = 0; layer < c->model->n_layer && !in->bad; layer++) read_rows(in, c, cells, where, n_cells, true, false);
    free(where);
}

static void read_memory(struct input *in, struct context *c, int32_t seq) {
    expect(in, read_u32(in), c->n_stream, "n_stream mismatch");
    if (in->bad) return;
    if (seq < 0) memset(c->cells, 0, sizeof *c->cells * c->n_ctx);
    for (uint32_t i = 0; seq >= 0 && i < c->n_ctx; i++) c->cells[i].seqs &= ~((uint64_t) 1 << seq);
    for (uint32_t s = 0; s < c->n_stream && !in->bad; s++) {
        uint32_t n = read_u32(in);
        if (n && !in->bad)
            read_stream(in, c, c->cells + (seq < 0 || c->n_stream == 1 ? s : (uint32_t) seq) * c->n_ctx_seq, n, seq);
    }
}

/* ---- exported ---- */

/* `lie`: every position is one too far; `flip`: the token of the last cell is another. Neither is said. */
static void spoil(struct context *c, const struct rule *fault) {
    struct cell *last = NULL;
    for (uint32_t i = 0; i < c->n_ctx; i++) {
        if (!c->cells[i].seqs) continue;
        last = &c->cells[i];
        if (stub_is(fault, "lie")) last->pos++;
    }
    if (last && stub_is(fault, "flip")) last->token ^= 1;
}

/* `damage[=offset]` breaks the structure (the first cell count by default), `flip` the last payload byte. */
static void damage(struct context *c, const struct rule *fault, uint8_t *bytes, uint64_t n, uint64_t count_at) {
    (void) c;
    if (stub_is(fault, "damage") && n) {
        uint64_t at = fault->value ? (uint64_t) fault->value : count_at;
        bytes[at < n ? at : n - 1] ^= 0xff;
    }
    if (stub_is(fault, "flip") && n) bytes[n - 1] ^= 0xff;
}

static size_t write_state(struct context *c, uint8_t *out, size_t room, int32_t seq, const char *call, const char *name) {
    struct writer w = {.at = out, .room = room};
    if (out) {
        stub_note("%s context=%d mode=%d size=%zu", name, c->handle.id, c->model->mode, room);
        if (c->busy) stub_mistake("%s before llama_synchronize", name);
        if (c->inside) stub_mistake("%s while %d calls are inside", name, c->inside);
    } else stub_note("%s context=%d mode=%d", name, c->handle.id, c->model->mode);
    if (!stub_alive(&c->handle, name)) return 0;
    stub_enter(c);
    if (seq < 0) write_context(&w, c);
    else {
        write_u32(&w, (uint32_t) SEQUENCE_MAGIC);
        write_u32(&w, (uint32_t) seq);
        if (has_memory()) write_memory(&w, c, seq);
    }
    /* only now: who dies here has overwritten what the buffer held before */
    const struct rule *fault = stub_fault(call, c->model->mode);
    stub_leave(c);
    if (w.full || stub_is(fault, "zero")) {
        stub_say(LOG_ERROR, "%s: error saving state: unexpectedly reached end of buffer\n", name);
        return 0;
    }
    if (out) damage(c, fault, out, w.n, seq < 0 ? 8 + strlen(c->model->arch) : 12);
    if (stub_is(fault, "short")) w.n -= fault->value ? (uint64_t) fault->value : 1;
    if (stub_is(fault, "huge")) w.n += (uint64_t) fault->value;
    return w.n;
}

static size_t read_state(struct context *c, const uint8_t *bytes, size_t n, int32_t seq, const char *call, const char *name) {
    struct input in = {bytes, bytes + n, NULL};
    stub_note("%s context=%d mode=%d size=%zu", name, c->handle.id, c->model->mode, n);
    if (!stub_alive(&c->handle, name)) return 0;
    stub_enter(c);
    const struct rule *fault = stub_fault(call, c->model->mode);
    if (seq < 0) {
        char arch[64] = "";
        uint32_t length = read_u32(&in);
        if (!in.bad && length >= sizeof arch) in.bad = "wrong model arch";
        if (read_bytes(&in, arch, length)) expect(&in, (uint64_t) !strcmp(arch, c->model->arch), 1, "wrong model arch");
    } else {
        expect(&in, read_u32(&in), (uint32_t) SEQUENCE_MAGIC, "wrong sequence state magic");
        read_u32(&in);
        if ((uint32_t) seq >= c->params.n_seq_max) in.bad = "invalid seq_id";
    }
    if (!in.bad && has_memory()) read_memory(&in, c, seq);
    if (stub_is(fault, "zero")) in.bad = "stub was asked to refuse";
    if (!in.bad) spoil(c, fault);
    stub_leave(c);
    if (in.bad) {
        stub_say(LOG_ERROR, "%s: error loading state: %s\n", name, in.bad);
        return 0;
    }
    size_t done = (size_t) (in.at - bytes);
    return stub_is(fault, "short") ? done - (fault->value ? (size_t) fault->value : 1) : done;
}

API size_t llama_state_get_size(struct context *c) { return write_state(c, NULL, 0, -1, "get_size", "llama_state_get_size"); }
API size_t llama_state_get_data(struct context *c, uint8_t *out, size_t room) {
    return write_state(c, out, room, -1, "get_data", "llama_state_get_data");
}
API size_t llama_state_set_data(struct context *c, const uint8_t *bytes, size_t n) {
    return read_state(c, bytes, n, -1, "set_data", "llama_state_set_data");
}
API size_t llama_state_seq_get_size(struct context *c, int32_t seq) {
    return write_state(c, NULL, 0, seq, "seq_get_size", "llama_state_seq_get_size");
}
API size_t llama_state_seq_get_data(struct context *c, uint8_t *out, size_t room, int32_t seq) {
    return write_state(c, out, room, seq, "seq_get_data", "llama_state_seq_get_data");
}
API size_t llama_state_seq_set_data(struct context *c, const uint8_t *bytes, size_t n, int32_t seq) {
    return read_state(c, bytes, n, seq, "seq_set_data", "llama_state_seq_set_data");
}
#endif
