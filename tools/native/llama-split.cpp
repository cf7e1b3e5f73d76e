// Moves a model, and a context with all that its caller can see of it, to another split mode without a new handle.
//
// A model and its context are made again in the memory where they lie: `llama_split_new` gives it to the one object of
// the class that is made next. So every pointer that a caller has stays right, and the library's own code places the
// weights, makes the cache and reserves the buffers.
//
// Laws:
//   1. What is refused is refused before anything is touched.
//   2. Everything that a caller can see is taken out before the old placement is freed, and put into whichever context
//      is made after it: the new one, or the old one again.
//   3. What the library aborts for on the way is an exception here: a switch that fails returns false.

#include "llama-split-hooks.h"

#include "llama-split.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

// of ggml-backend-meta.cpp
GGML_API size_t ggml_backend_meta_copy_room(const ggml_tensor * src, const ggml_tensor * dst);
GGML_API void   ggml_backend_meta_copy_tensor(const ggml_tensor * src, ggml_tensor * dst, void * host, size_t host_size);

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// ---- objects that are made again where they lie ----

struct place_in {
    void * at   = nullptr; // where the next object goes; nullptr once it has gone there
    void * kept = nullptr; // memory that is not given back, whoever deletes the object in it
};

thread_local place_in model_place;
thread_local place_in context_place;

struct placing {
    placing(place_in & place, void * at) : place(place) { place = {at, at}; }
    ~placing() { place = {}; }
    placing(const placing &) = delete;

    place_in & place;
};

void * new_in(place_in & place, size_t size) {
    void * at = std::exchange(place.at, nullptr);
    return at ? at : ::operator new(size);
}

void delete_in(place_in & place, void * object) {
    if (object != place.kept) {
        ::operator delete(object);
    }
}

// ---- aborts as exceptions ----

thread_local bool aborts_throw = false;

// The threads that upload for a switch. They have no variable of their own: a thread's first look at one takes memory,
// and the loader aborts where there is none.
constexpr size_t N_UPLOADERS = 4;

std::atomic<std::thread::id> uploaders[N_UPLOADERS];

ggml_abort_callback_t former_abort = nullptr;

