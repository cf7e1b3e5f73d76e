"""A session for asyncio: one thread does its work, step by step, and the event loop waits for nothing else.

Laws:
    1. Only the thread, and that of a switch, call the session; the loop takes a lock that is never held over a call.
    2. Everything under way has its turn after the others: an answer one decode, another call as a whole.
    3. An answer that nobody reads stops after a few pieces, and holds up nobody.
    4. An answer that is cancelled takes back what it added to its sequence, which is free for others after that.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import common
from splitctl.errors import Busy, Cancelled, ContextFull, Parked
from splitctl.placement import whole
from splitctl.session import arguments
from splitctl.session.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from splitctl.engine.sampler import LogitsProcessor
    from splitctl.ipc.stop_texts import Usage
    from splitctl.model.chat_messages import Message
    from splitctl.outcome import SwitchOutcome
    from splitctl.placement import Placement, SplitMode
    from splitctl.session.storage import Restored
    from splitctl.session.texts import Fed, TextStream

T = TypeVar("T")

#: Pieces of an answer that wait for its reader before it stops.
MOST_UNREAD = 16


class _Waiter:
    """Somebody on an event loop who waits for the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def settle(self, result: Any = None, error: BaseException | None = None) -> None:
        """Give it the result; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # its loop is closed: nobody is there any more
            return

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if isinstance(error, StopIteration):
            # A future takes none: who awaits it would seem to have ended.
            self.future.set_exception(RuntimeError("what was to be done raised StopIteration"))
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Call:
    """One call, done as a whole."""

    def __init__(self, work: Callable[[], Any], waiter: _Waiter) -> None:
        self._work = work
        self._waiter = waiter

    @property
    def is_ready(self) -> bool:
        return True

    def step(self) -> bool:
        """Do it, unless nobody waits for it any more; says that it is over."""
        if self._waiter.future.cancelled():
            return True
        try:
            self._waiter.settle(self._work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it, and the thread goes on
            self._waiter.settle(error=error)
        return True

    def end(self, error: BaseException) -> None:
        """Say that it will not be done."""
        self._waiter.settle(error=error)


class _Answer:
    """An answer under way: what the thread and its reader share. The worker's lock guards what is not its stream."""

    def __init__(self, worker: _Worker, make: Callable[[int], TextStream], seq_id: int | None) -> None:
        self.worker = worker
        self._make = make
        self.wanted = seq_id
        self.stream: TextStream | None = None
        self.pieces: deque[str] = deque()
        self.is_over = False
        self.is_cancelled = False
        self.error: BaseException | None = None
        self.waiters: list[_Waiter] = []

    @property
    def is_ready(self) -> bool:
        if self.is_cancelled:
            return True
        return len(self.pieces) < MOST_UNREAD and (self.stream is not None or self.worker.has_free(self.wanted))

    def step(self) -> bool:
        """Do one decode of its work, or take back what was done; says whether it is over."""
        is_cancelled, piece = self.is_cancelled, ""
        error: BaseException | None = None
        try:
            if is_cancelled:
                error = Cancelled("the answer")
                if self.stream is not None:
                    self.stream.take_back()
            else:
                if self.stream is None:
                    self.stream = self.worker.begin(self._make, self.wanted)
                piece = self.stream.step(n_most=self.worker.n_most)
        except BaseException as raised:  # noqa: BLE001 - its reader gets it, and the thread goes on
            error = raised
        with self.worker.lock:
            if self.is_cancelled and not is_cancelled:
                return False  # Meanwhile: its next turn takes back, also what has ended or failed.
            if piece:
                self.pieces.append(piece)
            if error is not None or (self.stream is not None and self.stream.is_over):
                self.end(error)
            elif piece:
                self._wake()
            return self.is_over

    def end(self, error: BaseException | None) -> None:
        """End it, with an error or well."""
        with self.worker.lock:
            self.is_over, self.error = True, error
            if self.stream is not None:
                self.worker.release(self.stream.seq_id)
            self._wake()

    def _wake(self) -> None:
        for waiter in self.waiters:
            waiter.settle()
        self.waiters.clear()


