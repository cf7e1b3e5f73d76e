// Moves a model, and a context with all that its caller can see of it, to another split mode without a new handle.
//
// Part of libllama when it is built by `ci/builds --native`. The calls are C.

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Places the model of a context in another split mode. The context object, the memory of all its sequences, the logits,
// embeddings and output ids of the last decode, its threads, thread pools, callbacks and samplers stay; a handle of
// llama_get_memory that was taken before does not.
//
// tensor_split: llama_max_devices() shares, or NULL for none.
//
// The old placement is freed before the new one is made; where the devices have room for both, its weights are copied to
// the new one first. If that fails, for want of memory or anything else, the old one is made again (on the host, if the
// devices do not have its memory any more) and false is returned: the context works as before. False, and nothing is
// touched, where it is refused: a model that another context uses, that has adapters or that was not loaded from a path;
// control vectors; tensor mode where the architecture or the devices do not allow it; a call from a callback of this
// context, or of a switch.
//
// Thread: whoever decodes. No other call on the context or its model may run.
LLAMA_API bool llama_context_set_split_mode(
        struct llama_context * ctx, enum llama_split_mode mode, const float * tensor_split);

// The same for a model that no context uses.
LLAMA_API bool llama_model_set_split_mode(
        struct llama_model * model, enum llama_split_mode mode, const float * tensor_split);

LLAMA_API enum llama_split_mode llama_model_get_split_mode(const struct llama_model * model);

// "none", "layer", "row" or "tensor", which stays valid; NULL for no mode.
LLAMA_API const char * llama_split_mode_name(enum llama_split_mode mode);

// Loads a model whose tensors are those of the file, and asks the caller for their bytes: set_tensor_data is called once
// for each tensor, by the calling thread, when nothing can fail any more, and may return before the bytes are there;
// nobody reads them before the first decode. It is called again in each call that places the model anew, for what is there
// at its end: the new placement, or the old one made again. So it and its userdata stay valid as long as the model lives.
LLAMA_API struct llama_model * llama_model_load_from_file_with(
        const char * path_model,
        struct llama_model_params params,
        llama_model_set_tensor_data_t set_tensor_data,
        void * userdata);

#ifdef __cplusplus
}
#endif