void on_abort(const char * message) {
    const auto me = std::this_thread::get_id();
    if (std::find(std::begin(uploaders), std::end(uploaders), me) != std::end(uploaders) || aborts_throw) {
        throw std::runtime_error(message);
    }
    if (former_abort) {
        former_abort(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

// one switch at a time: the callback is the process's
std::mutex switching;

// A thread's first exception takes memory too, and the loader aborts where there is none: this takes it early.
void get_ready_to_throw() { (void) std::uncaught_exceptions(); }

struct throwing_aborts {
    throwing_aborts() : lock(switching) {
        get_ready_to_throw();
        former_abort = ggml_set_abort_callback(on_abort);
        aborts_throw = true;
    }
    ~throwing_aborts() {
        aborts_throw = false;
        ggml_set_abort_callback(former_abort);
    }
    throwing_aborts(const throwing_aborts &) = delete;

    std::lock_guard<std::mutex> lock;
};

// ---- what is known of models and contexts ----

// How a model was loaded, in memory of its own.
struct load_record {
    std::string              path;
    std::vector<std::string> splits;
    llama_model_params       params = {};

    std::vector<ggml_backend_dev_t>                devices;
    std::vector<llama_model_kv_override>           kv_overrides;
    std::vector<llama_model_tensor_buft_override>  bufts;
    std::deque<std::string>                        patterns;

    llama_model_set_tensor_data_t set_tensor_data = nullptr;
    void *                        userdata        = nullptr;
    std::vector<ggml_tensor *>    asked; // tensors of the last placing, whose bytes are the caller's

    load_record(const std::string & path, const std::vector<std::string> & splits, const llama_model_params & from)
        : path(path), splits(splits), params(from) {
        if (from.devices) {
            for (auto * dev = from.devices; *dev; ++dev) {
                devices.push_back(*dev);
            }
            devices.push_back(nullptr);
        }
        if (from.kv_overrides) {
            auto * one = from.kv_overrides;
            for (; one->key[0]; ++one) {
                kv_overrides.push_back(*one);
            }
            kv_overrides.push_back(*one);
        }
        if (from.tensor_buft_overrides) {
            auto * one = from.tensor_buft_overrides;
            for (; one->pattern; ++one) {
                patterns.emplace_back(one->pattern);
                bufts.push_back({patterns.back().c_str(), one->buft});
            }
            bufts.push_back(*one);
        }
        // what reports to the caller of the first load may be gone
        params.progress_callback           = [](float, void *) { return true; };
        params.progress_callback_user_data = nullptr;
    }
    load_record(const load_record &) = delete;

    llama_model_params in(llama_split_mode mode, const float * tensor_split) {
        llama_model_params result = params;
        result.devices               = devices.empty()      ? nullptr : devices.data();
        result.kv_overrides          = kv_overrides.empty() ? nullptr : kv_overrides.data();
        result.tensor_buft_overrides = bufts.empty()        ? nullptr : bufts.data();
        result.split_mode            = mode;
        result.tensor_split          = tensor_split;
        return result;
    }
};

struct context_record {
    const llama_model *   model;
    llama_context_params  params;
    int                   n_inside = 0; // calls that are inside it
    std::map<llama_seq_id, llama_sampler *> suspended; // set by the caller, and not for the mode that it is in
};

std::mutex registry;
std::unordered_map<const llama_model *, std::shared_ptr<load_record>> models;
std::unordered_map<const llama_context *, context_record>            contexts;

// ---- bytes of tensors ----

thread_local load_record * from_caller = nullptr;

// Asks the caller for the bytes of a placement that nothing can undo any more.
void ask_caller(load_record & record) {
    for (ggml_tensor * tensor : record.asked) {
        record.set_tensor_data(tensor, record.userdata);
    }
    record.asked.clear();
}

// ---- a model that is being moved ----

// A placement of a model.
struct placement {
    llama_split_mode   mode;
    std::vector<float> shares;

    placement(llama_split_mode mode, const float * tensor_split) : mode(mode) {
        if (tensor_split) {
            shares.assign(tensor_split, tensor_split + llama_max_devices());
        }
    }

    bool operator==(const placement & other) const { return mode == other.mode && shares == other.shares; }
};

// How the old placement is made again: as it was; without a mapping of the file, which takes as much address space as
// the weights; where the devices do not have the memory any more, in that of the host.
enum class way { AS_IT_WAS, UNMAPPED, ON_HOST };

// What stays of a model over the moment when it is not there.
struct moving {
    llama_model *                model;
    std::shared_ptr<load_record> record;
    placement                    from;
    placement                    to;
    uint32_t                     n_ctx_train;

    // Callers have pointers into these, and the vocabulary takes long to read: they go from the model that ends to the
    // one that is made where it lay.
    llama_vocab                                  vocab;
    std::unordered_map<std::string, std::string> gguf_kv;
    std::vector<std::string>                     classifier_labels;
    bool                                         has_texts = false;

    // The weights of the model that was there, while both fit on the devices.
    std::unordered_multimap<std::string, ggml_tensor *> weights;
    void *                                              buffers = nullptr;
    void                                              (*free_buffers)(void *) = nullptr;

    // what loading takes for a moment, so that the way back is open
    std::unique_ptr<char[]> reserve;

    moving(llama_model * model, std::shared_ptr<load_record> record, llama_split_mode mode, const float * tensor_split);
    ~moving();
    moving(const moving &) = delete;

    void swap_texts();
    void keep_weights();
    void free_weights();
    bool place(const placement & where, way how);
    bool place_new();
};

thread_local moving * now = nullptr;

} // namespace

// ---- the hooks ----

void * llama_split_new(const llama_model *, size_t size) { return new_in(model_place, size); }
void * llama_split_new(const llama_context *, size_t size) { return new_in(context_place, size); }
void   llama_split_delete(const llama_model *, void * object) { delete_in(model_place, object); }
void   llama_split_delete(const llama_context *, void * object) { delete_in(context_place, object); }

llama_model * llama_split_loaded(
        llama_model * model, const std::string & path, const std::vector<std::string> & splits, const llama_model_params & params) {
    const bool is_known = now && now->model == model;
    if (!model || is_known || path.empty() || params.vocab_only || params.no_alloc) {
        return model;
    }
    try {
        auto record = std::make_shared<load_record>(path, splits, params);
        if (from_caller) {
            record->set_tensor_data = from_caller->set_tensor_data;
            record->userdata        = from_caller->userdata;
        }
        std::lock_guard<std::mutex> lock(registry);
        models[model] = std::move(record);
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_WARN("%s: no memory to note how the model was loaded: it cannot be moved\n", __func__);
    }
    return model;
}

bool llama_split_vocab(llama_model & model) {
    if (!now || now->model != &model || !now->has_texts) {
        return false;
    }
    now->swap_texts();
    return true;
}

bool llama_split_ending(llama_model & model, void * buffers, void (*free_buffers)(void *)) {
    if (!now || now->model != &model || now->has_texts) {
        return false;
    }
    now->swap_texts();
    if (now->weights.empty() || now->buffers) {
        return false;
    }
    now->buffers      = buffers;
    now->free_buffers = free_buffers;
    return true;
}

void llama_split_freed(const llama_model * model) {
    std::lock_guard<std::mutex> lock(registry);
    models.erase(model);
}

llama_context * llama_split_made(llama_context * ctx, const llama_context_params & params) {
    try {
        std::lock_guard<std::mutex> lock(registry);
        auto & record = contexts[ctx];
        record.model  = &ctx->get_model();
        record.params = params;
    } catch (const std::bad_alloc &) {
        // unknown, it could end up on a model that is moved under it
        delete ctx;
        throw;
    }
    return ctx;
}

void llama_split_freed(const llama_context * ctx) {
    std::lock_guard<std::mutex> lock(registry);
    contexts.erase(ctx);
}

llama_split_inside::llama_split_inside(const llama_context * ctx) : ctx(ctx) {
    std::lock_guard<std::mutex> lock(registry);
    const auto found = contexts.find(ctx);
    if (found != contexts.end()) {
        found->second.n_inside++;
    }
}

llama_split_inside::~llama_split_inside() {
    std::lock_guard<std::mutex> lock(registry);
    const auto found = contexts.find(ctx);
    if (found != contexts.end()) {
        found->second.n_inside--;
    }
}

// A buffer whose tensors can be read and copied as they are.
static bool is_plain(const ggml_tensor & tensor) {
    const auto buft = ggml_backend_buffer_get_type(tensor.buffer);
    const auto dev  = ggml_backend_buft_get_device(buft);
    return ggml_backend_buft_is_host(buft) || (dev && ggml_backend_dev_buffer_type(dev) == buft);
}

bool llama_split_given(ggml_tensor * tensor, llama_split_uploads & uploads) {
    if (from_caller) {
        from_caller->asked.push_back(tensor);
        return true;
    }
    // one without a buffer is about to be mapped
    if (!now || !now->buffers || !tensor->buffer) {
        return false;
    }
    const ggml_tensor * best = nullptr;
    const auto found = now->weights.equal_range(ggml_get_name(tensor));
    for (auto one = found.first; one != found.second; ++one) {
        const ggml_tensor * from = one->second;
        if (from->type == tensor->type && ggml_are_same_shape(from, tensor) && is_plain(*from)) {
            const bool is_nearer = ggml_backend_buffer_get_type(from->buffer) == ggml_backend_buffer_get_type(tensor->buffer);
            best = !best || is_nearer ? from : best;
        }
    }
    if (!best) {
        return false;
    }
    if (ggml_backend_buffer_is_host(best->buffer)) {
        uploads.put(tensor, best->data, ggml_nbytes(best));
        return true;
    }
    if (!is_plain(*tensor) || ggml_backend_meta_copy_room(best, tensor) == 0) {
        return false;
    }
    uploads.put(tensor, best);
    return true;
}

struct llama_split_uploads::impl {
    struct job {
        ggml_tensor *       tensor;
        const void *        data; // nullptr: those of `from`
        size_t              size;
        const ggml_tensor * from;
    };

    // Host memory that copies go through.
    struct staging {
        ggml_backend_buffer_ptr buffer;

        void do_job(const job & one) {
            if (one.data) {
                ggml_backend_tensor_set(one.tensor, one.data, 0, one.size);
                return;
            }
            const size_t room = ggml_backend_meta_copy_room(one.from, one.tensor);
            if (!buffer || ggml_backend_buffer_get_size(buffer.get()) < room) {
                // as much as hides the cost of a call
                const size_t size = std::max<size_t>(room, std::min<size_t>(one.size, 16 << 20));
                buffer.reset();
                buffer.reset(ggml_backend_buft_alloc_buffer(host_buft(*one.from, *one.tensor), size));
                if (!buffer) {
                    throw std::bad_alloc();
                }
            }
            ggml_backend_meta_copy_tensor(
                one.from, one.tensor, ggml_backend_buffer_get_base(buffer.get()), ggml_backend_buffer_get_size(buffer.get()));
        }

        // One that the devices reach best.
        static ggml_backend_buffer_type_t host_buft(const ggml_tensor & from, const ggml_tensor & to) {
            for (const auto * tensor : {&from, &to}) {
                auto * dev  = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
                auto * buft = dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_META
                                  ? ggml_backend_dev_host_buffer_type(dev) : nullptr;
                if (buft) {
                    return buft;
                }
            }
            return ggml_backend_cpu_buffer_type();
        }
    };

    std::mutex               mutex;
    std::condition_variable  ready;
    std::deque<job>          jobs;
    std::vector<std::thread> threads;
    staging                  own_staging;
    std::exception_ptr       failed;
    bool                     is_over = false;

    // me: where the thread is noted whose aborts are exceptions, or nullptr
    void work(std::atomic<std::thread::id> * me) {
        get_ready_to_throw();
        if (me) {
            *me = std::this_thread::get_id();
        }
        do_jobs();
        if (me) {
            *me = std::thread::id();
        }
    }

    void do_jobs() {
        staging                      through;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            ready.wait(lock, [this] { return is_over || !jobs.empty(); });
            if (jobs.empty()) {
                return;
            }
            const job one = jobs.front();
            jobs.pop_front();
            lock.unlock();
            std::exception_ptr error;
            try {
                through.do_job(one);
            } catch (...) {
                error = std::current_exception();
            }
            lock.lock();
            if (error) {
                failed = error;
                jobs.clear();
            }
        }
    }

    static bool is_rpc(const ggml_tensor * tensor) {
        return strstr(ggml_backend_buft_name(ggml_backend_buffer_get_type(tensor->buffer)), "RPC");
    }

    void put(const job & one) {
        constexpr size_t MIN_BYTES = 1 << 16; // smaller ones are not worth a hand-over

        // an RPC server has one socket
        const bool by_thread = one.size >= MIN_BYTES && !is_rpc(one.tensor) && !(one.from && is_rpc(one.from));
        if (by_thread && threads.size() < N_UPLOADERS) {
            try {
                auto * me = aborts_throw ? &uploaders[threads.size()] : nullptr;
                threads.emplace_back([this, me] { work(me); });
            } catch (const std::system_error &) {
                // as many as there are do it
            }
        }
        if (!by_thread || threads.empty()) {
            own_staging.do_job(one);
            return;
        }
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(one);
        ready.notify_one();
    }

    void end() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            is_over = true;
        }
        ready.notify_all();
        for (auto & thread : threads) {
            thread.join();
        }
        threads.clear();
    }
};

