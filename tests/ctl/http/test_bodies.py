"""Bodies of OpenAI's requests, one by one: what is taken, what is refused and by which field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry.sampling import RANDOM_SEED
from splitctl.control.requests import REQUESTS
from splitctl.errors import SplitctlError
from splitctl.host.streams import Done, Why
from splitctl.http import answers, bodies, fields
from splitctl.http.admin import Admin
from splitctl.http.bodies import Asked
from splitctl.http.errors import ApiError, api_error
from splitctl.http.intake import HttpLimits, Intake
from splitctl.ipc.wire import to_object
from splitctl.outcome import SwitchOptions, to_plain
from splitctl.placement import Changes

SAYS = [{"role": "user", "content": "hi"}]


def test_a_plain_chat_is_read() -> None:
    """Messages, their parts and every sampler field arrive as they were sent; what is absent is llama.cpp's default."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": parts}, *SAYS],
        "max_tokens": 9,
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0.5,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 2**32 + 5,
    }
    asked = bodies.chat(body, "served")
    assert asked.request.messages == ({"role": "system", "content": parts}, SAYS[0])
    sampler = asked.request.sampler
    assert (sampler.temp, sampler.top_p, sampler.top_k, sampler.min_p) == (0.0, 1.0, -1, 0.5)
    assert (sampler.repeat_penalty, sampler.repeat_last_n, sampler.stop, sampler.seed) == (1.1, -1, ("x",), 5)
    assert (asked.model, asked.is_stream, asked.with_usage, asked.is_chat) == ("m", True, True, True)
    assert (asked.request.n_predict, asked.n_text_bytes) == (9, 4)
    plain = bodies.chat({"messages": SAYS}, "served")
    assert (plain.model, plain.request.n_predict, plain.request.sampler.seed) == ("served", -1, RANDOM_SEED)


@pytest.mark.parametrize(
    ("given", "n"),
    [
        ({}, -1),
        ({"max_tokens": -1}, -1),
        ({"max_tokens": None, "n_predict": 3}, 3),
        ({"max_tokens": 4, "n_predict": 3}, 4),
        ({"max_completion_tokens": 5, "max_tokens": 4}, 5),
        ({"max_tokens": 0}, 0),
    ],
)
def test_lengths_have_several_names(given: dict[str, Any], n: int) -> None:
    """OpenAI's newest name counts before its older one, and that before llama-server's; -1 and nothing are no limit."""
    assert bodies.chat({"messages": SAYS, **given}, "m").request.n_predict == n


@pytest.mark.parametrize("seed", [None, -1])
def test_no_seed_is_a_random_one(seed: int | None) -> None:
    """Without a seed, and with llama-server's -1, the draw is random."""
    assert bodies.chat({"messages": SAYS, "seed": seed}, "m").request.sampler.seed == RANDOM_SEED


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        ("a", "a", None),
        (["a"], "a", None),
        ([1, 2], None, (1, 2)),
        ([[1, 2]], None, (1, 2)),
        ([1.0, 2], None, (1, 2)),
    ],
)
def test_prompts_are_texts_or_tokens(prompt: Any, text: str | None, tokens: tuple[int, ...] | None) -> None:
    """One text, one list of tokens, or a list that holds one of either."""
    request = bodies.completion({"prompt": prompt}, "m").request
    assert (request.prompt, request.tokens) == (text, tokens)


