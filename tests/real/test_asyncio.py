"""A session for asyncio on a real build: answers in turn, switches between their steps, cancels that leave nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl import (
    AsyncSession,
    AsyncTextStream,
    Busy,
    Cancelled,
    ConfigInvalid,
    Parked,
    SamplerSpec,
    Session,
    SplitMode,
    Stage,
)
from splitctl.session import asynchronous
from tests.real.conftest import base
from tools import greedy_gaps

GREEDY = SamplerSpec(temp=0.0)
PROMPTS = [f"Task {number} begins with a few words of its own" for number in range(8)]
N = 24
GUARD_S = 60.0

Play = Callable[[Callable[[AsyncSession], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that have called the library."""
    found: set[int] = set()
    calling = Library.calling

    @contextmanager
    def noted(self: Library) -> Iterator[tuple[Any, Any]]:
        found.add(threading.get_ident())
        with calling(self) as called:
            yield called

    monkeypatch.setattr(Library, "calling", noted)
    return found


@pytest.fixture
def play(library: Library, words_model: Path) -> Play:
    """Play a scene with a session of four sequences, which is closed after it."""

    def played(scene: Callable[[AsyncSession], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            placement = base(n_ctx=1024, n_batch=8, n_ubatch=8, n_seq_max=4, kv_unified=True, flash="on")
            async with await AsyncSession.open(words_model, placement, library=library, prober=None) as session:
                await scene(session)

        asyncio.run(whole())

    return played


async def pieces_of(stream: AsyncTextStream, n: int) -> None:
    """Read so many pieces."""
    for _ in range(n):
        await anext(stream)


async def read(stream: AsyncTextStream, waits: asyncio.Event) -> str:
    """Read an answer to its end, after saying so."""
    waits.set()
    return await stream.read()


def test_eight_tasks_go_on_through_two_switches_and_three_cancels(
    play: Play, callers: set[int], other_mode: SplitMode, library: Library, words_model: Path
) -> None:
    """Each text is right to a fresh context; what was cancelled is gone, and the loop never calls the library."""
    texts: list[tuple[list[int], int]] = []

    async def scene(session: AsyncSession) -> None:
        held = await session.tokenize("What sequence 3 holds")
        await session.feed(held, 3)
        callers.clear()
        reached, switched = asyncio.Event(), asyncio.Event()

        async def task(prompt: str) -> None:
            async with session.text(prompt, n=N, sampler=GREEDY) as stream:
                await pieces_of(stream, 3)
                reached.set()
                await stream.read()
            tokens = await session.tokenize(prompt)
            texts.append(([*tokens, *stream.tokens], len(tokens)))

        async def cancelled(seq_id: int | None) -> None:
            stream = session.text([*held, *held], n=400, sampler=GREEDY, seq_id=seq_id)
            async with stream:
                await pieces_of(stream, 2)
                await switched.wait()
                await stream.read()

        async def switches() -> None:
            await reached.wait()
            outcome = await session.switch(other_mode.value)
            assert (outcome.status.value, session.placement.mode) == ("switched", other_mode)
            switched.set()
            assert (await session.switch(mode="layer")).status.value == "switched"

        lost = [asyncio.ensure_future(cancelled(seq_id)) for seq_id in (3, None, None)]
        whole = [asyncio.ensure_future(task(prompt)) for prompt in PROMPTS]
        both = asyncio.ensure_future(switches())
        await switched.wait()
        for one in lost:
            one.cancel()
        await asyncio.gather(*whole)
        assert [type(one) for one in await asyncio.gather(*lost, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3
        await both
        assert callers
        assert threading.get_ident() not in callers

    play(scene)
    assert [len(tokens) - n for tokens, n in texts] == [N] * len(PROMPTS)
    # Batches of other sizes and modes add floats in other orders: a near tie may fall the other way.
    gaps = greedy_gaps.measure(library.path, words_model, texts, always_control=False)
    assert [one.fault for one in gaps if not one.is_right] == []


def test_a_cancelled_answer_takes_back_what_it_added(play: Play) -> None:
    """Its sequence holds what the prompt had in common with it, as the state of a session that never answered."""

    async def scene(session: AsyncSession) -> None:
        held = await session.tokenize("What the sequence holds before")
        await session.feed(held, 1)
        before = await session.state_bytes(bare=True)
        more = [*held, *await session.tokenize("and a question")]
        for end in ("cancel", "close", "drop"):
            stream: AsyncTextStream | None = session.text(more, n=300, sampler=GREEDY, seq_id=1)
            assert stream is not None
            await pieces_of(stream, 2)
            if end == "close":
                await stream.aclose()
            elif end == "drop":
                stream = None
                gc.collect()
            else:
                waits = asyncio.Event()
                reading = asyncio.ensure_future(read(stream, waits))
                await waits.wait()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            # It waits for the sequence.
            assert (await session.text(held, n=0, seq_id=1).read()) == ""
            assert await session.run(lambda one: one.tokens(1)) == held
            assert await session.state_bytes(bare=True) == before

    play(scene)


def test_an_answer_that_nobody_reads_waits_and_holds_up_nobody(play: Play) -> None:
    """It stops after a few pieces; its rest is what it would have been."""

    async def scene(session: AsyncSession) -> None:
        slow = session.text(PROMPTS[0], n=40, sampler=GREEDY)
        await anext(slow)
        others = [session.text(prompt, n=40, sampler=GREEDY) for prompt in PROMPTS[1:7]]
        texts = await asyncio.gather(*[one.read() for one in others])
        assert all(texts)
        assert [one.usage and one.usage.n_generated for one in others] == [40] * 6
        assert slow.usage is None
        assert len(slow.tokens) < 40
        assert len(slow._answer.pieces) == asynchronous.MOST_UNREAD
        with pytest.raises(Busy, match="1 answers"):
            await session.load_state_bytes(await session.state_bytes())
        rest = await slow.read()
        assert slow.text.endswith(rest)
        again = await session.text(PROMPTS[0], n=40, sampler=GREEDY).read()
        assert slow.text == again

    play(scene)


def test_a_session_that_is_dropped_is_closed_by_its_thread(library: Library, words_model: Path) -> None:
    """And says so."""
    session = Session.open(words_model, base(), library=library, prober=None)
    served = AsyncSession(session)
    thread = served._worker.thread
    with pytest.warns(ResourceWarning, match="was not closed"):
        del served
    thread.join(GUARD_S)
    assert session.stage is Stage.CLOSED


def test_the_end_of_a_session_ends_its_answers(play: Play) -> None:
    """Who reads one gets Parked, as does who asks for more; errors of arguments come with the first piece."""

    async def scene(session: AsyncSession) -> None:
        with pytest.raises(ConfigInvalid, match="a whole number"):
            await session.text("x", n="many").read()  # type: ignore[arg-type]
        with pytest.raises(ConfigInvalid, match="0 to 3"):
            await session.text("x", seq_id=9).read()
        reading = session.text(PROMPTS[0], n=900, sampler=GREEDY)
        await anext(reading)
        closing: AbstractContextManager[Any] = pytest.raises(Parked, match="the session is closed")
        await session.close()
        with closing:
            await reading.read()
        with closing:
            await session.chat([{"role": "user", "content": "Hello"}]).read()
        with closing:
            await session.tokenize("x")
        # Left by `async with` as well: nothing waits for a thread that has ended.
        asked = session.text(PROMPTS[0])
        for _ in range(2):
            with closing:
                async with asked:
                    await anext(asked)

    play(scene)


def test_an_answer_that_is_closed_in_its_last_step_is_taken_back(play: Play) -> None:
    """It was cancelled before anybody could know that it had ended; one that fails in that step is no other."""

    async def scene(session: AsyncSession) -> None:
        loop = asyncio.get_running_loop()
        held = await session.tokenize("What the sequence holds before")
        await session.feed(held, 1)
        before = await session.state_bytes(bare=True)
        for fails in (False, True):
            is_drawing, goes_on = asyncio.Event(), threading.Event()

            def drawing(
                _tokens: object, _row: object, told: asyncio.Event = is_drawing, fails: bool = fails,
                go: threading.Event = goes_on,
            ) -> None:  # fmt: skip
                loop.call_soon_threadsafe(told.set)
                go.wait(GUARD_S)
                if fails:
                    raise KeyError("mine")

            stream = session.text([*held, *held], n=1, seq_id=1, processors=[drawing])
            reading = asyncio.ensure_future(stream.read())
            await is_drawing.wait()
            closing = asyncio.ensure_future(stream.aclose())
            loop.call_soon(goes_on.set)
            await closing
            with pytest.raises(Cancelled):
                await reading
            assert await session.state_bytes(bare=True) == before

    play(scene)


def test_whatever_ends_a_call_leaves_the_thread(play: Play) -> None:
    """Errors that end threads and iterators, and a sequence that is none: who waits gets them, and others go on."""

    def raises(error: BaseException) -> Callable[..., Any]:
        def raised(*_: object) -> None:
            raise error

        return raised

    async def scene(session: AsyncSession) -> None:
        for error, kind in ((SystemExit(3), SystemExit), (StopIteration(), RuntimeError), (KeyError(), KeyError)):
            with pytest.raises(kind):
                await session.run(raises(error))
            with pytest.raises(kind):
                await session.text("x", processors=[raises(error)]).read()
        with pytest.raises(RuntimeError, match="StopAsyncIteration"):
            await session.text("x", processors=[raises(StopAsyncIteration())]).read()
        for wrong in ([1], "1", False, -1, 1.5):
            with pytest.raises(ConfigInvalid, match="0 to 3"):
                await session.text("x", seq_id=wrong).read()  # type: ignore[arg-type]
            with pytest.raises(ConfigInvalid, match="0 to 3"):
                await session.feed([1], wrong)  # type: ignore[arg-type]
        assert await session.text("x", n=1, seq_id=0).read() is not None

    play(scene)


def test_two_tasks_may_read_one_answer(play: Play) -> None:
    """Each piece goes to one of them, and the end to both."""

    async def scene(session: AsyncSession) -> None:
        stream = session.text(PROMPTS[0], n=N, sampler=GREEDY)
        pieces: list[str] = []

        async def reads() -> None:
            async for piece in stream:
                pieces.append(piece)  # noqa: PERF401 - both add to it, in the order of the pieces

        await asyncio.gather(reads(), reads())
        assert "".join(pieces) == stream.text == await session.text(PROMPTS[0], n=N, sampler=GREEDY).read()

    play(scene)


def test_a_session_that_nobody_waits_for_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load is ended early, also by the end of the loop; one that has opened is not closed by the loop's thread."""
    closed_by: list[threading.Thread] = []
    is_opening, is_closed = threading.Event(), threading.Event()

    class Opened:
        def close(self) -> None:
            closed_by.append(threading.current_thread())
            is_closed.set()

    def opened(*_: object, cancel: threading.Event) -> Opened:
        is_opening.set()
        assert cancel.wait(GUARD_S)
        return Opened()

    monkeypatch.setattr(Session, "open", opened)

    async def main() -> None:
        opening = asyncio.ensure_future(AsyncSession.open("model.gguf"))
        await asyncio.to_thread(is_opening.wait, GUARD_S)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(main())
    assert is_closed.wait(GUARD_S)
    assert closed_by != [threading.current_thread()]