llama_split_uploads::llama_split_uploads() : pimpl(std::make_unique<impl>()) {}

llama_split_uploads::~llama_split_uploads() {
    {
        std::lock_guard<std::mutex> lock(pimpl->mutex);
        pimpl->jobs.clear();
    }
    pimpl->end();
}

void llama_split_uploads::put(ggml_tensor * tensor, const void * data, size_t size) {
    pimpl->put({tensor, data, size, nullptr});
}

void llama_split_uploads::put(ggml_tensor * tensor, const ggml_tensor * from) {
    pimpl->put({tensor, nullptr, ggml_nbytes(from), from});
}

void llama_split_uploads::wait() {
    pimpl->end();
    if (pimpl->failed) {
        std::rethrow_exception(pimpl->failed);
    }
}

// ---- a context, taken apart and put together ----

struct llama_split_access {
    // Everything that a caller can see of a context, but for what its memory holds.
    struct visible {
        llama_context_params params;

        std::vector<llama_sampler_seq_config>   samplers;
        std::map<llama_seq_id, llama_sampler *> suspended;

        bool              embeddings;
        bool              embeddings_nextn;
        bool              embeddings_nextn_masked;
        bool              causal_attn;
        bool              warmup;
        int32_t           nextn_layer_offset;
        std::vector<bool> embeddings_layer_inp;

