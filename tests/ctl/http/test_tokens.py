"""llama-server's /tokenize, /detokenize and /apply-template, on a real model and at their edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitctl.http import HttpConfig
from splitctl.http.intake import HttpLimits
from splitctl.ipc.jobs import Fault, RequestFailed
from tests.ctl.houses import house
from tests.ctl.http_fake import Site, site
from tests.ctl.web import Web, web

HELLO = "What is the capital of France ?"


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Web]:
    """A host of SmolLM2."""
    with house() as home, web(home, "-m", smollm2, "--device", "CPU,CPU", "-c", "512", "-t", "1") as server:
        yield server


@pytest.fixture(scope="module")
def fake() -> Iterator[Site]:
    """A session in which every byte is a token."""
    with site() as served:
        yield served


@pytest.mark.model
def test_texts_become_tokens_and_texts_again(real: Web) -> None:
    """A text comes back from its tokens, and its tokens are those of a prompt; an empty one has none."""
    tokens = real.post("/tokenize", {"content": HELLO}).body["tokens"]
    assert real.post("/detokenize", {"tokens": tokens}).body == {"content": HELLO}
    asked = {"prompt": HELLO, "max_tokens": 1}
    assert real.post("/v1/completions", asked).body["usage"]["prompt_tokens"] == len(tokens)
    assert real.post("/tokenize", {"content": ""}).body == {"tokens": []}
    assert real.post("/detokenize", {"tokens": []}).body == {"content": ""}


@pytest.mark.model
def test_names_of_special_tokens_are_read_unless_that_is_not_wanted(real: Web) -> None:
    """As in llama-server they are tokens by default, and come back by name."""
    (token,) = real.post("/tokenize", {"content": "<|im_start|>"}).body["tokens"]
    assert real.post("/detokenize", {"tokens": [token]}).body == {"content": "<|im_start|>"}
    plain = real.post("/tokenize", {"content": "<|im_start|>", "parse_special": False}).body["tokens"]
    assert len(plain) > 1
    assert real.post("/detokenize", {"tokens": plain}).body == {"content": "<|im_start|>"}


@pytest.mark.model
def test_pieces_are_texts_or_the_bytes_of_half_a_character(real: Web) -> None:
    """Joined they are the text: a piece that is no text is a list of bytes."""
    content = "unicode 媽 and emoji 🤗"
    found = real.post("/tokenize", {"content": content, "with_pieces": True}).body["tokens"]
    assert [one["id"] for one in found] == real.post("/tokenize", {"content": content}).body["tokens"]
    pieces = [one["piece"] for one in found]
    assert {type(one) for one in pieces} == {str, list}
    assert b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in pieces).decode() == content


@pytest.mark.model
def test_a_chat_becomes_the_text_of_its_template(real: Web) -> None:
    """It is what a chat is generated after, field by field."""
    says = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}]
    wanted = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
    assert real.post("/apply-template", {"messages": says}).body == {"prompt": wanted + "<|im_start|>assistant\n"}
    without = {"messages": says, "add_generation_prompt": False}
    assert real.post("/apply-template", without).body == {"prompt": wanted}
    tokens = real.post("/tokenize", {"content": wanted + "<|im_start|>assistant\n"}).body["tokens"]
    answer = real.post("/v1/chat/completions", {"messages": says, "max_tokens": 1}).body
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", b'{"content": "\\ud800"}', "content"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/tokenize", {"content": "a", "special": True}, "special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": 5}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}], "unknown": 1}, "unknown"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fake: Site, path: str, body: object, param: str) -> None:
    """The session never hears of a body that is wrong, of a token that the model has not, or of an unknown field."""
    answer = fake.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_what_the_session_refuses_is_told(fake: Site) -> None:
    """A model without a template, or one that is gone, is an error with its reason."""
    fake.session.error = RequestFailed(Fault.CONFIG, "ChatTemplateFailed", "it has none")
    try:
        answer = fake.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})
    finally:
        fake.session.error = None
    assert (answer.status, answer.error["message"]) == (400, "it has none")


def test_long_texts_are_turned_away() -> None:
    """What is longer than the worker can do between two decodes is refused before it is read."""
    with site(HttpConfig(port=0, limits=HttpLimits(token_body_bytes=100))) as served:
        assert served.post("/tokenize", {"content": "x" * 100}).status == 413
        assert served.post("/tokenize", {"content": "x" * 50}).body == {"tokens": [120] * 50}
