/* Samplers on the caller's candidate arrays: chain, greedy, dist, top-k, top-p, min-p, temperature, penalties. */
#define _GNU_SOURCE
#include "stub.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum kind { CHAIN, GREEDY, DIST, TOP_K, TOP_P, MIN_P, TEMP, PENALTIES };
enum { MAX_CHAIN = 16 };

struct candidate { int32_t id; float logit, p; };
struct candidates { struct candidate *data; size_t size; int64_t selected; bool sorted; };

struct sampler {
    struct handle handle;
    enum kind kind;
    struct sampler *parts[MAX_CHAIN];
    int n_parts;
    uint64_t seed, state;
    int32_t k, last_n, n_window;
    size_t min_keep;
    float p, repeat, frequency, presence;
    int32_t *window; /* the last n accepted tokens, oldest first */
};

static struct sampler *make(enum kind kind, const char *name) {
    struct sampler *s = calloc(1, sizeof *s);
    s->kind = kind;
    s->handle = (struct handle){stub_next_id("samplers"), true};
    stub_note("llama_sampler_init kind=%s sampler=%d", name, s->handle.id);
    stub_born("samplers");
    return s;
}

API struct sampler *llama_sampler_init_greedy(void) { return make(GREEDY, "greedy"); }

API struct sampler *llama_sampler_init_dist(uint32_t seed) {
    struct sampler *s = make(DIST, "dist");
    s->seed = s->state = seed;
    return s;
}

API struct sampler *llama_sampler_init_top_k(int32_t k) {
    struct sampler *s = make(TOP_K, "top_k");
    s->k = k;
    return s;
}

API struct sampler *llama_sampler_init_top_p(float p, size_t min_keep) {
    struct sampler *s = make(TOP_P, "top_p");
    s->p = p, s->min_keep = min_keep;
    return s;
}

API struct sampler *llama_sampler_init_min_p(float p, size_t min_keep) {
    struct sampler *s = make(MIN_P, "min_p");
    s->p = p, s->min_keep = min_keep;
    return s;
}

API struct sampler *llama_sampler_init_temp(float t) {
    struct sampler *s = make(TEMP, "temp");
    s->p = t;
    return s;
}

