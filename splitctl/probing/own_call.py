"""The trial of the library's own call: a context moved to another split mode and back, compared. Runs in a child.

What is demanded is what a switch promises: the state's bytes and the rows of the last decode stay what they are, and
what is decoded after it is what a fresh context in the target computes from the same state. A call that is refused
changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress

from llama_native import CallFailed, Context, Library, LoadCancelled, Model, NativeError
from splitctl.engine.engine import model_params
from splitctl.last_words import is_shortage, telling_line
from splitctl.placement import Placement
from splitctl.probing.comparing import Logits
from splitctl.probing.computing import ProbeCancelled, Wrong, put_back, state_of, why_failed
from splitctl.probing.script import (
    NoReference,
    Script,
    Step,
    alone,
    encode,
    open_context,
    reference_run,
    rows_of,
    run,
    script_of,
    shrunk,
)
from splitctl.probing.short_model import tried_short
from splitctl.probing.verdicts import ProbeVerdict, Verdict


def try_own_call(
    library: Library,
    model_path: str,
    first: Placement,
    second: Placement,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ProbeVerdict:
    """Let the library move a context from one placement to another and back by its own call.

    Args:
        library: the open library.
        model_path: the GGUF; its first layers stand for it, where they can.
        first: where the context is made; its size is made smaller, the rest is as given.
        second: the same placement with another mode or tensor split.
        on_stage: told what is being done, so that a death can be placed.
        is_cancelled: asked between the steps.

    Returns:
        OK, WRONG, FAILS or INCONCLUSIVE; DIES is for the parent to say.

    Raises:
        ProbeCancelled: `is_cancelled` said so.
    """
    if not library.has("native-switch"):
        return ProbeVerdict(Verdict.FAILS, "it has no such call")
    on_stage("reference")
    return tried_short(
        model_path, second, lambda path: _tried(_Trial(library, path, first, second, on_stage, is_cancelled))
    )


def _tried(trial: _Trial) -> ProbeVerdict:
    try:
        trial.play()
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except NoReference as error:
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"there is nothing to compare with: {error}")
    except Wrong as error:
        return ProbeVerdict(Verdict.WRONG, error.why)
    except _Declined as error:
        is_short = is_shortage(error.said)
        why = f"it declines: {telling_line(error.said) or 'it does not say why'}"
        return ProbeVerdict(Verdict.INCONCLUSIVE if is_short else Verdict.FAILS, why)
    except CallFailed as error:
        why, is_short = why_failed(error)
        if is_short or not trial.has_moved:
            return ProbeVerdict(Verdict.INCONCLUSIVE, f"not enough memory for the try ({why})" if is_short else why)
        return ProbeVerdict(Verdict.FAILS, f"after it {why}")
    return ProbeVerdict(Verdict.OK)


class _Declined(Exception):
    """The library's own call returned false."""

    def __init__(self, said: Sequence[str]) -> None:
        self.said = said
        super().__init__()