class _Worker:
    """The thread of a session, and what has a turn on it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # A collector may run while it is held, and end an answer that nobody reads any more.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._entries: deque[_Call | _Answer] = deque()
        self._busy: set[int] = set()
        self._used_at: dict[int, int] = {}
        self._clock = 0
        self._is_closing = False
        self.thread = threading.Thread(target=self._work, name="splitctl session", daemon=True)
        self.thread.start()

    # ---- for the loop ----

    def add(self, entry: _Call | _Answer) -> None:
        """Give something its turns; after close it ends with Parked."""
        self.session.refuse_fork()
        with self._changed:
            if self._is_closing:
                entry.end(Parked(None))
            else:
                self._entries.append(entry)
                self._changed.notify()

    def notify(self) -> None:
        """Say that an answer may be ready again. The lock is held."""
        self._changed.notify()

    def close(self) -> None:
        """Let the thread end after the step under way."""
        self.session.refuse_fork()
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    # ---- the thread ----

    def _work(self) -> None:
        try:
            while (entry := self._next()) is not None:
                if not entry.step():
                    with self._changed:
                        self._entries.append(entry)
        finally:
            with self._changed:
                self._is_closing = True
                left = list(self._entries)
                self._entries.clear()
            for one in left:
                one.end(Parked(None))
            self.session.close()

    def _next(self) -> _Call | _Answer | None:
        """Wait for somebody's turn, and take it out; None: the session closes."""
        with self._changed:
            while not self._is_closing:
                for _ in range(len(self._entries)):
                    entry = self._entries.popleft()
                    if entry.is_ready:
                        return entry
                    self._entries.append(entry)
                self._changed.wait()
            return None

    def has_free(self, wanted: object) -> bool:
        """Say whether an answer can have the sequence that it wants, or any; what is no number is refused later."""
        if (number := whole(wanted)) is not None:
            return number not in self._busy
        return len(self._busy) < self.session.placement.n_seq_max

    @property
    def n_most(self) -> int | None:
        """Most tokens of a prompt in one turn: few while others wait for theirs; None: a batch."""
        return self.session.placement.n_ubatch if len(self._entries) else None

    @property
    def n_busy(self) -> int:
        """How many sequences answers are on."""
        return len(self._busy)

    def begin(self, make: Callable[[int], TextStream], wanted: int | None) -> TextStream:
        """Make an answer, on the sequence wanted or the free one that holds most of its prompt, with room for it."""
        session = self.session
        stream = make(0 if wanted is None else wanted)
        free = [one for one in range(session.placement.n_seq_max) if one not in self._busy]
        if wanted is None:
            stream.seq_id = max(free, key=lambda one: self._fitness(one, stream.prompt))
        idle = [one for one in free if one != stream.seq_id and session.n_held(one)]
        while True:
            try:
                session.refuse_without_room(stream.prompt, stream.seq_id)
                break
            except ContextFull:
                if not (session.placement.kv_unified and idle):
                    raise
                oldest = max(idle, key=self._age)
                idle.remove(oldest)
                session.remove_sequence(oldest)
        self._busy.add(stream.seq_id)
        return stream

    def _fitness(self, seq_id: int, prompt: Sequence[int]) -> tuple[int, bool, int]:
        held = self.session.tokens(seq_id)
        return common(held, prompt), not held, self._age(seq_id)

    def _age(self, seq_id: int) -> int:
        return -self._used_at.get(seq_id, 0)

    def release(self, seq_id: int) -> None:
        """Let others have a sequence."""
        self._clock += 1
        self._used_at[seq_id] = self._clock
        with self._changed:
            self._busy.discard(seq_id)


