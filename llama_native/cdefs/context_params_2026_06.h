struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    int32_t ctx_type; /* enum llama_context_type */
    int32_t rope_scaling_type; /* enum llama_rope_scaling_type */
    int32_t pooling_type; /* enum llama_pooling_type */
    int32_t attention_type; /* enum llama_attention_type */
    int32_t flash_attn_type; /* enum llama_flash_attn_type */
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval; /* ggml_backend_sched_eval_callback */
    void *cb_eval_user_data;
    int32_t type_k; /* enum ggml_type */
    int32_t type_v; /* enum ggml_type */
    ggml_abort_callback abort_callback;
    void *abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void *samplers; /* struct llama_sampler_seq_config * */
    size_t n_samplers;
    void *ctx_other; /* struct llama_context * */
};
