// What llama-split.cpp wants to know from the rest of libllama, and does in it: see hooks.patch.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

struct ggml_tensor;
struct llama_context;
struct llama_context_params;
struct llama_model;
struct llama_model_params;

// Memory for an object: where one lies that is made again, or new memory.
void * llama_split_new(const llama_model *, size_t size);
void * llama_split_new(const llama_context *, size_t size);
void   llama_split_delete(const llama_model *, void * object);
void   llama_split_delete(const llama_context *, void * object);

// Notes how a model was loaded; gives the model.
llama_model * llama_split_loaded(
        llama_model * model, const std::string & path, const std::vector<std::string> & splits, const llama_model_params & params);
void llama_split_freed(const llama_model * model);

// Puts the vocabulary of a model that is made again back into it; false where it is to be read.
bool llama_split_vocab(llama_model & model);

// A model ends; what stays of it when it is made again is taken out. True: the buffers too, which `free_buffers` frees.
bool llama_split_ending(llama_model & model, void * buffers, void (*free_buffers)(void *));

// Notes how a context was made; gives the context.
llama_context * llama_split_made(llama_context * ctx, const llama_context_params & params);
void llama_split_freed(const llama_context * ctx);

// A call is inside a context as long as this lives.
struct llama_split_inside {
    explicit llama_split_inside(const llama_context * ctx);
    ~llama_split_inside();
    llama_split_inside(const llama_split_inside &) = delete;

    const llama_context * ctx;
};

// Copies bytes to devices with several threads, none of which outlives it: what is still to be copied when it ends is
// dropped.
struct llama_split_uploads {
    llama_split_uploads();
    ~llama_split_uploads();
    llama_split_uploads(const llama_split_uploads &) = delete;

    void put(ggml_tensor * tensor, const void * data, size_t size);

    // The same from a tensor of the same type and shape that is on devices.
    void put(ggml_tensor * tensor, const ggml_tensor * from);

    // Returns when all bytes are there; throws what went wrong on the way. It takes no more after this.
    void wait();

    struct impl;
    std::unique_ptr<impl> pimpl;
};

// Sees to a tensor's bytes where they are the caller's, or lie in the model that was there before; false where they are
// to be read from the file.
bool llama_split_given(ggml_tensor * tensor, llama_split_uploads & uploads);
