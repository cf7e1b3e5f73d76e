struct llama_model_params {
    ggml_backend_dev_t *devices;
    void *tensor_buft_overrides; /* const struct llama_model_tensor_buft_override * */
    int32_t n_gpu_layers;
    int32_t split_mode; /* enum llama_split_mode */
    int32_t load_mode; /* enum llama_load_mode */
    int32_t main_gpu;
    const float *tensor_split;
    llama_progress_callback progress_callback;
    void *progress_callback_user_data;
    void *kv_overrides; /* const struct llama_model_kv_override * */
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};