class AsyncTextStream:
    """An answer for asyncio: ``async for`` its text, which comes in pieces of whole characters.

    It begins with the first piece that is asked for. One whose task is cancelled while it waits for a piece, that is
    left by ``async with``, closed or dropped before its end, takes back what it added to its sequence.

    Thread: that of its event loop.

    Attributes:
        text: the text that was read from it so far.
    """

    def __init__(
        self, session: AsyncSession, worker: _Worker, make: Callable[[int], TextStream], seq_id: int | None
    ) -> None:
        """Use :meth:`AsyncSession.text` or :meth:`AsyncSession.chat`."""
        self._session = session
        self._answer = _Answer(worker, make, seq_id)
        self._has_begun = False
        self.text = ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        answer = self._answer
        worker = answer.worker
        if not self._has_begun:
            worker.add(answer)
            self._has_begun = True
        while True:
            with worker.lock:
                if answer.pieces:
                    worker.notify()
                    self.text += (piece := answer.pieces.popleft())
                    return piece
                if answer.is_over:
                    if (error := answer.error) is not None:
                        raise error
                    raise StopAsyncIteration
                answer.waiters.append(waiter := _Waiter())
            try:
                await waiter.future
            except asyncio.CancelledError:
                self._cancel()
                raise

    @property
    def seq_id(self) -> int | None:
        """The sequence that it is on; None before it has begun."""
        return None if self._answer.stream is None else self._answer.stream.seq_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that were drawn so far, some of which may not have been read."""
        return () if self._answer.stream is None else tuple(self._answer.stream.tokens)

    @property
    def usage(self) -> Usage | None:
        """What it took; None before its end."""
        return None if self._answer.stream is None else self._answer.stream.usage

    async def read(self) -> str:
        """Give all the text that is left, at its end."""
        return "".join([piece async for piece in self])

    async def aclose(self) -> None:
        """End it here, and wait until what it added is taken back; one that has ended stays as it is."""
        answer = self._answer
        self._cancel()
        while self._has_begun:
            with answer.worker.lock:
                if answer.is_over:
                    return
                answer.waiters.append(waiter := _Waiter())
            await waiter.future

    def _cancel(self) -> None:
        answer = self._answer
        with answer.worker.lock:
            if not answer.is_over:
                answer.is_cancelled = True
                answer.pieces.clear()
                answer.worker.notify()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Where the thread has ended, or is that of the process that this one was forked from, there is nothing to end.
        if hasattr(self, "_answer") and self._answer.worker.thread.is_alive():
            self._cancel()


class AsyncSession:
    """A session whose work is done by a thread of its own, for programs on asyncio.

    Answers share it: each has one decode in turn, on a sequence of its own (``n_seq_max`` of the placement says how
    many there are; more wait for one). Lifetime: until :meth:`close`; also an async context manager. Thread: that of an
    event loop.
    """

    def __init__(self, session: Session) -> None:
        """Take over an open session, which is closed with it; nobody else may use it."""
        self._session = session
        self._worker = _Worker(session)

    @classmethod
    async def open(
        cls, model_path: str | os.PathLike[str], placement: Placement | SplitMode | str | None = None, **options: Any
    ) -> Self:
        """Load a model and open a context on another thread; arguments and errors are those of :meth:`Session.open`."""
        cancel = threading.Event()
        work = partial(Session.open, model_path, placement, **{"cancel": cancel, **options})
        # No task: the end of a loop cancels all of them.
        opening = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return cls(await asyncio.shield(opening))
        except asyncio.CancelledError:
            cancel.set()
            opening.add_done_callback(_close_unwanted)
            raise

    @property
    def placement(self) -> Placement:
        """The placement that the session serves in."""
        return self._session.placement

    @property
    def last_switch(self) -> SwitchOutcome | None:
        """The last switch as it stands now."""
        return self._session.last_switch

    def text(
        self,
        prompt: str | bytes | Sequence[int],
        *,
        n: int = -1,
        stop: str | Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        seq_id: int | None = None,
        grammar: str = "",
        processors: Sequence[LogitsProcessor] = (),
        add_special: bool = True,
        parse_special: bool = False,
    ) -> AsyncTextStream:
        """Answer a prompt in text, as :meth:`Session.text`.

        Args:
            prompt: a text, or its tokens.
            n: most tokens of the answer; -1: no limit of its own.
            stop: texts that end the answer.
            sampler: how to draw; None: llama.cpp's defaults, or where ``seq_id`` is given the sequence's own.
            seq_id: the sequence, which is waited for; None: the free one that holds most of the prompt.
            grammar: a grammar in GBNF that the answer follows.
            processors: change the logits before each draw, on the session's thread.
            add_special: put the model's first token before a text.
            parse_special: let names of special tokens in a text be those tokens.

        Returns:
            An async iterator of text; errors of arguments come with its first piece.
        """
        make = partial(self._session.text, prompt, n=n, stop=stop, grammar=grammar, processors=processors)
        make.keywords.update(add_special=add_special, parse_special=parse_special)
        return self._stream(make, sampler, seq_id)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = -1,
        stop: str | Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        seq_id: int | None = None,
        grammar: str = "",
        processors: Sequence[LogitsProcessor] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: Literal["content", "reasoning_content"] | None = None,
    ) -> AsyncTextStream:
        """Answer a chat, as :meth:`Session.chat`; arguments as for :meth:`text`."""
        make = partial(self._session.chat, messages, n=n, stop=stop, grammar=grammar, processors=processors)
        make.keywords.update(chat_template_kwargs=chat_template_kwargs, continue_final_message=continue_final_message)
        return self._stream(make, sampler, seq_id)

    def _stream(
        self, make: Callable[..., TextStream], sampler: SamplerSpec | None, seq_id: int | None
    ) -> AsyncTextStream:
        # Whose answer was on a free sequence before says nothing of this one.
        drawn = SamplerSpec() if sampler is None and seq_id is None else sampler
        return AsyncTextStream(self, self._worker, lambda one: make(sampler=drawn, seq_id=one), seq_id)

    async def switch(self, target: Placement | SplitMode | str | None = None, **options: Any) -> SwitchOutcome:
        """Move the session into another placement, at a token boundary of all answers, which then go on.

        They go on while the target is checked. Arguments, outcome and errors are those of :meth:`Session.switch`. A
        task that is cancelled meanwhile does not end the switch.
        """
        return await asyncio.to_thread(partial(self._session.switch, target, **options))

    async def run(self, work: Callable[[Session], T]) -> T:
        """Do something else with the session, on its thread and between the steps of all answers.

        Args:
            work: called with the session; it must leave sequences alone that answers are on.
        """
        waiter = _Waiter()
        self._worker.add(_Call(partial(work, self._session), waiter))
        result: T = await waiter.future
        return result

    async def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into tokens; see :meth:`Session.tokenize`."""
        return await self.run(lambda one: one.tokenize(text, add_special=add_special, parse_special=parse_special))

    async def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Literal["mean", "cls", "last"] | None = None,
        normalize: bool = False,
    ) -> NDArray[np.float32]:
        """Embed texts, each in a turn of its own: float32[n_texts, n_embd]; see :meth:`Session.embed`."""
        rows = [
            await self.run(lambda one, text=text: one.embed([text], pooling=pooling, normalize=normalize))  # type: ignore[misc]
            for text in arguments.texts_of(texts)
        ]
        return np.concatenate(rows) if rows else await self.run(lambda one: one.embed([]))

    async def feed(self, tokens: Sequence[int], seq_id: int) -> Fed:
        """Let a sequence that no answer is on hold exactly these tokens; see :meth:`Session.feed`."""
        return await self._quietly(lambda one: one.feed(tokens, seq_id), seq_id)

    async def save(self, path: str | os.PathLike[str]) -> int:
        """Write the whole session to one file, answers under way too; see :meth:`Session.save`."""
        return await self.run(lambda one: one.save(path))

    async def restore(self, path: str | os.PathLike[str]) -> Restored:
        """Replace everything with what a file holds; see :meth:`Session.restore`. Busy: an answer is under way."""
        return await self._quietly(lambda one: one.restore(path))

    async def state_bytes(self, *, bare: bool = False) -> bytes:
        """Return what :meth:`save` would write; see :meth:`Session.state_bytes`."""
        return await self.run(lambda one: one.state_bytes(bare=bare))

    async def load_state_bytes(self, state: Buffer) -> Restored:
        """Replace everything; see :meth:`Session.load_state_bytes`. Busy: an answer is under way."""
        return await self._quietly(lambda one: one.load_state_bytes(state))

    async def _quietly(self, work: Callable[[Session], T], seq_id: int | None = None) -> T:
        """Do something that changes a sequence, or all of them, where no answer is on it."""

        def guarded(session: Session) -> T:
            worker = self._worker
            if worker.n_busy if seq_id is None else not worker.has_free(seq_id):
                raise Busy(f"{worker.n_busy} answers" if seq_id is None else f"an answer on sequence {seq_id}")
            return work(session)

        return await self.run(guarded)

    async def close(self) -> None:
        """End answers under way with Parked; wait for the step or switch under way, and for the end of the model."""
        self._worker.close()
        await asyncio.to_thread(self._worker.thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None and worker.thread.is_alive() and not sys.is_finalizing():
            warnings.warn("an AsyncSession was not closed; its thread closes it now", ResourceWarning, stacklevel=2)
            worker.close()


def _close_unwanted(opening: asyncio.Future[Session]) -> None:
    """Close a session for which nobody waited, which may take a while."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="splitctl session").start()
