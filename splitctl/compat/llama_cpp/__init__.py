"""What programs import of ``llama_cpp``, by the same names; `splitctl.compat.install` puts it in its place."""

from __future__ import annotations

from splitctl.compat.llama_cpp.arguments import DEFAULT_SEED
from splitctl.compat.llama_cpp.llama import Llama
from splitctl.compat.llama_cpp.llama_cache import LlamaRAMCache, LlamaState
from splitctl.compat.llama_cpp.llama_grammar import LlamaGrammar
from splitctl.compat.llama_cpp.llama_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequestAssistantMessage,
    ChatCompletionRequestFunctionMessage,
    ChatCompletionRequestMessage,
    ChatCompletionRequestResponseFormat,
    ChatCompletionRequestSystemMessage,
    ChatCompletionRequestToolMessage,
    ChatCompletionRequestUserMessage,
    ChatCompletionTool,
    ChatCompletionToolChoiceOption,
    Completion,
    CompletionChunk,
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateCompletionStreamResponse,
    CreateEmbeddingResponse,
    Embedding,
)
from splitctl.compat.llama_cpp.sampling import (
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequestAssistantMessage",
    "ChatCompletionRequestFunctionMessage",
    "ChatCompletionRequestMessage",
    "ChatCompletionRequestResponseFormat",
    "ChatCompletionRequestSystemMessage",
    "ChatCompletionRequestToolMessage",
    "ChatCompletionRequestUserMessage",
    "ChatCompletionTool",
    "ChatCompletionToolChoiceOption",
    "Completion",
    "CompletionChunk",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateCompletionStreamResponse",
    "CreateEmbeddingResponse",
    "Embedding",
    "Llama",
    "LlamaCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteriaList",
]

__version__ = "0.3.36"
"""The release of llama-cpp-python whose names these are."""

LlamaCache = LlamaRAMCache
LLAMA_DEFAULT_SEED = DEFAULT_SEED
LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW, LLAMA_SPLIT_MODE_TENSOR = range(4)
LLAMA_POOLING_TYPE_UNSPECIFIED, LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN = -1, 0, 1
LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK = 2, 3, 4
LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED = -1
GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0 = 0, 1, 2, 3, 8
