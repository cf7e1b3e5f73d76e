void *llama_model_default_params(void *out);
void *llama_context_default_params(void *out);
void *llama_batch_get_one(void *out, int32_t *tokens, int32_t n_tokens);