        llama_cross cross;

        buffer_view<float>              logits, embd, embd_nextn;
        std::vector<buffer_view<float>> embd_layer_inp;
        std::vector<int32_t>            embd_batch_idxs;
        llama_context::sampling_info    sampling;

        std::map<llama_seq_id, std::vector<float>> embd_seq;

        uint32_t                              n_outputs;
        std::vector<int32_t>                  output_ids;
        std::vector<llama_context::swap_info> output_swaps;
        ggml_backend_buffer_ptr               buf_output;

        ggml_threadpool_t   threadpool, threadpool_batch;
        ggml_abort_callback abort_callback;
        void *              abort_callback_data;

        bool    has_evaluated_once;
        int64_t t_start_us, t_load_us, t_p_eval_us, t_eval_us, t_compute_start_us, n_queued_tokens;
        int32_t n_p_eval, n_eval, n_reused;
    };

    static void swap(llama_vocab & one, llama_vocab & other) { one.pimpl.swap(other.pimpl); }

    // Says why a context cannot be moved; empty where it can.
    static std::string why_not(llama_context & ctx, llama_split_mode mode) {
        if (!ctx.loras->empty()) {
            return "adapters are set on the context";
        }
        if (has_cvec(*ctx.cvec)) {
            return "a control vector is set on the context";
        }
        if (ctx.opt_ctx) {
            return "the context trains";
        }
        if (ctx.cparams.ctx_other) {
            return "the context works for another one";
        }
        if (!ctx.mem_storage.empty()) {
            return "sequences are kept on the devices";
        }
        if (mode == LLAMA_SPLIT_MODE_TENSOR && !ctx.cparams.flash_attn) {
            return "tensor mode needs flash attention, which is off";
        }
        return "";
    }

