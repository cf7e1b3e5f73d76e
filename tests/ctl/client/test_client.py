"""The clients at the control socket, over hosts that obey the test: what breaks, what comes back, who is let go of."""

from __future__ import annotations

import ast
import asyncio
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import splitctl
from splitctl.client import ClientClosed, Delta, HostBusy, HostParked, HostRefused, Restarted, SwitchStage, blocking
from splitctl.control.server import ControlLimits
from splitctl.errors import Busy, Cancelled, ConfigInvalid, DeadlineExceeded, Parked, Reason, Refused, SplitctlError
from splitctl.outcome import Proof, Route, SwitchOutcome, SwitchStatus
from splitctl.placement import Changes, Placement, SplitMode
from tests.ctl.client.scenes import WAIT_S, line, speaking
from tests.ctl.control_fake import served
from tests.ctl.houses import ROOT

TENSOR = Placement(mode=SplitMode.TENSOR, tensor_split=(3.0, 1.0))
OUTCOME = SwitchOutcome(
    SwitchStatus.FELL_BACK, TENSOR, Placement(), reason="why", reasons=(Reason("a", "b"),), n_sequences=2
)
COME = (
    b'{"event":{"kind":"begun","n_prompt":3,"n_reused":1}}\n'
    b'{"event":{"kind":"delta","text":"\xc3\xa9","token":7,"index":0}}\n'
    b'{"event":{"kind":"of_later","a":1}}\n{"event":{"kind":"delta","text":"","token":8,"index":1}}\n'
)
DONE: dict[str, Any] = {
    "why": "eos", "n_prompt": 3, "n_reused": 1, "n_predicted": 2, "prompt_ms": 1.0, "generate_ms": 2.0, "message": "",
    "fault": None,
}  # fmt: skip
ENDLESS = 1 << 20


def _client(**more: Any) -> splitctl.Client:
    return splitctl.Client("fake", **{"timeout_s": WAIT_S, **more})


def _async_client(**more: Any) -> splitctl.AsyncClient:
    return splitctl.AsyncClient("fake", **{"timeout_s": WAIT_S, **more})


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_an_answer_is_read_as_it_comes_and_whole(runtime: Path) -> None:
    """Deltas are numbered, events of later releases are left out, and the end has text, tokens, counts and reason."""
    with speaking(*[COME + line({"result": DONE})] * 3, runtime=runtime):
        answer = _client().generate("a")
        assert answer.usage is None
        assert list(answer) == [Delta("é", 7, 0), Delta("", 8, 1)]
        assert answer.usage is not None
        assert (answer.usage.n_generated, answer.usage.finish_reason) == (2, "stop")
        assert answer.result().raw == DONE
        kinds = [type(one).__name__ for one in _client().generate([1, 2]).events()]
        assert kinds == ["Begun", "Delta", "Delta"]
        whole = _client().chat([{"role": "user", "content": "hi"}]).result()
        assert (whole.text, whole.tokens, whole.why) == ("é", (7, 8), "eos")


def test_a_switch_gives_its_stages_and_last_its_outcome(runtime: Path) -> None:
    """A fallback is an outcome, equal to the one that the host has; what a later release adds is left out."""
    stage = line({"event": {"kind": "stage", "stage": "saving", "share": 0.5}})
    plain = {**OUTCOME.to_json(), "later": 1}
    with speaking(*[stage + line({"result": plain})] * 2, runtime=runtime):
        switch = _client().switch("tensor")
        assert (switch.raw, list(switch)) == ({}, [SwitchStage("saving", 0.5), OUTCOME])
        assert (switch.raw, switch.result()) == (plain, OUTCOME)

        async def steps() -> list[object]:
            return [one async for one in _async_client().switch(mode="tensor")]

        assert asyncio.run(steps()) == [SwitchStage("saving", 0.5), OUTCOME]


