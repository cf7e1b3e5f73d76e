"""What people's programs do with a server, by the clients that they use; run as a child: CLIENT URL KEY.

Each prints one JSON object. A child of its own, since these packages warn, start threads and ask the network when they
are imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": [{"type": "text", "text": "Name"}, {"type": "text", "text": "another one."}]},
]
N_TOKENS = 12


def by_litellm(url: str, key: str) -> dict[str, Any]:
    """Chat, stream, and the errors that litellm tells apart."""
    import litellm  # noqa: PLC0415 - a client a process

    asked = {
        "model": "openai/any/model:name",
        "api_base": url,
        "api_key": key,
        "temperature": 0.0,
        "max_tokens": N_TOKENS,
        "num_retries": 0,
    }
    whole = litellm.completion(messages=TURNS, **asked)
    chunks = list(litellm.completion(messages=TURNS, stream=True, stream_options={"include_usage": True}, **asked))
    stopped = litellm.completion(messages=TURNS, **{**asked, "max_tokens": 64}, stop=["."])
    errors = {}
    for name, changed in {
        "key": {"api_key": "wrong"},
        "context": {"messages": [{"role": "user", "content": "word " * 5000}]},
        "field": {"extra_body": {"no_such_field": 1}},
    }.items():
        try:
            litellm.completion(**{**asked, "messages": TURNS, **changed})
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            errors[name] = type(error).__name__
    return {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "finish": whole.choices[0].finish_reason,
        "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        "stopped": stopped.choices[0].message.content,
        "errors": errors,
    }


def by_langchain(url: str, key: str) -> dict[str, Any]:
    """Invoke, stream, batch and bound stop texts of langchain-openai."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage  # noqa: PLC0415 - a client a process
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 - a client a process

    turns = [
        SystemMessage(str(SYSTEM["content"])),
        HumanMessage("Name a colour."),
        AIMessage("Blue."),
        HumanMessage([{"type": "text", "text": "Name"}, {"type": "text", "text": "another one."}]),
    ]
    model = ChatOpenAI(
        model="any/model:name",
        base_url=url,
        api_key=key,  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=N_TOKENS,  # type: ignore[call-arg]
        max_retries=0,
        stream_usage=True,
    )
    whole = model.invoke(turns)
    chunks = list(model.stream(turns))
    both = model.batch([turns, turns])
    return {
        "text": whole.content,
        "streamed": "".join(str(chunk.content) for chunk in chunks),
        "finish": whole.response_metadata["finish_reason"],
        "usage": [
            whole.usage_metadata["output_tokens"],
            sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
        ],
        "batch": [answer.content for answer in both],
        "stopped": model.bind(stop=["."], max_tokens=64).invoke(turns).content,
    }


def by_llm(url: str, key: str) -> dict[str, Any]:
    """A model of llm's extra-openai-models.yaml: a conversation of two turns, streamed and whole."""
    import llm  # noqa: PLC0415 - a client a process

    folder = Path(os.environ["LLM_USER_PATH"])
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: any/model:name\n  api_base: {url}\n  api_key_name: ours\n", encoding="utf-8"
    )
    model = llm.get_model("ours")
    talk = model.conversation()
    options = {"key": key, "temperature": 0.0, "max_tokens": N_TOKENS}
    first = talk.prompt("Name a colour.", system=str(SYSTEM["content"]), stream=False, **options)
    text = first.text()
    again = "".join(model.prompt("Name a colour.", system=str(SYSTEM["content"]), stream=True, **options))
    second = talk.prompt("Name another one.", stream=True, **options)
    return {"text": text, "streamed": again, "usage": [first.usage().output], "second": second.text()}


_CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "litellm": by_litellm,
    "langchain": by_langchain,
    "llm": by_llm,
}

if __name__ == "__main__":
    print(json.dumps(_CLIENTS[sys.argv[1]](*sys.argv[2:])))
