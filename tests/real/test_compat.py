"""`splitctl.compat.llama_cpp.Llama` on a real build: one object for most of them."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import Library
from splitctl.compat.llama_cpp import Llama, LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from splitctl.errors import ConfigInvalid
from splitctl.placement import SplitMode
from tests.real.conftest import DEVICES

PROMPT = "Once upon a time there was"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 3, "maximum": 17}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def make(library: Library, words_model: Path) -> Any:
    """Makes a small Llama on two devices."""

    def made(**named: Any) -> Llama:
        plain = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "devices": DEVICES, "prober": None}
        return Llama(words_model, library=library, **{**plain, **named})

    return made


@pytest.fixture(scope="module")
def llama(make: Any) -> Iterator[Llama]:
    """Every test goes on with it."""
    with make() as opened:
        yield opened


def greedy(llama: Llama, prompt: list[int], n: int) -> list[int]:
    """Draw so many tokens after a prompt."""
    return list(itertools.islice(llama.generate(prompt, temp=0.0), n))


def test_a_completion_has_the_fields_of_llama_cpp(llama: Llama) -> None:
    """The names and kinds that its programs read, with the text of the most likely tokens."""
    found = llama.create_completion(PROMPT, max_tokens=5, temperature=0.0, seed=1)
    assert isinstance(found, dict)
    prompt = llama.tokenize(PROMPT.encode())
    tokens = greedy(llama, prompt, 5)
    assert found["id"].startswith("cmpl-")
    assert {name: type(value) for name, value in found.items()} == {
        "id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict,
    }  # fmt: skip
    text = llama.detokenize(tokens).decode("utf-8", "replace")
    assert found["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    n = len(prompt)
    assert found["usage"] == {"prompt_tokens": n, "completion_tokens": 5, "total_tokens": n + 5}


def test_a_stream_is_the_completion_in_pieces(llama: Llama) -> None:
    """Each chunk is a completion without usage; the last one has no text and says why it ended."""
    whole = llama(PROMPT, max_tokens=6, temperature=0.9, seed=3)
    chunks = list(llama(PROMPT, max_tokens=6, temperature=0.9, seed=3, stream=True))
    assert isinstance(whole, dict)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stop_text_is_not_in_the_answer(llama: Llama) -> None:
    """Nor is what comes after it, and the reason is stop."""
    whole = llama(PROMPT, max_tokens=8, temperature=0.0)
    text = whole["choices"][0]["text"]  # type: ignore[index,call-overload] # no stream, so an object
    found: Any = llama(PROMPT, max_tokens=8, temperature=0.0, stop=[text[3:6]])
    assert found["choices"][0]["text"] == text[: text.index(text[3:6])]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_a_chat_is_answered_through_the_models_template(llama: Llama) -> None:
    """As a completion of the rendered prompt, in the fields of a chat; its stream begins with the role."""
    messages = [{"role": "user", "content": "Say hi"}]
    found: Any = llama.create_chat_completion(messages, max_tokens=4, temperature=0.0)
    chunks: Any = list(llama.create_chat_completion(messages, max_tokens=4, temperature=0.0, stream=True))
    rendered = "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    prompt = llama.detokenize(llama._input_ids[: found["usage"]["prompt_tokens"]].tolist(), special=True).decode()
    assert prompt.endswith(rendered)
    (choice,) = found["choices"]
    assert (found["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == choice["message"]["content"]
    assert (chunks[-1]["object"], chunks[-1]["choices"][0]["finish_reason"]) == ("chat.completion.chunk", "length")


def test_an_answer_by_a_schema_is_valid_by_it(llama: Llama) -> None:
    """As response_format, and as the arguments of a chosen tool."""
    messages = [{"role": "user", "content": "Who is it?"}]
    tool = {"type": "function", "function": {"name": "person", "parameters": SCHEMA}}
    formats: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "person"}}},
    ]
    for named in formats:
        found: Any = llama.create_chat_completion(messages, max_tokens=80, temperature=1.0, seed=2, **named)
        (choice,) = found["choices"]
        message = choice["message"]
        value = json.loads(message["content"] or message["tool_calls"][0]["function"]["arguments"])
        assert value.keys() == {"name", "age"}
        assert 3 <= value["age"] <= 17
        assert choice["finish_reason"] == ("tool_calls" if "tools" in named else "stop")


def test_a_grammar_goes_on_after_a_switch(llama: Llama, other_mode: SplitMode) -> None:
    """In the middle of an answer the model is another one, and what has come still counts."""
    grammar = LlamaGrammar.from_string('root ::= "a" [b-e]{6} "f"')
    drawn, prompt = b"", llama.tokenize(PROMPT.encode())
    for at, token in enumerate(llama.generate(prompt, temp=1.0, grammar=grammar)):
        if llama.is_eog(token):
            break
        drawn += llama.detokenize([token])
        if at == 1:
            assert llama.switch(other_mode.value).status.value == "switched"
    assert llama.switch("layer").status.value == "switched"
    assert (drawn[:1], drawn[-1:], len(drawn)) == (b"a", b"f", 8)


def test_tokens_are_read_drawn_and_dropped_one_by_one(llama: Llama) -> None:
    """As programs do it that have a loop of their own."""
    prompt = llama.tokenize(PROMPT.encode())
    expected = greedy(llama, prompt, 3)
    llama.reset()
    assert llama.n_tokens == 0
    llama.eval(prompt)
    assert (
        llama.sample(temp=0.0) == llama.sample(temp=0.0) == int(llama.eval_logits[-1].index(max(llama.eval_logits[-1])))
    )
    llama.eval([expected[0], 1, 2])
    llama.n_tokens -= 2
    assert llama.input_ids[: llama.n_tokens].tolist() == [*prompt, expected[0]]
    with pytest.raises(ConfigInvalid, match="call eval first"):
        llama.sample(temp=0.0)
    llama.eval([expected[1]])
    assert list(llama.eval_tokens) == [*prompt, *expected[:2]]
    assert llama.sample(temp=0.0) == expected[2]


def test_a_state_comes_back_and_goes_on(llama: Llama, make: Any) -> None:
    """In another object too: tokens, and the draws after them; from the cache as well."""
    prompt = llama.tokenize(PROMPT.encode())
    expected = greedy(llama, prompt, 4)
    llama.reset()
    llama.eval(prompt)
    state = pickle.loads(pickle.dumps(llama.save_state()))  # noqa: S301 - its own
    llama.reset()
    llama.load_state(state)
    assert greedy(llama, prompt, 4) == expected
    with make() as other:
        other.load_state(state)
        assert (other.n_tokens, other.sample(temp=0.0)) == (len(prompt), expected[0])
        other.set_cache(LlamaRAMCache())
        first = other(PROMPT, max_tokens=3, temperature=0.0)
        other.reset()
        n_before = other.session.n_decodes
        again = other(PROMPT, max_tokens=3, temperature=0.0)
        assert other.session.n_decodes - n_before <= 3
        assert again["choices"] == first["choices"]


def test_processors_biases_and_criteria_are_followed(llama: Llama) -> None:
    """A processor sees tokens and logits, a bias adds, and a criterion ends the answer."""
    seen: list[int] = []

    def rule_out(tokens: Any, logits: Any) -> Any:
        seen.append(len(tokens))
        logits[logits.argmax()] = -np.inf
        return logits

    prompt = llama.tokenize(PROMPT.encode())
    best = greedy(llama, prompt, 1)[0]
    ruled = next(llama.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([rule_out])))
    assert (ruled != best, seen) == (True, [len(prompt)])
    biased: Any = llama(PROMPT, max_tokens=2, temperature=0.0, logit_bias={str(ruled): 1000.0})
    assert biased["choices"][0]["text"] == (llama.detokenize([ruled]) * 2).decode("utf-8", "replace")
    ends = StoppingCriteriaList([lambda tokens, _: len(tokens) >= len(prompt) + 2])
    ended: Any = llama(PROMPT, max_tokens=9, temperature=0.0, stopping_criteria=ends)
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (2, "stop")


def test_log_probabilities_are_those_of_the_rows(make: Any) -> None:
    """Of the prompt's tokens too, where all logits are kept, and rows are the same read one by one or at once."""
    with make(logits_all=True) as llama:
        found: Any = llama(PROMPT, max_tokens=2, temperature=0.0, logprobs=2, echo=True)
        marks = found["choices"][0]["logprobs"]
        tokens = llama.eval_tokens
        rows = llama.logits_to_logprobs(llama._scores)
        assert marks["token_logprobs"][0] is None
        assert marks["token_logprobs"][1:-1] == pytest.approx(
            [float(row[token]) for row, token in zip(rows, list(tokens)[1:], strict=False)], abs=1e-5
        )
        assert all(len(top) >= 2 for top in marks["top_logprobs"][1:])
        assert "".join(marks["tokens"]) == found["choices"][0]["text"]
        assert marks["text_offset"][:2] == [0, len(marks["tokens"][0])]