    struct bytes {
        std::unique_ptr<uint8_t[]> data;
        size_t                     size;
    };

    static bytes memory_of(llama_context & ctx) {
        ctx.synchronize();
        // shifts and copies of sequences that wait for the next decode are no part of the state's bytes
        ctx.memory_update(false);
        ctx.synchronize();
        bytes state;
        state.size = ctx.state_get_size();
        state.data.reset(new uint8_t[state.size]);
        // both give 0 where they fail, and every state has a header
        if (state.size == 0 || ctx.state_get_data(state.data.get(), state.size) != state.size) {
            throw std::runtime_error("the state could not be read");
        }
        return state;
    }

    static visible take(llama_context & ctx, const context_record & record) {
        visible seen;
        seen.params    = record.params;
        seen.suspended = record.suspended;
        for (const auto & [seq_id, sampler] : ctx.sampling.samplers) {
            seen.suspended[seq_id] = sampler;
        }
        for (const auto & [seq_id, sampler] : seen.suspended) {
            seen.samplers.push_back({seq_id, sampler});
        }
        seen.params.samplers        = seen.samplers.data();
        seen.params.n_samplers      = seen.samplers.size();
        seen.params.n_threads       = ctx.cparams.n_threads;
        seen.params.n_threads_batch = ctx.cparams.n_threads_batch;

        // what 0 came to: the model says another length once YaRN has stretched it
        seen.params.n_ctx = ctx.cparams.n_ctx;

        // what AUTO came to: a cache has another layout without it
        seen.params.flash_attn_type = ctx.cparams.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

        seen.embeddings              = ctx.cparams.embeddings;
        seen.embeddings_nextn        = ctx.cparams.embeddings_nextn;
        seen.embeddings_nextn_masked = ctx.cparams.embeddings_nextn_masked;
        seen.causal_attn             = ctx.cparams.causal_attn;
        seen.warmup                  = ctx.cparams.warmup;
        seen.nextn_layer_offset      = ctx.cparams.nextn_layer_offset;
        seen.embeddings_layer_inp    = ctx.cparams.embeddings_layer_inp;

        seen.logits          = ctx.logits;
        seen.embd            = ctx.embd;
        seen.embd_nextn      = ctx.embd_nextn;
        seen.embd_layer_inp  = ctx.embd_layer_inp;
        seen.n_outputs       = ctx.n_outputs;
        seen.threadpool       = ctx.threadpool;
        seen.threadpool_batch = ctx.threadpool_batch;
        seen.abort_callback      = ctx.abort_callback;
        seen.abort_callback_data = ctx.abort_callback_data;

        seen.has_evaluated_once = ctx.has_evaluated_once;
        seen.t_start_us         = ctx.t_start_us;
        seen.t_load_us          = ctx.t_load_us;
        seen.t_p_eval_us        = ctx.t_p_eval_us;
        seen.t_eval_us          = ctx.t_eval_us;
        seen.t_compute_start_us = ctx.t_compute_start_us;
        seen.n_queued_tokens    = ctx.n_queued_tokens;
        seen.n_p_eval           = ctx.n_p_eval;
        seen.n_eval             = ctx.n_eval;
        seen.n_reused           = ctx.n_reused;

        // nothing fails from here on
        seen.cross           = std::move(ctx.cross);
        seen.embd_batch_idxs = std::move(ctx.embd_batch_idxs);
        seen.sampling        = std::move(ctx.sampling);
        seen.embd_seq        = std::move(ctx.embd_seq);
        seen.output_ids      = std::move(ctx.output_ids);
        seen.output_swaps    = std::move(ctx.output_swaps);
        seen.buf_output      = std::move(ctx.buf_output);
        return seen;
    }

