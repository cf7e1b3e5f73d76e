"""`splitctl.compat.llama_cpp.Llama` on a real build: one object for most of them."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_native import Library, Model, ModelParams
from splitctl.compat.llama_cpp import Llama, LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from splitctl.compat.llama_cpp.json_schema import to_gbnf
from splitctl.compat.llama_cpp.sampling import Sampling
from splitctl.errors import Busy, ConfigInvalid
from splitctl.placement import SplitMode
from tests.real.conftest import DEVICES, RPC
from tools.check_compat import with_words

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


@pytest.mark.skipif(bool(RPC), reason="the page names processors, and stock builds die in tensor mode on two of them")
def test_the_program_of_the_page_runs(words_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model, and without trials."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    program = page.split("```py\n")[1].split("```")[0]
    assert program.count('"model.gguf"') == 1
    exec(program.replace('"model.gguf"', f"{str(words_model)!r}, prober=None"), {})  # noqa: S102 - the page's own
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_an_answer_that_lost_the_sequence_says_so(llama: Llama) -> None:
    """It goes on with no other answer's tokens; whole answers of several threads wait for each other."""
    first: Any = llama(PROMPT, max_tokens=9, temperature=0.0, stream=True)
    next(first)
    expected: Any = llama(PROMPT, max_tokens=4, temperature=0.0)
    with pytest.raises(Busy, match="taken the sequence"):
        next(first)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(llama(PROMPT, max_tokens=4, temperature=0.0))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one["choices"] for one in found] == [expected["choices"]] * 3


def test_the_collector_may_drop_one_within_a_call(make: Any, library: Library) -> None:
    """It calls nothing then, for that call has the lock; what it held is freed later."""
    held = [make(n_ctx=32)]
    with library.calling(), pytest.warns(ResourceWarning, match="was not closed"):
        held.clear()
    gc.collect()


def test_rows_are_those_of_the_tokens_that_are_held(make: Any) -> None:
    """Also in a larger context than before, and after a state without rows."""
    with make(logits_all=True) as llama:
        llama.eval([5, 6, 7])
        with make() as other:
            other.eval([5, 6, 8, 9])
            llama.load_state(other.save_state())
        assert not llama.scores[:3].any()
        assert llama.switch(n_ctx=512).status.value == "switched"
        llama.reset()
        llama.eval([5] * 260)
        assert llama.scores.shape[0] == 512
        assert llama.scores[259].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"), ("temperature", float("nan")), ("typical_p", None), ("frequency_penalty", float("nan")),
        ("presence_penalty", -1e308), ("seed", "7"), ("max_tokens", 2.5), ("stop", [""]), ("stop", 5), ("logprobs", -1),
        ("logit_bias", {"a": 1}), ("logit_bias", {10**9: 1}), ("logit_bias", {5: float("inf")}), ("grammar", "x"),
        ("logits_processor", 5), ("stopping_criteria", [5]),
    ],
)  # fmt: skip
def test_a_stream_refuses_wrong_arguments_at_once(llama: Llama, name: str, value: Any) -> None:
    """By their names, as a ValueError, and before its first chunk."""
    with pytest.raises(ValueError, match=f"^{name}"):
        llama(PROMPT, stream=True, **{name: value})


# ---- schemas ----

_TEXT = st.text('abc "\\/', max_size=3)
_COUNT, _WHOLE = st.integers(0, 4), st.integers(-300, 12000)
_VALUES = st.one_of(_TEXT, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none())


def _with_some(base: dict[str, Any], **optional: Any) -> Any:
    return st.fixed_dictionaries({name: st.just(value) for name, value in base.items()}, optional=optional)


_LEAVES = st.one_of(
    st.sampled_from(["null", "boolean", "number", "string", "integer"]).map(lambda kind: {"type": kind}),
    _with_some({"type": "string"}, minLength=_COUNT, maxLength=st.integers(3, 6)),
    _with_some({"type": ["integer", "null"]}, minimum=_WHOLE, maximum=_WHOLE, exclusiveMinimum=_WHOLE),
    st.fixed_dictionaries(
        {"enum": st.lists(_VALUES, min_size=1, max_size=4)}, optional={"type": st.sampled_from(["string", "integer"])}
    ),
    st.sampled_from([{}, {"$ref": "#/$defs/d"}, {"type": "string", "format": "date-time"}]),
)


def _around(inner: Any) -> Any:
    names = st.sampled_from(["a", "b", 'c"'])
    properties, several = st.dictionaries(names, inner, max_size=3), st.lists(inner, min_size=1, max_size=2)
    required, others = st.lists(names, max_size=2, unique=True), st.one_of(st.booleans(), inner)
    return st.one_of(
        _with_some({"type": "object"}, properties=properties, required=required, additionalProperties=others),
        _with_some({"type": "array"}, items=inner, minItems=_COUNT, maxItems=st.integers(2, 4)),
        st.fixed_dictionaries({"prefixItems": several}),
        st.fixed_dictionaries({"anyOf": several}, optional={"properties": properties}),
        st.fixed_dictionaries({"allOf": several}),
    )


_SCHEMAS = st.recursive(_LEAVES, _around, max_leaves=8)
_DEFINED = st.recursive(_LEAVES.filter(lambda one: "$ref" not in one), _around, max_leaves=3).filter(
    lambda one: "$ref" not in json.dumps(one)
)


@pytest.fixture(scope="module")
def letters(library: Library, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A vocabulary of single letters."""
    path = with_words(small_model, tmp_path_factory.mktemp("letters") / "letters.gguf")
    with Model.load(library, path, ModelParams(vocab_only=True)) as model:
        yield model


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(schema=_SCHEMAS, defined=_DEFINED, seed=st.integers(0, 99))
def test_any_answer_by_a_schema_is_valid_by_it(letters: Model, schema: Any, defined: Any, seed: int) -> None:
    """Drawn at random by the library's own sampler of grammars; what a grammar cannot hold was refused before."""
    schema = {**schema, "$defs": {"d": defined}}
    try:
        grammar = to_gbnf(schema)
    except ConfigInvalid:
        return
    random = np.random.default_rng(seed)
    ends = [letters.tokenize(one, add_special=False)[-1] for one in '"}]'] + [letters.token_eos]
    mute = [one for one in range(letters.n_vocab) if not letters.piece(one) and not letters.is_eog(one)]
    text, token = b"", -1
    with closing(Sampling(temp=0.0, grammar=grammar).sampler(letters, seed=1, last_n=0)) as sampler:
        for step in range(1500):
            row = random.standard_normal(letters.n_vocab).astype(np.float32) * 3
            row[mute] = -np.inf
            row[ends] += 0.1 * step  # so that it ends
            token = sampler.sample(row, letters, [])
            if letters.is_eog(token):
                break
            text += letters.piece(token)
    assert letters.is_eog(token)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