def test_embeddings_are_one_row_a_text(make: Any) -> None:
    """Of length one where that is asked for, with the tokens counted."""
    with make(embedding=True, pooling_type=1) as llama:
        found = llama.create_embedding(["one text", "another"])
        alone = llama.embed("another", normalize=True)
        assert [row["index"] for row in found["data"]] == [0, 1]
        assert found["usage"]["prompt_tokens"] == sum(len(llama.tokenize(t)) for t in (b"one text", b"another"))
        whole = np.array(found["data"][1]["embedding"])
        assert np.allclose(whole / np.linalg.norm(whole), alone, atol=1e-5)


def test_what_cannot_be_followed_is_refused_by_name(llama: Llama) -> None:
    """Before anything is read, and it is a ValueError where llama_cpp raises one."""
    n_before = llama.session.n_decodes
    wrong: dict[str, Any] = {"mirostat_mode": 2, "suffix": "x"}
    for name, value in wrong.items():
        with pytest.raises(ConfigInvalid, match=name):
            llama(PROMPT, **{name: value})
    with pytest.raises(ConfigInvalid, match="response_format"):
        llama.create_chat_completion([{"role": "user", "content": "x"}], response_format={"type": "xml"})
    with pytest.raises(ValueError, match="exceed context window of 256"):
        llama(list(range(256)))
    with pytest.raises(TypeError, match="pickle save_state"):
        pickle.dumps(llama)
    assert llama.session.n_decodes == n_before


def test_a_vocabulary_alone_reads_and_writes_texts(library: Library, words_model: Path, llama: Llama) -> None:
    """And says of everything else that it has no session."""
    with Llama(words_model, vocab_only=True, library=library) as words:
        text = b"Hello <|im_end|>"
        assert words.tokenize(text, special=True) == llama.tokenize(text, special=True)
        assert words.detokenize(words.tokenize(text)) == text
        assert words.n_vocab() == llama.n_vocab()
        with pytest.raises(ConfigInvalid, match="vocab_only"):
            words.eval([1])


def test_the_program_of_the_page_runs(words_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model, and without trials."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    program = page.split("```py\n")[1].split("```")[0]
    assert program.count('"model.gguf"') == 1
    exec(program.replace('"model.gguf"', f"{str(words_model)!r}, prober=None"), {})  # noqa: S102 - the page's own
    assert len(capsys.readouterr().out.splitlines()) >= 3