def test_what_is_asked_arrives(runtime: Path) -> None:
    """Words, mappings and plain sequences reach the host as the values that they mean."""
    with served(runtime=runtime) as here:
        client = _client()
        with pytest.raises(splitctl.HostIncompatible, match=r"does not read \(KeyError: 'target'\)"):
            client.check("TENSOR", n_ctx=64, via="in-place")
        answer = client.chat(
            ({"role": "user", "content": "hi"},), n=2, sampler={"temp": 0}, stop="x", template={"a": 1}, continues=True
        )
        assert answer.result().tokens == (7, 7)
        client.generate(range(3), n=0, stop=["a", "b"], sampler=splitctl.SamplerSpec(seed=4, stop="c")).close()
        while len(here.host.calls) < 3:
            client.status()
        (_, check), (_, chat), (_, tokens) = here.host.calls
        assert check["changes"] == Changes(mode=SplitMode.TENSOR, n_ctx=64)
        assert check["options"].via is Route.IN_PLACE
        asked = chat["request"]
        assert (asked.n_predict, asked.sampler.temp, asked.sampler.stop) == (2, 0.0, ("x",))
        assert (asked.chat_template_kwargs, asked.continue_final_message) == ({"a": 1}, "content")
        asked = tokens["request"]
        assert (asked.tokens, asked.n_predict, asked.sampler.seed) == ((0, 1, 2), 0, 4)
        assert asked.sampler.stop == ("a", "b")


WRONG: list[tuple[Callable[[splitctl.Client], Any], str]] = [
    (lambda one: one.switch("sideways"), "one of none layer row tensor"),
    (lambda one: one.switch(), "a mode, a Placement"),
    (lambda one: one.switch("layer", mode="tensor"), "one mode"),
    (lambda one: one.switch(TENSOR, n_ctx=8), "a whole placement alone"),
    (lambda one: one.switch("tensor", n_ctx=-1), "n_ctx is -1"),
    (lambda one: one.switch("tensor", proof="faith"), "one of bytes positions off"),
    (lambda one: one.switch("tensor", force=1), "True or False"),  # type: ignore[arg-type]
    (lambda one: one.switch("tensor", timeout_s="soon"), "seconds"),  # type: ignore[arg-type]
    (lambda one: one.check("tensor", via="moon"), "one of auto beside in-place"),
    (lambda one: one.generate(b"a"), "a text, or a sequence of tokens"),  # type: ignore[arg-type]
    (lambda one: one.generate([]), "at least one"),
    (lambda one: one.generate(["a"]), "whole numbers"),  # type: ignore[list-item]
    (lambda one: one.generate(7), "a text, or tokens"),  # type: ignore[arg-type]
    (lambda one: one.generate("a", n=1.5), "a whole number"),  # type: ignore[arg-type]
    (lambda one: one.generate("a", sampler={"tempature": 1}), "temp top_k"),
    (lambda one: one.generate("a", sampler=0.5), "a SamplerSpec"),  # type: ignore[arg-type]
    (lambda one: one.generate("a", stop=""), "not empty"),
    (lambda one: one.generate("a", wait_s=-1), "seconds"),
    (lambda one: one.chat({"role": "user"}), "a sequence of messages"),  # type: ignore[arg-type]
    (lambda one: one.chat([]), "at least one"),
    (lambda one: one.policy("always"), "auto or off"),
    (lambda one: one.save(""), "the path of a file"),
    (lambda one: one.chat([{"role": "user", "content": "a"}], template="x"), "by name"),  # type: ignore[arg-type]
    (lambda _: splitctl.Client(on_restart=5), "a function of a Restarted"),  # type: ignore[arg-type]
    (lambda _: splitctl.Client(url="http://a", api_key=7), "printable ASCII"),  # type: ignore[arg-type]
    (lambda _: splitctl.Client("a/b"), "letters, digits"),
    (lambda _: splitctl.Client(7), "a session's name"),  # type: ignore[arg-type]
    (lambda _: splitctl.Client("http://a"), "url='http://a'"),
    (lambda _: splitctl.Client("a", url="http://a"), "either a name or a url"),
    (lambda _: splitctl.Client(api_key="k"), "none without a url"),
    (lambda _: splitctl.Client(timeout_s=None), "seconds"),  # type: ignore[arg-type]
    (lambda _: splitctl.Client(url="ftp://a"), "http://HOST:PORT"),
    (lambda _: splitctl.Client(url="http://u:p@a"), "http://HOST:PORT"),
    (lambda _: splitctl.Client(url="http://a:99999"), "http://HOST:PORT"),
    (lambda _: splitctl.Client(url="http://a", api_key="é"), "printable ASCII"),
]


