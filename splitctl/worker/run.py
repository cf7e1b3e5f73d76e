"""The work behind `run`: open, read the prompt, switch where the modes differ, generate, report."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from llama_native import Library, NativeError
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import Cancelled, ConfigInvalid, ContextFull, Parked, Refused, SplitctlError
from splitctl.ipc.jobs import Failure, JobEvent, Partial, Piece, Progress, Result, RunRequest
from splitctl.ipc.probes import Prober
from splitctl.ipc.profiles import KeptProfile, day_of, look_up
from splitctl.ipc.reserving import Reserver
from splitctl.model.chat_messages import messages_from
from splitctl.model.facts import ModelFacts
from splitctl.outcome import Stage, SwitchOutcome, SwitchStatus, WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.planning.payoff import ByProfile, SwitchedRun, by_profile, look_back, without_switch
from splitctl.probing.free_memory import device_facts
from splitctl.session import Session
from splitctl.session.opening import trials_of
from splitctl.session.prompts import chat_text, text_tokens
from splitctl.switching import tables
from splitctl.switching.checking import TRIED, Checker
from splitctl.worker.failures import failure_of
from splitctl.worker.opening import (
    Steps,
    read_generating,
    reading_placement,
    try_on_servers,
    with_largest_chunk,
)

Emit = Callable[[JobEvent], None]

#: The cache type that every build takes in every mode.
PLAIN_CACHE = "f16"

#: Reasons whose cause may be a quantized cache.
_CACHE_REFUSALS = frozenset(
    {
        "quantized-cache-with-one-kv-head",
        "cache-type-in-tensor-mode",
        "cache-type-does-not-fit-heads",
        "probe-dies",
        "probe-wrong",
        "probe-fails",
    }
)


@dataclass(slots=True)
class _Run:
    """What is known of a run so far; what of it exists is reported even when the run fails.

    Attributes:
        placement: where the session serves.
        reading: the placement of the prompt, as it was asked for.
        sampler: its seed a number.
        text: the answer so far, raw bytes without a stop text.
        tokens: ids generated so far.
        n_prompt: tokens of the prompt.
        stopped: why the generation ended: eos, stop, length, context, or None while it has not.
        switch: the outcome object, or None without a switch.
        n_devices: devices that share the work, or more.
        weights: where a switch takes the weights from, as it was asked for.
        n_held: tokens of the session before the prompt.
        profile: what was measured of this model on these devices, and is kept; None without.
        restored: what the restore of a saved session came to, or None without one.
    """

    placement: Placement
    reading: Placement
    facts: ModelFacts
    sampler: SamplerSpec
    text: bytearray = field(default_factory=bytearray)
    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    prompt_ms: float | None = None
    load_ms: float | None = None
    generate_ms: float | None = None
    stopped: str | None = None
    switch: dict[str, Any] | None = None
    n_devices: int = 1
    weights: WeightsTier = WeightsTier.FILE
    n_held: int = 0
    profile: KeptProfile | None = None
    restored: dict[str, Any] | None = None

    @property
    def is_parked(self) -> bool:
        """Whether the switch left the session nowhere to serve."""
        return self.switch is not None and self.switch["status"] == SwitchStatus.PARKED.value

    def body(self) -> dict[str, Any]:
        """Give the object that `run --json` prints."""
        return {
            "text": self.text.decode("utf-8", "replace"),
            "tokens": list(self.tokens),
            "stopped": self.stopped,
            "switch": self.switch,
            "restored": self.restored,
            "timings": {
                "load_ms": self.load_ms,
                "prompt": {"n": self.n_prompt, "ms": self.prompt_ms, "tps": _rate(self.n_prompt, self.prompt_ms)},
                "generate": {
                    "n": len(self.tokens),
                    "ms": self.generate_ms,
                    "tps": _rate(len(self.tokens), self.generate_ms),
                },
                "switch_ms": self.switch["total_ms"] if self.switch is not None else None,
            },
            "payoff": self._payoff(),
            "placement": None if self.is_parked else self.placement.to_json(),
            "model": {
                "path": str(self.facts.path),
                "name": self.facts.name,
                "architecture": self.facts.architecture,
                "n_layer": self.facts.n_layer,
                "n_ctx_train": self.facts.n_ctx_train,
                "weight_bytes": self.facts.weight_bytes,
            },
            "sampler": dataclasses.asdict(self.sampler),
            "seed": self.sampler.seed,
        }

    def _payoff(self) -> dict[str, Any] | None:
        """Say what the switch was worth, or by a profile the lack of one; None while the generation has not ended.

        None too where a switch was refused or only batch sizes changed: that was done for the memory.
        """
        if self.generate_ms is None:
            return None
        if self.switch is None:
            seen = self._seen(self.placement.mode, 0.0, self.weights)
            known = self._by_profile(seen)
            return None if known is None else without_switch(seen, known).to_json()
        if self.switch["status"] in {SwitchStatus.PARKED.value, SwitchStatus.REFUSED.value}:
            return None
        if self.reading.mode.value == self.switch["requested"]:
            return None
        # A trial in a child is made once for a build and a kind of model: its time is no part of the switch.
        switch_ms = self.switch["total_ms"] - (self.switch["stages_ms"]["checking"] or 0.0)
        weights = None if self.switch["weights"] is None else WeightsTier(self.switch["weights"])
        seen = self._seen(SplitMode(self.switch["requested"]), max(switch_ms, 0.0) / 1e3, weights)
        return dataclasses.replace(look_back(seen, self.n_devices), by_profile=self._by_profile(seen)).to_json()

    def _seen(self, requested: SplitMode, switch_s: float, weights: WeightsTier | None) -> SwitchedRun:
        return SwitchedRun(
            reads_in=self.reading.mode,
            generates_in=self.placement.mode,
            requested=requested,
            n_prompt=self.n_prompt,
            prompt_s=None if self.prompt_ms is None else self.prompt_ms / 1e3,
            n_generated=len(self.tokens),
            generate_s=None if self.generate_ms is None else self.generate_ms / 1e3,
            switch_s=switch_s,
            weights=weights,
            n_held=self.n_held,
            n_ubatch=self.reading.n_ubatch,
        )

    def _by_profile(self, seen: SwitchedRun) -> ByProfile | None:
        return None if self.profile is None else by_profile(seen, self.profile.profile, day_of(self.profile))


def run(request: RunRequest, library: Library, env: Mapping[str, str], emit: Emit, cancel: threading.Event) -> JobEvent:
    """Do a run; returns the result, or the failure with what exists of the answer.

    Args:
        request: what to do.
        library: the open library.
        env: the environment for the probe's children.
        emit: takes progress and pieces of the answer.
        cancel: asks to stop.

    Raises:
        SplitctlError: the model's file or the flags are at fault, or a rule refuses the switch; nothing was loaded.
    """
    facts = read_generating(request.model)
    reading = reading_placement(request)
    if reading.differs(request.placement):
        reasons = Checker(library, facts, None).ahead(reading, request.placement, request.options)
        if reasons:
            raise Refused(reasons)
    first = _first_placement(request, library, env, facts)
    state = _Run(first, first, facts, request.sampler.seeded(), weights=request.weights)
    prober = trials_of(library, env, cancel.is_set)
    state.n_devices = len(request.placement.devices or prober.device_names)
    if request.rpc and request.placement.mode is not first.mode and request.placement.mode in TRIED:
        try_on_servers(prober, facts, request.placement, emit)
    try:
        _work(request, library, prober, emit, cancel, state)
    except (SplitctlError, NativeError) as error:
        return _failure(error, request, state)
    return Result(state.body())


def _first_placement(request: RunRequest, library: Library, env: Mapping[str, str], facts: ModelFacts) -> Placement:
    """Give the placement of the prompt; the largest chunk is looked for while nothing is loaded."""
    if request.prompt_ubatch != 0:
        return reading_placement(request)
    reserver = Reserver(request.model, library.path, env, request.rpc)
    return with_largest_chunk(request, facts, device_facts(library.devices(), library.env), reserver)


def _failure(error: SplitctlError | NativeError, request: RunRequest, state: _Run) -> Failure:
    """Report an error with all that is known of the run, the outcome of its switch included."""
    failure = failure_of(error, model=request.model)
    message = failure.message
    if isinstance(error, Parked) and state.switch is not None:
        if error.path is None:
            message = "the session serves no more and could not be saved; open a new one"
        message = f"the switch to {state.switch['requested']} failed: {state.switch['reason']}; {message}"
    return dataclasses.replace(failure, message=message, body=state.body())


def _work(
    request: RunRequest, library: Library, prober: Prober, emit: Emit, cancel: threading.Event, state: _Run
) -> None:
    """Open, read, switch, generate; what becomes known goes into `state`."""
    emit(Progress("loading", 0.0))
    steps = Steps(lambda stage, done: emit(Progress(stage, done)))
    started = perf_counter()
    with Session.open(
        request.model,
        state.placement,
        library=library,
        prober=prober,
        cancel=cancel,
        progress=lambda done: steps("loading", done),
        force=request.options.force,
        weights=request.weights,
    ) as session:
        state.load_ms = _ms_since(started)
        state.placement = session.placement
        if request.restore is not None:
            _restore(session, request.restore, request, emit, state)
        if request.prompt:
            _read_prompt(session, request, emit, steps, state)
        emit(Partial(state.body()))
        session.expect(lambda: max(request.n_predict, 0))
        if _has_two_phases(state.reading, request):
            _switch(session, request, emit, state)
            # A library that dies later takes the worker with it, and must not take the outcome too.
            emit(Partial(state.body()))
            if state.is_parked:
                raise Parked(session.parked_at)
            _end_if(cancel, "the switch")
        _generate(session, request, emit, cancel, state)
        # Samples of the file tell it from others; now they are in memory, and nobody waits for a first token.
        found = look_up(library.path, state.facts, request.placement, prober.device_names, request.rpc)
        state.profile = found.kept
        if request.save is not None:
            emit(Progress("saving", None, str(request.save)))
            session.save(request.save)


def _restore(session: Session, path: Path, request: RunRequest, emit: Emit, state: _Run) -> None:
    """Begin with a saved session, and draw as it did where no flag says otherwise."""
    emit(Progress("restoring", None, str(path)))
    restored = session.restore(path)
    state.restored = dataclasses.asdict(restored)
    if restored.recomputed:
        emit(Progress("restored", None, restored.reason))
    saved = next((one for one in session.sequences() if one.seq_id == 0), None)
    if saved is None and not request.prompt:
        raise ConfigInvalid("prompt", "none", "a prompt (-p or -f): the restored session is empty")
    if saved is None or saved.sampler == SamplerSpec():
        return
    fields = {name: getattr(request.sampler, name) for name in request.sampler_named}
    state.sampler = dataclasses.replace(saved.sampler, **fields).seeded()
    if state.sampler != saved.sampler:
        n_draws = saved.n_draws if state.sampler.seed == saved.sampler.seed else 0
        session.begin(0, state.sampler, n_draws=n_draws)


def _read_prompt(session: Session, request: RunRequest, emit: Emit, steps: Steps, state: _Run) -> None:
    tokens = _prompt_tokens(session, request)
    state.n_prompt = len(tokens)
    state.n_held = len(session.tokens())
    asked = request.placement.n_ctx
    if 0 < asked < len(tokens):
        # The library rounds a small context up, so that the tokens might fit: what was asked for counts.
        raise ContextFull(0, len(tokens), asked)
    if _has_two_phases(state.reading, request):
        # The switch that is coming should not wait for the kernel to hand out pages.
        session.reserve(len(tokens), proof=request.options.proof, wait=False)
    emit(Progress("prompt", 0.0, f"{len(tokens)} tokens in {session.placement.mode.value} mode"))
    started = perf_counter()
    session.prefill(tokens, progress=lambda done, n: steps("prompt", done / n))
    state.prompt_ms = _ms_since(started)


def _prompt_tokens(session: Session, request: RunRequest) -> list[int]:
    """Turn the prompt into tokens, through the model's chat template where that is asked for."""
    # A prompt that follows what was restored begins no text, so it gets no special token of its own.
    add_special = not session.tokens()
    if not request.chat:
        return text_tokens(session, request.prompt, add_special=add_special, parse_special=False)
    text = chat_text(session, messages_from(request.prompt))
    return text_tokens(session, text, add_special=add_special, parse_special=True)