    static void give(llama_context & ctx, visible & seen) {
        ctx.cparams.embeddings              = seen.embeddings;
        ctx.cparams.embeddings_nextn        = seen.embeddings_nextn;
        ctx.cparams.embeddings_nextn_masked = seen.embeddings_nextn_masked;
        ctx.cparams.causal_attn             = seen.causal_attn;
        ctx.cparams.warmup                  = seen.warmup;
        ctx.cparams.nextn_layer_offset      = seen.nextn_layer_offset;
        ctx.cparams.embeddings_layer_inp    = seen.embeddings_layer_inp;

        ctx.cross           = std::move(seen.cross);
        ctx.logits          = seen.logits;
        ctx.embd            = seen.embd;
        ctx.embd_nextn      = seen.embd_nextn;
        ctx.embd_layer_inp  = std::move(seen.embd_layer_inp);
        ctx.embd_batch_idxs = std::move(seen.embd_batch_idxs);
        // the samplers are those that this mode takes; what the last decode sampled is the caller's still
        std::swap(seen.sampling.samplers, ctx.sampling.samplers);
        ctx.sampling     = std::move(seen.sampling);
        ctx.embd_seq     = std::move(seen.embd_seq);
        ctx.n_outputs    = seen.n_outputs;
        ctx.output_ids   = std::move(seen.output_ids);
        ctx.output_swaps = std::move(seen.output_swaps);
        ctx.buf_output   = std::move(seen.buf_output);

        ctx.threadpool       = seen.threadpool;
        ctx.threadpool_batch = seen.threadpool_batch;
        ctx.set_abort_callback(seen.abort_callback, seen.abort_callback_data);

        ctx.has_evaluated_once = seen.has_evaluated_once;
        ctx.t_start_us         = seen.t_start_us;
        ctx.t_load_us          = seen.t_load_us;
        ctx.t_p_eval_us        = seen.t_p_eval_us;
        ctx.t_eval_us          = seen.t_eval_us;
        ctx.t_compute_start_us = seen.t_compute_start_us;
        ctx.n_queued_tokens    = seen.n_queued_tokens;
        ctx.n_p_eval           = seen.n_p_eval;
        ctx.n_eval             = seen.n_eval;
        ctx.n_reused           = seen.n_reused;
    }

private:
    static bool has_cvec(const llama_adapter_cvec & cvec) {
        for (int il = 0; il < LLAMA_MAX_LAYERS; ++il) {
            if (cvec.tensor_for(il)) {
                return true;
            }
        }
        return false;
    }
};

namespace {

// Says why a model cannot be placed so; empty where that is to be seen by trying.
std::string why_not(const llama_model & model, const load_record * record, llama_split_mode mode) {
    if (!record) {
        return model.hparams.vocab_only ? "the model is a vocabulary alone" : "the model was not loaded from a path";
    }
    if (!model.loras.empty()) {
        return "adapters are loaded for the model";
    }
    if (llama_split_mode_name(mode) == nullptr) {
        return "there is no such split mode";
    }
    if (mode == LLAMA_SPLIT_MODE_TENSOR) {
        if (!llm_arch_supports_sm_tensor(model.arch)) {
            return "the architecture " + model.arch_name() + " has no tensor mode";
        }
        size_t n = 0;
        if (record->devices.empty()) {
            for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
                n += ggml_backend_dev_buffer_type(ggml_backend_dev_get(i)) != ggml_backend_cpu_buffer_type();
            }
        } else {
            n = record->devices.size() - 1;
        }
        if (n < 1 || n > GGML_BACKEND_META_MAX_DEVICES) {
            return "tensor mode takes 1 to " + std::to_string(GGML_BACKEND_META_MAX_DEVICES) + " devices, and there are " + std::to_string(n);
        }
    }
    return "";
}

std::shared_ptr<load_record> record_of(const llama_model * model) {
    std::lock_guard<std::mutex> lock(registry);
    const auto found = models.find(model);
    return found == models.end() ? nullptr : found->second;
}

size_t n_contexts_of(const llama_model * model) {
    std::lock_guard<std::mutex> lock(registry);
    return std::count_if(contexts.begin(), contexts.end(), [&](const auto & one) { return one.second.model == model; });
}

// Says what went wrong, with or without memory.
void say(const char * func, const char * what, const char * why) noexcept {
    try {
        LLAMA_LOG_ERROR("%s: %s%s\n", func, what, why);
    } catch (...) {
    }
}

bool refuse(const char * func, const char * why) noexcept {
    say(func, "refused: ", why);
    return false;
}

// The bytes that loading takes for a moment: what it knows of the file, and one tensor.
size_t passing_size(const llama_model & model) {
    size_t largest = 0;
    for (const auto & one : model.tensors_by_name) {
        largest = std::max(largest, ggml_nbytes(one.second));
    }
    return (64u << 20) + largest;
}

moving::moving(llama_model * model, std::shared_ptr<load_record> record, llama_split_mode mode, const float * tensor_split)
    : model(model), record(std::move(record)), from(model->split_mode(), model->tensor_split()), to(mode, tensor_split),
      n_ctx_train(model->hparams.n_ctx_train), reserve(new char[passing_size(*model)]) {
    now = this;
}

moving::~moving() {
    free_weights();
    now = nullptr;
}

void moving::free_weights() {
    if (buffers) {
        free_buffers(buffers);
    }
    buffers = nullptr;
    weights.clear();
}

