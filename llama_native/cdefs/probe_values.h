struct padded { uint64_t words[128]; };
struct padded llama_model_default_params(void);
struct padded llama_context_default_params(void);
struct padded llama_batch_get_one(int32_t *tokens, int32_t n_tokens);