def _switch(session: Session, request: RunRequest, emit: Emit, state: _Run) -> None:
    """Move the session to the placement that generates, and keep the outcome."""
    target = dataclasses.replace(
        request.placement,
        n_ctx=session.placement.n_ctx,
        flash_attn=session.placement.flash_attn,
        n_threads=session.placement.n_threads,
        n_threads_batch=session.placement.n_threads_batch,
    )
    how = request.options

    def progress(stage: Stage, share: float) -> None:
        emit(Progress(f"switch: {stage.value}", share))

    def switch(to: Placement) -> SwitchOutcome:
        return session.switch(to, proof=how.proof, convert=how.convert, force=how.force, progress=progress)

    outcome = switch(target)
    if how.convert and _refused_for_its_cache(outcome, target):
        # The mode is what was asked for; a cache type that it cannot have gives way, and the outcome lists it.
        emit(Progress("switch: another cache type", None, f"{outcome.reason}; going on with f16"))
        plain = switch(dataclasses.replace(target, type_k=PLAIN_CACHE, type_v=PLAIN_CACHE))
        outcome = plain if plain.status is not SwitchStatus.REFUSED else _refused_twice(outcome, plain)
    _keep_outcome(outcome, session, state)


def _has_two_phases(reading: Placement, request: RunRequest) -> bool:
    """Tell whether the generation wants another placement than the prompt, be it for its batch sizes alone."""
    return bool(reading.differs(request.placement))