@pytest.mark.parametrize(("call", "wanted"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_refused_before_anything_is_sent(call: Callable[[Any], Any], wanted: str) -> None:
    """The error says what is wanted; nobody serves, so nothing else could say it."""
    with pytest.raises(ConfigInvalid) as caught:
        call(splitctl.Client("nobody"))
    assert wanted in str(caught.value)


# -- what the host refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "own"),
    [
        (Busy("a switch to tensor"), HostBusy, Busy),
        (Parked(Path("/a b; c")), HostParked, Parked),
        (Parked(None, "no room"), HostParked, Parked),
        (Refused([Reason("c", "t")]), HostRefused, Refused),
    ],
)
def test_a_refusal_is_the_error_of_a_session_here(
    runtime: Path, error: SplitctlError, kind: type[SplitctlError], own: type[SplitctlError]
) -> None:
    """A program that knows a session's errors needs no others, and what the host said is there, also after a pickle."""
    with served(runtime=runtime) as here:
        here.call(lambda: setattr(here.host, "error", error))
        for call in (lambda: _client().save("x"), lambda: asyncio.run(_async_client().save("x"))):
            with pytest.raises(own) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
            assert type(again) is type(caught.value) is kind
            assert isinstance(caught.value, splitctl.RequestFailed)
            assert str(again) == str(caught.value)
            for name in ("what", "path"):
                assert getattr(again, name, None) == getattr(error, name, None)
        assert "restore('/a b; c')" in str(caught.value) or "/a b" not in str(error)


def test_a_host_of_another_release_is_told_with_the_next_step(runtime: Path) -> None:
    """A request that the host cannot read, and an answer that we cannot, are one error, with the session's name."""
    old = {"fault": "config", "kind": "MessageInvalid", "message": "'via' of the message is ...", "body": {}}
    with speaking(line({"error": old}), line({"result": {"state": 1}}), b"\x00\n", runtime=runtime):
        with pytest.raises(splitctl.HostIncompatible, match=r"session fake does not take the request .'via'.*serve"):
            _client().switch("tensor", via="beside").result()
        with pytest.raises(splitctl.HostIncompatible, match="'name'"):
            _client().status()
        with pytest.raises(splitctl.HostGone, match="no answer"):
            _client().status()


# -- what breaks -------------------------------------------------------------------------------------------------------


def test_an_answer_that_breaks_off_says_how_much_had_come(runtime: Path) -> None:
    """A host that ends, and one that says why it cannot go on, leave text and tokens in the error."""
    stopped = line({"result": {**DONE, "why": "error", "message": "the session is being stopped"}})
    unusable = line({"result": {**DONE, "why": "error", "message": "no such role", "fault": "config"}})
    full = line({"result": {**DONE, "why": "context", "n_predicted": 0}})
    with speaking(COME, COME + stopped, b"", COME, unusable, full, runtime=runtime):
        answer = _client().generate("a")
        assert next(answer) == Delta("é", 7, 0)
        with pytest.raises(splitctl.AnswerBroken, match="after 2 tokens: its host hung up") as caught:
            list(answer)
        assert (caught.value.text, caught.value.tokens) == ("é", (7, 8))
        assert list(answer) == []
        with pytest.raises(splitctl.AnswerBroken):
            answer.result()
        with pytest.raises(splitctl.AnswerBroken, match="after 2 tokens: the session is being stopped"):
            _client().generate("a").result()
        with pytest.raises(splitctl.AnswerBroken, match="after 0 tokens"):
            _client().generate("a").result()
        with pytest.raises(splitctl.AnswerBroken, match="after 2 tokens"):
            asyncio.run(_async_client().generate("a").result())
        for said in ("no such role", "no room for its prompt of 3 tokens"):
            with pytest.raises(splitctl.RequestFailed, match=said):
                _client().generate("a").result()


def test_a_host_that_hangs_is_left_and_one_that_works_is_waited_for(runtime: Path) -> None:
    """Who is silent is asked how it is: without an answer it is left, with one the wait goes on, up to its limit."""
    with speaking(runtime=runtime):
        client, other = _client(timeout_s=0.2), _async_client(timeout_s=0.2)
        for one in (client, other):
            one._target.silence_s = 0.05
        with pytest.raises(splitctl.HostGone, match=r"was silent for 0\.05 s"):
            client.save("x")
        with pytest.raises(splitctl.HostGone, match=r"was silent for 0\.05 s"):
            asyncio.run(other.save("x"))
        with pytest.raises(DeadlineExceeded, match=r"the status did not come within 0\.2 s"):
            client.status()
        with pytest.raises(DeadlineExceeded, match=r"the save did not come within 0\.01 s"):
            asyncio.run(other.save("x", wait_s=0.01))
    with served(runtime=runtime) as here, ThreadPoolExecutor(1) as pool:
        held = here.host.held = asyncio.Event()
        n_asked = threading.Semaphore(0)
        plain, status = {"path": "/x", "bytes": 5, "sequences": 1, "tokens": 2}, here.host.status
        save = here.host.save
        here.host.status = lambda: n_asked.release() or status()  # type: ignore[method-assign,func-returns-value]

        async def answer(path: Path) -> dict[str, Any]:
            await save(path)
            return plain

        here.host.save = answer  # type: ignore[method-assign]
        client = _client()
        client._target.silence_s = 0.05
        saving = pool.submit(client.save, "x")
        for _ in range(3):
            assert n_asked.acquire(timeout=WAIT_S)
        here.call(held.set)
        assert saving.result(WAIT_S).n_tokens == 2


# -- who is let go of --------------------------------------------------------------------------------------------------


def _leave_dropped(client: splitctl.Client, _: pytest.MonkeyPatch) -> None:
    assert next(client.generate("a", n=ENDLESS)).token == 7


def _leave_closed(client: splitctl.Client, _: pytest.MonkeyPatch) -> None:
    with client.generate("a", n=ENDLESS) as answer:
        assert next(answer).token == 7
    with pytest.raises(splitctl.AnswerBroken, match="was cancelled"):
        answer.result()


def _leave_cancelled(client: splitctl.Client, _: pytest.MonkeyPatch) -> None:
    answer = client.generate("a", n=ENDLESS)
    next(answer)
    answer.cancel()
    assert answer.result().why == "cancelled"


def _leave_interrupted(client: splitctl.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = client.generate("a", n=ENDLESS)
    next(answer)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(blocking, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer.result()
    # It is still in our hands, and the host knows all the same.
    monkeypatch.undo()


def _leave_task(_: splitctl.Client, __: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with _async_client() as client:
            began: asyncio.Event = asyncio.Event()

            async def read() -> None:
                async for _ in client.generate("a", n=ENDLESS):
                    began.set()

            reading = asyncio.create_task(read())
            await began.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(main())


def _leave_async_cancelled(_: splitctl.Client, __: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        answer = _async_client().generate("a", n=ENDLESS)
        await anext(answer)
        await answer.cancel()
        return (await answer.result()).why

    assert asyncio.run(main()) == "cancelled"


def _leave_async_closed(_: splitctl.Client, __: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client = _async_client()
        answer = client.generate("a", n=ENDLESS)
        await anext(answer)
        reading = asyncio.create_task(answer.result())
        await anext(client.generate("b", n=1))
        client.close()
        with pytest.raises(splitctl.AnswerBroken, match="was cancelled"):
            await reading

    asyncio.run(main())


@pytest.mark.parametrize(
    "leave",
    [
        _leave_dropped, _leave_closed, _leave_cancelled, _leave_interrupted, _leave_task, _leave_async_cancelled,
        _leave_async_closed,
    ],
)  # fmt: skip
def test_the_host_stops_generating_for_whoever_leaves(
    leave: Callable[[splitctl.Client, pytest.MonkeyPatch], None], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is dropped, closed, cancelled or interrupted ends at the host, whichever way it was left."""
    with served(runtime=runtime) as here:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        leave(_client(), monkeypatch)
        assert here.host.ended.wait(WAIT_S)
        while here.call(lambda: here.server.n_connections):
            continue


def test_a_client_that_does_not_read_holds_the_stream_up_and_not_its_memory(runtime: Path) -> None:
    """The host gives a slow reader up before it has drawn much, and the reader learns after which token."""
    piece = 10_000
    with served(ControlLimits(write_s=0.2), runtime=runtime) as here:
        here.call(lambda: setattr(here.host, "piece", piece))
        answer = _client().generate("a", n=ENDLESS)
        next(answer)
        assert here.host.ended.wait(WAIT_S)
        assert here.host.n_drawn * piece < 8 << 20
        with pytest.raises(splitctl.AnswerBroken) as caught:
            answer.result()
        assert 0 < len(caught.value.tokens) <= here.host.n_drawn

    # A host of its own: the end of the first stream may be told twice.
    with served(ControlLimits(write_s=0.2), runtime=runtime) as here:
        here.call(lambda: setattr(here.host, "piece", piece))

        async def slow() -> None:
            reading = _async_client().generate("a", n=ENDLESS)
            await anext(reading)
            assert await asyncio.to_thread(here.host.ended.wait, WAIT_S)
            with pytest.raises(splitctl.AnswerBroken):
                await reading.result()

        asyncio.run(slow())
        assert here.host.n_drawn * piece < 8 << 20


def test_one_client_serves_several_threads(runtime: Path) -> None:
    """Answers of four threads do not mix; closing the client ends what another thread waits for."""
    with served(runtime=runtime) as here, ThreadPoolExecutor(4) as pool:
        client = _client()
        counts = [3, 50, 7, 200] * 3
        answers = list(pool.map(lambda n: client.generate("a", n=n).result(), counts))
        assert [len(one.tokens) for one in answers] == counts
        here.host.held = asyncio.Event()
        waiting = pool.submit(client.save, "x")
        assert here.host.at_work.get(timeout=WAIT_S) == "began"
        client.close()
        with pytest.raises(Cancelled, match="the save was cancelled"):
            waiting.result(WAIT_S)
        with pytest.raises(ClientClosed, match="connect again"):
            client.status()
        here.call(here.host.held.set)


# -- a host that comes back --------------------------------------------------------------------------------------------


def test_a_restarted_host_is_found_and_told(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the name is counted and told once; while there is none the request looks for it."""
    told: queue.SimpleQueue[Restarted] = queue.SimpleQueue()
    with ExitStack() as second, ExitStack() as third:
        with served(runtime=runtime):
            client = splitctl.connect("fake", timeout_s=WAIT_S, reconnect_s=WAIT_S, on_restart=told.put)
            other = _async_client(reconnect_s=WAIT_S)
            assert asyncio.run(other.status()).state == client.status().state == "serving"
            assert (client.n_restarts, other.n_restarts) == (0, 0)
        looks: list[float] = []

        def look(seconds: float) -> None:
            # Time passes: the host comes back at the second look.
            looks.append(seconds)
            if len(looks) == 2:
                second.enter_context(served(runtime=runtime))

        monkeypatch.setattr(blocking.time, "sleep", look)
        with pytest.raises(DeadlineExceeded, match="the answer did not come within 0 s"):
            client.generate("a", wait_s=0.0).result()
        assert client.generate("a", n=2).result().tokens == (7, 7)
        assert len(looks) == 2
        assert (client.n_restarts, told.get_nowait(), told.empty()) == (1, Restarted("fake", 1), True)
        assert client.status().name == "fake"
        assert client.n_restarts == 1
        assert asyncio.run(other.generate("a", n=2).result()).tokens == (7, 7)
        assert other.n_restarts == 1
        second.close()
        third.enter_context(served(runtime=runtime))
        client.status()
        assert told.get_nowait() == Restarted("fake", 2)


def test_a_session_that_nobody_serves_is_no_session(runtime: Path) -> None:
    """Without a host, after the end of one that is not waited for, and after a stop, the error says what to start."""
    with pytest.raises(splitctl.NoSuchSession, match="splitctl serve"):
        splitctl.connect()
    with served(runtime=runtime):
        client = splitctl.connect(reconnect_s=0.0)
        stopped = splitctl.connect(reconnect_s=WAIT_S)
        assert (client.name, stopped.stop().path) == ("fake", None)
    for one in (client, stopped):
        with pytest.raises(splitctl.NoSuchSession, match="no session fake"):
            one.status()


def test_proofs_and_routes_are_words_too() -> None:
    """Every word of an enum is taken, in any case."""
    from splitctl.client.asks import word  # noqa: PLC0415 - this test alone

    assert [word("proof", one.value.upper(), Proof) for one in Proof] == list(Proof)
    assert [word("via", one, Route) for one in Route] == list(Route)


def test_a_typed_program_uses_every_public_name() -> None:
    """`ci/check` has mypy read it, strictly."""
    program = ast.parse(Path(__file__).with_name("hosted_program.py").read_text("utf-8"))
    used = {node.attr for node in ast.walk(program) if isinstance(node, ast.Attribute)}
    assert sorted(set(splitctl.client.__all__) - used) == []
    assert "tests/ctl/client/hosted_program.py" in (ROOT / "ci" / "check").read_text("utf-8")