// Notes the weights of a model that is about to end, if there is room on the devices for those of the new one beside them.
void moving::keep_weights() {
    // layers are shared out by what is free, which is another thing beside weights that lie unevenly
    const bool is_even = to.mode == LLAMA_SPLIT_MODE_TENSOR || !to.shares.empty() ||
                         (from.mode == LLAMA_SPLIT_MODE_TENSOR && from.shares.empty());
    if (!is_even || record->set_tensor_data) {
        return;
    }
    // room for all of it on each: some devices are one another's memory
    const size_t wanted = model->size() + model->size() / 8 + (256u << 20);
    std::vector<ggml_backend_dev_t> devices = record->devices;
    if (devices.empty()) {
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            devices.push_back(ggml_backend_dev_get(i));
        }
    }
    for (auto * dev : devices) {
        size_t free = 0, total = 0;
        if (dev) {
            ggml_backend_dev_memory(dev, &free, &total);
            if (free < wanted) {
                return;
            }
        }
    }
    try {
        for (const auto & [name, tensor] : model->tensors_by_name) {
            if (tensor->buffer) {
                weights.emplace(name, tensor);
            }
        }
    } catch (const std::bad_alloc &) {
        weights.clear();
    }
}

// Makes the new placement; the old weights are given back with it.
bool moving::place_new() {
    const bool has_weights = buffers;
    bool is_placed = place(to, way::AS_IT_WAS);
    free_weights();
    if (!is_placed && has_weights) {
        // beside the old weights there was no room, or they were not to be read
        is_placed = place(to, way::AS_IT_WAS);
    }
    return is_placed;
}

void moving::swap_texts() {
    llama_split_access::swap(vocab, model->vocab);
    std::swap(gguf_kv, model->gguf_kv);
    std::swap(classifier_labels, model->classifier_labels);
    has_texts = !has_texts;
}

// Makes the model again where it lies. It is destroyed already; if this fails it is still.
bool moving::place(const placement & where, way how) {
    const placing here(model_place, model);
    from_caller = record->set_tensor_data ? record.get() : nullptr;
    record->asked.clear();
    llama_model * made = nullptr;
    try {
        ggml_backend_dev_t no_device = nullptr;
        auto params = record->in(where.mode, where.shares.empty() ? nullptr : where.shares.data());
        if (how != way::AS_IT_WAS) {
            params.load_mode = LLAMA_LOAD_MODE_NONE;
        }
        if (how == way::ON_HOST) {
            params.devices      = &no_device;
            params.n_gpu_layers = 0;
            params.split_mode   = LLAMA_SPLIT_MODE_LAYER;
            params.tensor_split = nullptr;
        }
        std::vector<const char *> paths;
        for (const auto & split : record->splits) {
            paths.push_back(split.c_str());
        }
        made = paths.size() > 1 ? llama_model_load_from_splits(paths.data(), paths.size(), params)
                                : llama_model_load_from_file(record->path.c_str(), params);
    } catch (const std::exception & error) {
        say(__func__, "", error.what());
    }
    from_caller = nullptr;
    if (made) {
        made->hparams.n_ctx_train = n_ctx_train;
    }
    return made != nullptr;
}

