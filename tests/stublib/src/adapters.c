/* Adapters, which change the logits by a hash of their file, and the split-mode calls of builds that have them. */
#define _GNU_SOURCE
#include "stub.h"

#include <stdlib.h>
#include <string.h>

API struct adapter *llama_adapter_lora_init(struct model *model, const char *path) {
    size_t n = 0;
    int64_t n_bytes = 0;
    stub_note("llama_adapter_lora_init model=%d path=%s", model->handle.id, path);
    if (!stub_alive(&model->handle, "llama_adapter_lora_init")) return NULL;
    uint8_t *bytes = stub_is(stub_fault("adapter", model->mode), "null") ? NULL : stub_read_start(path, &n, &n_bytes);
    if (!bytes || n < 4 || memcmp(bytes, "GGUF", 4)) {
        stub_say(LOG_ERROR, "llama_adapter_lora_init: failed to apply lora adapter: %s\n", path);
        free(bytes);
        return NULL;
    }
    struct adapter *adapter = calloc(1, sizeof *adapter);
    adapter->handle = (struct handle){stub_next_id("adapters"), true};
    adapter->model = model;
    adapter->next = model->adapters;
    model->adapters = adapter;
    adapter->hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) adapter->hash = (adapter->hash ^ bytes[i]) * 0x100000001b3u;
    free(bytes);
    stub_born("adapters");
    return adapter;
}

API void llama_adapter_lora_free(struct adapter *adapter) {
    stub_note("llama_adapter_lora_free adapter=%d", adapter ? adapter->handle.id : 0);
    if (!adapter || !stub_alive(&adapter->handle, "llama_adapter_lora_free")) return;
    adapter->handle.live = false;
    stub_died("adapters");
}

API int32_t llama_set_adapters_lora(struct context *context, struct adapter **adapters, size_t n, float *scales) {
    stub_note("llama_set_adapters_lora context=%d n=%zu", context->handle.id, n);
    if (stub_is(stub_fault("set_adapters", context->model->mode), "fail")) return -1;
    context->adapters_hash = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        if (!stub_alive(&adapters[i]->handle, "llama_set_adapters_lora")) return -1;
        memcpy(&bits, &scales[i], 4);
        context->adapters_hash = (context->adapters_hash ^ adapters[i]->hash ^ bits) * 0x100000001b3u;
    }
    return 0;
}

#ifdef STUB_NATIVE_SPLIT
API int llama_model_get_split_mode(const struct model *model) { return model->mode; }

static bool refuse(const char *why) {
    stub_say(LOG_ERROR, "llama_context_set_split_mode: refused: %s\n", why);
    return false;
}

static bool move(struct model *model, int mode, const float *tensor_split, const struct rule *fault) {
    int64_t shares[MAX_DEVICES];
    stub_unplace(model->devices, model->n_devices, model->weights);
    if (stub_is(fault, "fail") || stub_is(fault, "spoil") ||
        (stub_share_weights(model, mode, tensor_split, shares),
         !stub_place(model->devices, model->n_devices, shares, MODE_LAYER))) {
        stub_say(LOG_ERROR, "llama_context_set_split_mode: %s does not fit, back in %s\n", stub_mode_name(mode),
                 stub_mode_name(model->mode));
        stub_place(model->devices, model->n_devices, model->weights, model->mode);
        return false;
    }
    stub_set_mode(model, mode, shares);
    return true;
}

/* spoil, state: a cell changes; rows: the carried logits do; onward: what is decoded later does. */
API bool llama_context_set_split_mode(struct context *context, int mode, const float *tensor_split) {
    stub_note("llama_context_set_split_mode context=%d mode=%d tensor_split=%s", context->handle.id, mode,
              tensor_split ? "given" : "null");
    if (!stub_alive(&context->handle, "llama_context_set_split_mode") || mode < 0 || mode >= N_MODES) return false;
    const struct rule *fault = stub_fault("native", mode);
    if (context->adapters_hash) return refuse("adapters are loaded for the model");
    if (context->model->n_contexts > 1 && !stub_is(fault, "shared")) return refuse("another context uses the model");
    /* success or not, the memory is made anew: a handle taken before is stale */
    context->memory->stale = true;
    context->memory = calloc(1, sizeof *context->memory);
    context->memory->context = context;
    if (stub_is(fault, "spoil") || stub_is(fault, "state")) context->cells[0].token ^= 1;
    if (stub_is(fault, "rows") && context->n_outputs) context->logits[0] += 1.0f;
    if (stub_is(fault, "onward")) context->adapters_hash = 1;
    return move(context->model, mode, tensor_split, fault);
}
#endif