class _Trial:
    """One play of the script on one file."""

    def __init__(
        self,
        library: Library,
        path: str,
        first: Placement,
        second: Placement,
        on_stage: Callable[[str], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self.has_moved = False
        """Whether the call has been made: what fails from then on is its doing."""
        self._library = library
        self._path = path
        self._first = shrunk(first)
        self._second = shrunk(second)
        self._on_stage = on_stage
        self._is_cancelled = is_cancelled
        self._embeddings = False

    def play(self) -> None:
        """Go there and back; returns where all is as it should be.

        Raises:
            Wrong: something is not.
            _Declined: the library would not.
            NoReference, CallFailed, LoadCancelled, ProbeCancelled: as they say.
        """
        with self._loaded(self._first, "reference") as model:
            self._embeddings, _ = reference_run(model, self._first)
            script = script_of(model, self._first)
            with self._opened(model, self._first) as context:
                self._begin(context, script)
                given = _state(context)
        with self._loaded(self._second, "reference there") as model:
            there, there_state = self._from_state(model, self._second, script, given, script.after)
        with self._loaded(self._first, "target: loading") as model:
            back, _ = self._from_state(model, self._first, script, there_state, _further(script))
            with self._opened(model, self._first) as context:
                held = self._begin(context, script)
                if _state(context) != given:
                    raise NoReference("the same tokens give another state each time")
                self._refused(model, context)
                self._unmoved(context, script, script.before, held, given, "a call that was refused")
                self._move(context, self._second, "target: there")
                self._unmoved(context, script, script.before, held, given, "the call")
                held = self._follow(context, script, script.after)
                self._equal(held, there, "what it decodes after the call")
                if _state(context) != there_state:
                    raise Wrong("after some tokens its state is not that of a fresh context given the same")
                self._move(context, self._first, "target: back")
                self._unmoved(context, script, script.after, held, there_state, "the call back")
                self._equal(
                    self._follow(context, script, _further(script)), back, "what it decodes after the call back"
                )

    def _loaded(self, where: Placement, name: str) -> Model:
        def loading(_: float) -> bool:
            self._on_stage(name)
            return not self._is_cancelled()

        self._stage(name)
        return Model.load(self._library, self._path, model_params(where), progress=loading)

    def _stage(self, name: str) -> None:
        if self._is_cancelled():
            raise ProbeCancelled
        self._on_stage(name)

    def _opened(self, model: Model, where: Placement) -> Context:
        return open_context(model, where, embeddings=self._embeddings)

    def _begin(self, context: Context, script: Script) -> list[Logits]:
        """Decode the first part in a fresh context; returns the rows of every batch."""
        rows = encode(context, script, embeddings=self._embeddings)
        return rows + self._decoded(context, script, script.before)

    def _follow(self, context: Context, script: Script, steps: Sequence[Step]) -> list[Logits]:
        """Go on with a later part; an encoder alone reads its one part again."""
        if not context.model.has_decoder:
            return encode(context, script, embeddings=self._embeddings)
        return self._decoded(context, script, steps)

    def _decoded(self, context: Context, script: Script, steps: Sequence[Step]) -> list[Logits]:
        if not context.model.has_decoder:
            return []
        return run(context, steps if context.has_memory else alone(script), embeddings=self._embeddings)

    def _from_state(
        self, model: Model, where: Placement, script: Script, state: bytes, steps: Sequence[Step]
    ) -> tuple[list[Logits], bytes]:
        """Return what a fresh context decodes that was given a state, and its state then."""
        with self._opened(model, where) as context:
            if context.model.has_decoder:
                encode(context, script, embeddings=self._embeddings)
            if state:
                put_back(context, bytearray(state))
            return self._follow(context, script, steps), _state(context)

    def _refused(self, model: Model, context: Context) -> None:
        """Make a call that is to be refused: a second context stands on the model."""
        self._stage("target: a call that is to be refused")
        with self._opened(model, self._first):
            if self._called(context, self._second):
                raise Wrong("it moves a model under another context")

    def _move(self, context: Context, where: Placement, name: str) -> None:
        self._stage(name)
        self.has_moved = True
        if not self._called(context, where):
            raise _Declined(self._library.log.said(200))

    def _called(self, context: Context, where: Placement) -> bool:
        return context.native_switch(model_params(where).split_mode.value, where.tensor_split)

    def _unmoved(
        self,
        context: Context,
        script: Script,
        steps: Sequence[Step],
        rows: Sequence[Logits],
        state: bytes,
        what: str,
    ) -> None:
        """Demand the state and the rows of the last batch as they were before a call."""
        last = script.encoder if not context.model.has_decoder else None
        last = last or (steps if context.has_memory else alone(script))[-1]
        got = None
        with suppress(NativeError):
            got = rows_of(context, last, embeddings=self._embeddings)
        if got is None or got.tobytes() != rows[-1].tobytes():
            raise Wrong(f"{what} changes the rows of the last decode")
        if _state(context) != state:
            raise Wrong(f"{what} changes the state")

    @staticmethod
    def _equal(got: Sequence[Logits], wanted: Sequence[Logits], what: str) -> None:
        if [one.tobytes() for one in got] != [one.tobytes() for one in wanted]:
            raise Wrong(f"{what} is not to the bit what a fresh context computes from the same state")


def _state(context: Context) -> bytes:
    """Copy the state out; empty where there is no memory."""
    return bytes(state_of(context)) if context.has_memory else b""


def _further(script: Script) -> tuple[Step, ...]:
    """Give the last part once more, for the positions after it."""
    n = max(script.after[-1].positions) - max(script.before[-1].positions)
    return tuple(
        dataclasses.replace(one, positions=tuple(position + n for position in one.positions)) for one in script.after
    )
