"""What answers and messages look like: objects as JSON has them, under the names that programs annotate them with."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

ChatCompletionRequestMessage = Json
ChatCompletionRequestSystemMessage = Json
ChatCompletionRequestUserMessage = Json
ChatCompletionRequestAssistantMessage = Json
ChatCompletionRequestToolMessage = Json
ChatCompletionRequestFunctionMessage = Json
ChatCompletionRequestResponseFormat = Json
ChatCompletionTool = Json
ChatCompletionToolChoiceOption = Json | str
CreateCompletionResponse = Json
CreateCompletionStreamResponse = Json
CreateChatCompletionResponse = Json
CreateChatCompletionStreamResponse = Json
CreateEmbeddingResponse = Json
Completion = Json
CompletionChunk = Json
ChatCompletion = Json
ChatCompletionChunk = Json
Embedding = Json