@pytest.mark.parametrize(
    "prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {}, 5, [-1], [2**31]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    """Several prompts, none, and what is no token are refused."""
    with pytest.raises(ApiError) as refused:
        bodies.completion({"prompt": prompt}, "m")
    assert refused.value.status == 400
    assert refused.value.param in {"prompt", "tokens"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"repeat_last_n": 2**30}, "repeat_last_n"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"model": "x" * 300}, "model"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stream_options": []}, "stream_options"),
        ({"response_format": "json"}, "response_format"),
        ({"grammar": ["root"]}, "grammar"),
        ({"grammar": "x" * ((1 << 20) + 1)}, "grammar"),
        ({"chat_template_kwargs": "{}"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": json.loads("[" * 70 + "]" * 70)}}, "chat_template_kwargs"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"reasoning_effort": False}, "reasoning_effort"),
        ({"samplers": ["top_k", "top_p", "min_p", "temperature"], "repeat_penalty": 1.1}, "samplers"),
        ({"stop": False}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": [None]}, "stop"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"continue_final_message": ""}, "continue_final_message"),
        ({"continue_final_message": "name"}, "continue_final_message"),
        ({"continue_final_message": "reasoning_content"}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "\ud800", "arguments": ""}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "x" * 100, "content": "a"}]}, "messages"),
        ({"messages": SAYS * 5000}, "messages"),
        ({"messages": [5]}, "messages"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(more: dict[str, Any], param: str) -> None:
    """What cannot be honoured, and what would take much memory, is refused with its name."""
    with pytest.raises(ApiError) as refused:
        bodies.chat({"messages": SAYS, **more}, "m")
    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("number", ["8", "8.0", "80e-1"])
def test_whole_numbers_may_have_a_point(number: str) -> None:
    """Clients that know one kind of number send 8.0 for 8; half a token is refused."""
    whole = dict.fromkeys(("max_tokens", "top_k", "repeat_last_n", "seed"), json.loads(number))
    request = bodies.chat({"messages": SAYS, **whole}, "m").request
    sampler = request.sampler
    assert (request.n_predict, sampler.top_k, sampler.repeat_last_n, sampler.seed) == (8, 8, 8, 8)
    assert {type(one) for one in (request.n_predict, sampler.top_k, sampler.repeat_last_n, sampler.seed)} == {int}
    for name in whole:
        for value in (8.5, float("inf"), float("nan"), 1e300, "8"):
            with pytest.raises(ApiError, match=f"^{name} is .*wanted: a whole number from"):
                bodies.chat({"messages": SAYS, name: value}, "m")


@pytest.mark.parametrize(
    ("stop", "read"), [("", ()), ([], ()), ([""], ()), (None, ()), (["", "x"], ("x",)), ("x", ("x",)), (["x"], ("x",))]
)
def test_empty_stop_texts_end_nothing(stop: Any, read: tuple[str, ...]) -> None:
    """As in llama-server: forms of clients hold an empty text for none."""
    assert bodies.chat({"messages": SAYS, "stop": stop}, "m").request.sampler.stop == read


def test_null_is_absent() -> None:
    """Every field of a body and of its message may be null, but for those that it needs."""
    optional = {*fields.CHAT.read, *fields.CHAT.harmless, *fields.CHAT.neutral} - {"messages"}
    said = {**dict.fromkeys(fields.MESSAGE.read | {*fields.MESSAGE.neutral}), **SAYS[0]}
    body = {**dict.fromkeys(optional), "messages": [said], "stream_options": {"include_usage": None}}
    assert bodies.chat(body, "m") == bodies.chat({"messages": SAYS}, "m")
    nothing = dict.fromkeys({*fields.COMPLETION.read, *fields.COMPLETION.neutral} - {"prompt"})
    assert bodies.completion({**nothing, "prompt": "a"}, "m") == bodies.completion({"prompt": "a"}, "m")


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"tool_calls": [{**CALL, "type": None}]}, {"content": "", "tool_calls": [CALL]}),
        (
            {"content": "a", "reasoning_content": "b", "name": "c"},
            {"content": "a", "name": "c", "reasoning_content": "b"},
        ),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "1"}),
        ({"role": "developer", "content": "a"}, {"role": "developer", "content": "a"}),
    ],
)
def test_messages_keep_what_templates_know(message: dict[str, Any], read: dict[str, Any]) -> None:
    """Calls of tools, their results, names and reasoning arrive as they were sent; null content is an empty text."""
    asked = bodies.chat({"messages": [{"role": "assistant", **message}]}, "m")
    assert asked.request.messages == ({"role": "assistant", **read},)


@pytest.mark.parametrize(
    ("more", "kwargs", "goes_on"),
    [
        ({}, None, None),
        ({"chat_template_kwargs": {}, "add_generation_prompt": None, "reasoning_effort": ""}, None, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}, None),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}, {"a": 1, "reasoning_effort": "low"}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}, None),
        ({"continue_final_message": True}, None, "content"),
        (
            {"continue_final_message": "content", "add_generation_prompt": False},
            {"add_generation_prompt": False},
            "content",
        ),
        ({"continue_final_message": False}, None, None),
    ],
)
def test_what_the_template_is_given_is_read(more: dict[str, Any], kwargs: Any, goes_on: str | None) -> None:
    """Variables of the template, how hard to think, and whether the last message goes on."""
    request = bodies.chat({"messages": [*SAYS, {"role": "assistant", "content": "a"}], **more}, "m").request
    assert (request.chat_template_kwargs, request.continue_final_message) == (kwargs, goes_on)


def test_reasoning_goes_on_where_nothing_else_was_said() -> None:
    """As in llama-server: true means the reasoning, if the last message has no content yet."""
    last = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    request = bodies.chat({"messages": [*SAYS, last], "continue_final_message": True}, "m").request
    assert request.continue_final_message == "reasoning_content"


def test_a_deep_list_in_a_field_is_shown_in_short() -> None:
    """A value as deep as JSON is read at all does not stop the refusal of it."""
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(ApiError, match="temperature is"):
        bodies.chat({"messages": SAYS, "temperature": deep}, "m")


@pytest.mark.parametrize(
    ("why", "reason"),
    [(Why.EOS, "stop"), (Why.STOP, "stop"), (Why.LENGTH, "length"), (Why.CONTEXT, "length"), (Why.ERROR, None)],
)
def test_ends_in_openais_words(why: Why, reason: str | None) -> None:
    """Why an answer ended is stop or length, and nothing where it did not end well."""
    assert answers.finish_reason(why) == reason


def test_chunks_are_in_openais_shape() -> None:
    """Chats have messages and deltas, completions texts; counts stand in the last chunk, and nowhere else."""
    done = Done(Why.STOP, n_prompt=5, n_reused=2, n_predicted=3, prompt_ms=10.0, generate_ms=0.0)
    chat = answers.Form("1", "m", 7, is_chat=True, with_usage=True)
    assert chat.first()["choices"][0]["delta"] == {"role": "assistant", "content": ""}  # type: ignore[index]
    assert chat.piece("a")["choices"][0]["delta"] == {"content": "a"}
    assert chat.piece("a")["usage"] is None
    assert (chat.piece("a")["object"], chat.whole("a", done)["object"]) == ("chat.completion.chunk", "chat.completion")
    last = chat.last(done)
    assert (last["choices"][0]["finish_reason"], last["timings"]["prompt_n"]) == ("stop", 3)
    assert last["timings"]["predicted_per_second"] == 0.0
    counts = chat.counts(done)
    assert (counts["choices"], counts["usage"]["total_tokens"]) == ([], 8)
    with_tokens = answers.Form("1", "m", 7, is_chat=True, with_tokens=True)
    assert with_tokens.piece("a", 5)["choices"][0]["tokens"] == [5]
    assert with_tokens.piece("a")["choices"][0]["tokens"] == []
    assert with_tokens.whole("a", done, [5, 6])["choices"][0]["tokens"] == [5, 6]
    plain = answers.Form("1", "m", 7, is_chat=False)
    assert "tokens" not in plain.piece("a", 5)["choices"][0]
    assert plain.first() is None
    assert "usage" not in plain.piece("a")
    assert plain.whole("a", done)["choices"][0]["text"] == "a"


def test_what_is_sent_cannot_break_the_stream() -> None:
    """Line feeds in texts and reasons never end an event early."""
    assert answers.data({"a": "x\n\ny"}).count(b"\n") == 2
    assert answers.comment("a\n\ndata: b\r\r") == b": a data: b\n\n"


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"changes": {"n_ctx": 512.0, "tensor_split": [3.0, 1]}}, {"changes": {"n_ctx": 512, "tensor_split": [3, 1]}}),
        ({"to": "layer", "changes": None, "dry_run": None, "proof": None, "force": None}, {"to": "layer"}),
    ],
)
def test_a_switch_takes_numbers_and_nulls_as_clients_send_them(body: dict[str, Any], same: dict[str, Any]) -> None:
    """512.0 tokens are 512, and null is absent; half a token is refused."""
    assert _made("/split-mode", body) == _made("/split-mode", same)
    assert _made("/split-mode", {"changes": {"n_ctx": 512.5}})["refused"]["param"] == "n_ctx"


def test_a_file_has_a_name_and_nothing_else() -> None:
    """What a client believes that it says beside the name is refused by its name."""
    assert _made("/session/save", {"filename": "a", "id_slot": None}) == _made("/session/save", {"filename": "a"})
    refused = {"status": 400, "param": "id_slot", "code": "unsupported"}
    assert _made("/session/save", {"filename": "a", "id_slot": 0}) == {"refused": refused}


# -- what earlier releases made of bodies ------------------------------------------------------------------------------

KEPT: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "http" / "requests.json").read_text(encoding="utf-8")
)


class Host:
    """Gives back what it is asked."""

    def status(self) -> dict[str, Any]:
        """Serve."""
        return {"state": "serving"}

    async def switch(
        self, changes: Changes, options: SwitchOptions, *, timeout_s: float | None, on_stage: Any
    ) -> dict[str, Any]:
        """Say what was asked."""
        del on_stage
        how = {"proof": options.proof.value, "convert": options.convert, "force": options.force}
        return {"switch": {"changes": changes.to_json(), "timeout_s": timeout_s, **how}}

    async def check(self, changes: Changes, options: SwitchOptions) -> dict[str, Any]:
        """Say what was asked."""
        return {"check": {"changes": changes.to_json(), "convert": options.convert, "force": options.force}}

    async def save(self, path: Path) -> dict[str, Any]:
        """Say what was asked."""
        return {"save": path.name}


class Asking:
    """A request with nothing but a body."""

    def __init__(self, body: Any) -> None:
        self.headers: dict[str, str] = {}
        self._raw = json.dumps(body).encode()

    async def stream(self) -> AsyncIterator[bytes]:
        """Give the body."""
        yield self._raw

    async def receive(self) -> None:
        """Stay connected."""
        await asyncio.Event().wait()


def _plain(asked: Asked) -> Any:
    """Write the request as the control socket does: what is new since stands there where it is no default."""
    request = to_object(asked.request, REQUESTS)
    del request["kind"]
    return {**to_plain(asked), "request": request}


def _made(route: str, body: dict[str, Any]) -> Any:
    admin = Admin(Host(), Intake(HttpLimits()), None, Path("/files"), is_open=True)  # type: ignore[arg-type]
    try:
        match route:
            case "/v1/chat/completions":
                return _plain(bodies.chat(body, "served"))
            case "/v1/completions":
                return _plain(bodies.completion(body, "served"))
        call = admin.switch if route == "/split-mode" else admin.save
        answer = asyncio.run(call(Asking(body)))  # type: ignore[arg-type]
        return json.loads(answer.body)
    except (ApiError, SplitctlError) as error:
        refusal = error if isinstance(error, ApiError) else api_error(error)
        return {"refused": {"status": refusal.status, "param": refusal.param, "code": refusal.code}}


@pytest.mark.parametrize(
    ("route", "case"), [(route, case) for route, cases in KEPT.items() for case in cases], ids=lambda one: str(one)[:80]
)
def test_bodies_are_read_as_ever(route: str, case: dict[str, Any]) -> None:
    """Every known field of a chat, a completion, a switch and a file gives what it always gave."""
    assert _made(route, case["body"]) == case["parsed"]