def _refused_twice(asked: SwitchOutcome, plain: SwitchOutcome) -> SwitchOutcome:
    """Give the outcome of what was asked for, with why another cache type does not help."""
    more = tuple(reason for reason in plain.reasons if reason not in asked.reasons)
    reason = f"{asked.reason}; and with a cache of {PLAIN_CACHE}: {plain.reason}"
    return dataclasses.replace(asked, reason=reason, reasons=(*asked.reasons, *more))


def _keep_outcome(outcome: SwitchOutcome, session: Session, state: _Run) -> None:
    state.switch = outcome.to_json()
    if outcome.status is SwitchStatus.PARKED:
        state.switch["parked_at"] = str(session.parked_at) if session.parked_at is not None else None
    state.placement = session.placement


def _refused_for_its_cache(outcome: SwitchOutcome, target: Placement) -> bool:
    """Tell whether a quantized cache may be all that stands in the way."""
    quantized = {target.type_k, target.type_v} & tables.QUANTIZED_CACHE_TYPES
    codes = {reason.code for reason in outcome.reasons}
    return outcome.status is SwitchStatus.REFUSED and bool(quantized) and bool(codes & _CACHE_REFUSALS)


def _generate(session: Session, request: RunRequest, emit: Emit, cancel: threading.Event, state: _Run) -> None:
    """Generate until something ends it, passing on each piece."""
    emit(Progress("generating", None, f"in {session.placement.mode.value} mode"))
    started = perf_counter()
    try:
        for token in session.generate(n=request.n_predict, sampler=state.sampler):
            if token.is_end:
                state.stopped = "eos"
                break
            state.tokens.append(token.id)
            _pass_on(token.piece, emit, state)
            if token.is_stop:
                state.stopped = "stop"
                break
            _end_if(cancel, "the generation")
        else:
            state.stopped = "length" if 0 <= request.n_predict <= len(state.tokens) else "context"
    except ContextFull:
        state.stopped = "context"
    finally:
        state.generate_ms = _ms_since(started)
        was_refused = state.switch is not None and state.switch["status"] == SwitchStatus.REFUSED.value
        if session.last_switch is not None and state.switch is not None and not was_refused:
            # The trial decides only now: it confirms the switch, or falls back from it.
            _keep_outcome(session.last_switch, session, state)
        is_held = bool(state.sampler.stop) and state.stopped != "stop" and session.stage is not Stage.PARKED
        if is_held and session.model.has_tokenizer:
            # What was held back because a stop text may begin so.
            _pass_on(b"".join(map(session.model.piece, state.tokens))[len(state.text) :], emit, state)


def _end_if(cancel: threading.Event, what: str) -> None:
    if cancel.is_set():
        raise Cancelled(what)


def _pass_on(data: bytes, emit: Emit, state: _Run) -> None:
    if data:
        state.text += data
        emit(Piece(data))


def _ms_since(started: float) -> float:
    return (perf_counter() - started) * 1e3


def _rate(n: int, ms: float | None) -> float | None:
    return n / ms * 1e3 if ms else None