#if defined(STUB_OLD_PENALTIES) || STUB_EPOCH < 2608
API struct sampler *llama_sampler_init_penalties(int32_t last_n, float repeat, float frequency, float presence) {
#else
API struct sampler *llama_sampler_init_penalties(int32_t n_vocab, int32_t last_n, float repeat, float frequency, float presence) {
    stub_note("llama_sampler_init_penalties n_vocab=%d last_n=%d", n_vocab, last_n);
#endif
    struct sampler *s = make(PENALTIES, "penalties");
    s->last_n = last_n > 0 ? last_n : 0;
    s->repeat = repeat, s->frequency = frequency, s->presence = presence;
    s->window = calloc((size_t) s->last_n + 1, sizeof *s->window);
    return s;
}

struct chain_params { bool no_perf; };
API struct chain_params llama_sampler_chain_default_params(void) { return (struct chain_params){true}; }
API struct sampler *llama_sampler_chain_init(struct chain_params params) { (void) params; return make(CHAIN, "chain"); }
API void llama_sampler_chain_add(struct sampler *chain, struct sampler *part) {
    if (stub_alive(&chain->handle, "llama_sampler_chain_add") && chain->n_parts < MAX_CHAIN) chain->parts[chain->n_parts++] = part;
}
API struct sampler *llama_sampler_chain_get(struct sampler *chain, int32_t i) {
    return i >= 0 && i < chain->n_parts ? chain->parts[i] : NULL;
}
API int32_t llama_sampler_chain_n(const struct sampler *chain) { return chain->n_parts; }

API void llama_sampler_free(struct sampler *s) {
    stub_note("llama_sampler_free sampler=%d", s ? s->handle.id : 0);
    if (!s || !stub_alive(&s->handle, "llama_sampler_free")) return;
    for (int i = 0; i < s->n_parts; i++) llama_sampler_free(s->parts[i]);
    s->handle.live = false;
    free(s->window);
    s->window = NULL;
    stub_died("samplers");
}

API struct sampler *llama_sampler_clone(const struct sampler *s) {
    struct sampler *copy = make(s->kind, "clone");
    struct handle handle = copy->handle;
    *copy = *s;
    copy->handle = handle;
    for (int i = 0; i < s->n_parts; i++) copy->parts[i] = llama_sampler_clone(s->parts[i]);
    if (s->window) {
        copy->window = calloc((size_t) s->last_n + 1, sizeof *s->window);
        memcpy(copy->window, s->window, sizeof *s->window * (size_t) s->n_window);
    }
    return copy;
}

API void llama_sampler_reset(struct sampler *s) {
    stub_tally("llama_sampler_reset");
    for (int i = 0; i < s->n_parts; i++) llama_sampler_reset(s->parts[i]);
    s->state = s->seed;
    s->n_window = 0;
}

API void llama_sampler_accept(struct sampler *s, int32_t token) {
    stub_tally("llama_sampler_accept");
    if (!stub_alive(&s->handle, "llama_sampler_accept")) return;
    for (int i = 0; i < s->n_parts; i++) llama_sampler_accept(s->parts[i], token);
    if (s->kind != PENALTIES || !s->last_n) return;
    if (s->n_window == s->last_n) memmove(s->window, s->window + 1, sizeof *s->window * (size_t) --s->n_window);
    s->window[s->n_window++] = token;
}

static int by_logit(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id; /* ties in order of the token, so that runs repeat */
}

static void sort(struct candidates *c) {
    if (!c->sorted) qsort(c->data, c->size, sizeof *c->data, by_logit);
    c->sorted = true;
}

static void softmax(struct candidates *c) {
    float most = -INFINITY, sum = 0;
    for (size_t i = 0; i < c->size; i++) most = fmaxf(most, c->data[i].logit);
    for (size_t i = 0; i < c->size; i++) sum += c->data[i].p = expf(c->data[i].logit - most);
    for (size_t i = 0; i < c->size; i++) c->data[i].p /= sum;
}

static void apply_dist(struct sampler *s, struct candidates *c) {
    c->selected = 0;
    softmax(c);
    if (STUB_EPOCH < 2609 && c->size == 1) return; /* the older builds draw nothing for one candidate */
    stub_tally("draws");
    s->state = s->state * 6364136223846793005u + 1442695040888963407u;
    double draw = (double) (s->state >> 11) / (double) ((uint64_t) 1 << 53), sum = 0;
    for (size_t i = 0; i < c->size; i++) {
        sum += c->data[i].p;
        c->selected = (int64_t) i;
        if (sum > draw) break;
    }
}

static void apply_penalties(const struct sampler *s, struct candidates *c) {
    for (size_t i = 0; i < c->size; i++) {
        struct candidate *one = &c->data[i];
        int n = 0;
        for (int j = 0; j < s->n_window; j++) n += s->window[j] == one->id;
        if (!n) continue;
        one->logit = one->logit > 0 ? one->logit / s->repeat : one->logit * s->repeat;
        one->logit -= (float) n * s->frequency + s->presence;
    }
    c->sorted = false;
}

static void keep_most_likely(const struct sampler *s, struct candidates *c) {
    float sum = 0;
    size_t n = 0;
    sort(c);
    softmax(c);
    if (s->kind == TOP_P)
        while (n < c->size && (n < s->min_keep || sum < s->p)) sum += c->data[n++].p;
    else
        while (n < c->size && (n < s->min_keep || c->data[n].p >= s->p * c->data[0].p)) n++;
    c->size = n ? n : 1;
}

API void llama_sampler_apply(struct sampler *s, struct candidates *c) {
    stub_tally("llama_sampler_apply");
    if (!stub_alive(&s->handle, "llama_sampler_apply")) return;
    switch (s->kind) {
        case CHAIN:
            for (int i = 0; i < s->n_parts; i++) llama_sampler_apply(s->parts[i], c);
            break;
        case GREEDY:
            c->selected = 0;
            for (size_t i = 1; i < c->size; i++)
                if (c->data[i].logit > c->data[c->selected].logit) c->selected = (int64_t) i;
            break;
        case DIST: apply_dist(s, c); break;
        case TOP_K:
            sort(c);
            if (s->k > 0 && (size_t) s->k < c->size) c->size = (size_t) s->k;
            break;
        case TOP_P: case MIN_P: keep_most_likely(s, c); break;
        case TEMP:
            if (s->p > 0) {
                for (size_t i = 0; i < c->size; i++) c->data[i].logit /= s->p;
                break;
            }
            float most = -INFINITY;
            for (size_t i = 0; i < c->size; i++) most = fmaxf(most, c->data[i].logit);
            for (size_t i = 0; i < c->size; i++)
                if (c->data[i].logit < most) c->data[i].logit = -INFINITY;
            break;
        case PENALTIES: apply_penalties(s, c); break;
    }
}
