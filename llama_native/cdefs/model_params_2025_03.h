struct llama_model_params {
    ggml_backend_dev_t *devices;
    int32_t n_gpu_layers;
    int32_t split_mode; /* enum llama_split_mode */
    int32_t main_gpu;
    const float *tensor_split;
    llama_progress_callback progress_callback;
    void *progress_callback_user_data;
    void *kv_overrides; /* const struct llama_model_kv_override * */
    bool vocab_only;
    bool use_mmap;
    bool use_mlock;
    bool check_tensors;
};