// Goes back: `finish` makes what lies on the model. Memory is given back late by some drivers, so it is tried for a while.
template <typename F> void go_back(moving & move, const char * func, F finish) {
    say(func, "going back to the old placement: ", llama_split_mode_name(move.from.mode));
    move.reserve.reset();
    constexpr int N_ROUNDS       = 40;
    constexpr int N_ROUNDS_ALONE = 20; // before the host is tried
    for (int round = 0; round < N_ROUNDS; ++round) {
        for (const way how : {way::AS_IT_WAS, way::UNMAPPED, way::ON_HOST}) {
            if (how == way::ON_HOST && round < N_ROUNDS_ALONE) {
                continue;
            }
            if (move.place(move.from, how)) {
                if (finish()) {
                    if (how == way::ON_HOST) {
                        say(func, "the old placement came back on the host alone", "");
                    }
                    return;
                }
                move.model->~llama_model();
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    aborts_throw = false;
    GGML_ABORT("the old placement could not be made again");
}

// Makes a context again where it lies, with its memory. It is destroyed already; if this fails it is still.
bool build(llama_context * ctx, llama_model * model, llama_split_access::visible & seen, const llama_split_access::bytes & state) {
    const placing here(context_place, ctx);
    const uint32_t n_ctx_train = model->hparams.n_ctx_train;
    llama_context * made = nullptr;
    try {
        made = llama_init_from_model(model, seen.params);
        if (made && made->state_set_data(state.data.get(), state.size) != state.size) {
            throw std::runtime_error("the new context does not take the state");
        }
    } catch (const std::exception & error) {
        say(__func__, "", error.what());
        if (made) {
            made->~llama_context();
            made = nullptr;
        }
    }
    model->hparams.n_ctx_train = n_ctx_train;
    if (!made) {
        return false;
    }
    llama_split_access::give(*made, seen);
    std::lock_guard<std::mutex> lock(registry);
    contexts[ctx].suspended = std::move(seen.suspended);
    return true;
}

} // namespace

// ---- the calls ----

bool llama_context_set_split_mode(llama_context * ctx, llama_split_mode mode, const float * tensor_split) try {
    if (!ctx) {
        return refuse(__func__, "no context");
    }
    if (now) {
        return refuse(__func__, "called from a callback of a switch");
    }
    const throwing_aborts throwing;
    const llama_split_inside inside(ctx);
    context_record record;
    {
        std::lock_guard<std::mutex> lock(registry);
        const auto found = contexts.find(ctx);
        if (found == contexts.end()) {
            return refuse(__func__, "this is no context of llama_init_from_model");
        }
        record = found->second;
    }
    if (record.n_inside > 1) {
        return refuse(__func__, "another call is inside this context");
    }
    auto *      model  = const_cast<llama_model *>(&ctx->get_model());
    const auto  loaded = record_of(model);
    std::string why    = why_not(*model, loaded.get(), mode);
    if (why.empty() && n_contexts_of(model) > 1) {
        why = "another context uses the model";
    }
    if (why.empty()) {
        why = llama_split_access::why_not(*ctx, mode);
    }
    if (!why.empty()) {
        return refuse(__func__, why.c_str());
    }
    moving move(model, loaded, mode, tensor_split);
    if (move.from == move.to) {
        return true;
    }
    const auto state = llama_split_access::memory_of(*ctx);
    move.keep_weights();
    auto seen = llama_split_access::take(*ctx, record);

    // nothing is refused from here on, and nothing throws
    ctx->~llama_context();
    model->~llama_model();
    if (move.place_new()) {
        if (build(ctx, model, seen, state)) {
            ask_caller(*loaded);
            return true;
        }
        model->~llama_model();
    }
    go_back(move, __func__, [&] { return build(ctx, model, seen, state); });
    ask_caller(*loaded);
    return false;
} catch (const std::exception & error) {
    return refuse(__func__, error.what());
}

bool llama_model_set_split_mode(llama_model * model, llama_split_mode mode, const float * tensor_split) try {
    if (!model) {
        return refuse(__func__, "no model");
    }
    if (now) {
        return refuse(__func__, "called from a callback of a switch");
    }
    const throwing_aborts throwing;
    const auto  loaded = record_of(model);
    std::string why    = why_not(*model, loaded.get(), mode);
    if (why.empty() && n_contexts_of(model)) {
        why = "a context uses the model: see llama_context_set_split_mode";
    }
    if (!why.empty()) {
        return refuse(__func__, why.c_str());
    }
    moving move(model, loaded, mode, tensor_split);
    if (move.from == move.to) {
        return true;
    }
    move.keep_weights();
    model->~llama_model();
    if (move.place_new()) {
        ask_caller(*loaded);
        return true;
    }
    go_back(move, __func__, [] { return true; });
    ask_caller(*loaded);
    return false;
} catch (const std::exception & error) {
    return refuse(__func__, error.what());
}

llama_split_mode llama_model_get_split_mode(const llama_model * model) { return model->split_mode(); }

const char * llama_split_mode_name(llama_split_mode mode) {
    switch (mode) {
        case LLAMA_SPLIT_MODE_NONE:   return "none";
        case LLAMA_SPLIT_MODE_LAYER:  return "layer";
        case LLAMA_SPLIT_MODE_ROW:    return "row";
        case LLAMA_SPLIT_MODE_TENSOR: return "tensor";
    }
    return nullptr;
}

llama_model * llama_model_load_from_file_with(
        const char * path_model, llama_model_params params, llama_model_set_tensor_data_t set_tensor_data, void * userdata) try {
    if (!path_model || !set_tensor_data) {
        LLAMA_LOG_ERROR("%s: a path and a function are wanted\n", __func__);
        return nullptr;
    }
    // nothing of the file is mapped or read but its header
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    load_record source(path_model, {}, params);
    source.set_tensor_data = set_tensor_data;
    source.userdata        = userdata;

    struct asking {
        explicit asking(load_record & source) { from_caller = &source; }
        ~asking() { from_caller = nullptr; }
    };
    llama_model * model;
    {
        const asking now_asked(source);
        model = llama_model_load_from_file(path_model, params);
    }
    if (model) {
        ask_caller(source);
    }
    return model;
} catch (const std::exception & error) {
    say(__func__, "", error.what());
    return nullptr;
}
