"""The serving worker's loop: orders between decodes, streams carried on, everything reported to the supervisor.

Main path: ``serve`` opens the session as the first order says, then takes an order, or else gives the streams a turn,
until it is told to close. `batching` carries the streams, `hosted` is the session.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Self

from llama_native import Library, link_gb_s
from splitctl.carry.arena import Arena, Arenas
from splitctl.engine.host_copy import HostCopy
from splitctl.errors import Busy, ConfigInvalid, Parked, Refused, SplitctlError
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.ipc.jobs import Failure, Fault, HostRequest, JobEvent, Progress, Result
from splitctl.ipc.measuring import Measure
from splitctl.ipc.orders import Open, Order, Report, WorkerEvent
from splitctl.ipc.wire import MessageInvalid
from splitctl.outcome import Route, Stage, SwitchOutcome, SwitchStatus, to_plain
from splitctl.placement import SplitMode
from splitctl.session import Session, prompts
from splitctl.session.opening import standing_facts, trials_of
from splitctl.switching.checking import Checked
from splitctl.worker import hosted
from splitctl.worker.batching import Batcher
from splitctl.worker.failures import failure_of, logged_failure_of
from splitctl.worker.inbox import CancelGate, CheckDone, Inbox
from splitctl.worker.inspection import device_body
from splitctl.worker.opening import Steps, generating, try_on_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

Emit = Callable[[WorkerEvent], None]
_Answered = (
    orders.Tokenize | CheckDone | CopyAhead | TakeAhead | orders.HandOver | orders.TakeOver | orders.Save
    | orders.Restore
)  # fmt: skip
"""What has an answer of its own."""

#: Least time between two signs of life [seconds].
_ALIVE_S = 1.0
#: Stages of a switch that end before the worker's loop takes it up.
_REPORTED_BEFORE = frozenset({Stage.CHECKING, Stage.QUIESCING})
#: Tokens whose state the arenas have room for from the start; they grow before what the sequences hold needs it.
_N_RESERVED = 4096


class _Reporter:
    """Sends reports, and signs of life where nothing else is sent. Thread: any."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self._sent_at = monotonic()

    def __call__(self, report: Report) -> None:
        """Send a report."""
        self.emit(report)
        self._sent_at = monotonic()

    def tick(self) -> None:
        """Say that work goes on, unless something was said a moment ago."""
        if monotonic() - self._sent_at >= _ALIVE_S:
            self(orders.Alive())


def serve(
    request: HostRequest, library: Library, env: Mapping[str, str], emit: Emit, inbox: Inbox, gate: CancelGate
) -> JobEvent:
    """Serve a session until it is closed, parked, or cannot be opened; returns the last event.

    Args:
        request: which model, and where carries are sealed.
        library: the open library.
        env: the environment for the probe's children.
        emit: takes events.
        inbox: gives orders; the first one opens the session.
        gate: says whether what runs shall end.

    Raises:
        SplitctlError: the session cannot be opened.
        llama_native.NativeError: the library cannot open it.
        MessageInvalid: what came was no order.
    """
    opening = inbox.take(waiting=True)
    if not isinstance(opening, Open):
        raise MessageInvalid("", type(opening).__name__, "the order to open first")
    with _opened(request, opening, library, env, _Reporter(emit), gate, inbox) as server:
        return server.run()


@contextmanager
def _opened(
    request: HostRequest,
    order: Open,
    library: Library,
    env: Mapping[str, str],
    report: _Reporter,
    gate: CancelGate,
    inbox: Inbox,
) -> Iterator[_Server]:
    """Open the session and bring its sequences back."""
    copy = None if request.weights_fd is None else HostCopy(request.weights_fd)
    facts = generating(standing_facts(str(request.model), order.files, len(order.adapters), copy))

    def is_cancelled() -> bool:
        # Asked all through a trial in a child, which has a deadline of its own: work goes on.
        report.tick()
        return gate.is_asked()

    prober = trials_of(library, env, is_cancelled)
    if request.rpc:
        try_on_servers(prober, facts, order.placement.changed(mode=SplitMode.TENSOR), report.emit)
    standby, placed_at = order.standby_for, 0.0

    def tell(stage: str, done: float) -> None:
        if standby is None:
            report.emit(Progress(stage, done))
        else:
            report(orders.StageReached(standby, stage, done))

    def loaded(done: float) -> None:
        nonlocal placed_at
        placed_at = perf_counter()
        if standby is None or done < 1.0:
            share("loading" if standby is None else Stage.PLACING.value, done)
        else:
            share(Stage.BUILDING.value, 0.0)

    share = Steps(tell)
    loaded(0.0)
    if len(request.arena_fds) != 2:
        raise ConfigInvalid("arena_fds", list(request.arena_fds), "two descriptors")
    started = perf_counter()
    with Session.open(
        request.model,
        order.placement,
        library=library,
        adapters=[(one.path, one.scale) for one in order.adapters],
        prober=prober,
        cancel=gate,
        progress=loaded,
        force=order.force,
        arenas=Arenas(*map(Arena, request.arena_fds)),
        on_tick=report.tick,
        files=order.files,
        weights=order.weights,
        copy=copy,
    ) as session:
        load_ms = (perf_counter() - started) * 1e3
        building_ms = (perf_counter() - placed_at) * 1e3
        stages_ms = {"placing": load_ms - building_ms, "building": building_ms}
        session.handing.notify_seals(
            lambda seal: report(orders.Sealed(seal)), lambda arena: report(orders.Unsealed(arena))
        )
        if standby is not None:
            share(Stage.TRIAL.value, 0.0)
            session.handing.warm_up()
        started = perf_counter()
        reason = _bring_back(session, order, share)
        restore_ms = (perf_counter() - started) * 1e3 if order.seal or order.sequences else 0.0
        gate.end()
        about = _about(session)
        report(orders.Opened(session.placement, about, bool(reason), reason, load_ms, restore_ms, session.files))
        with _Checks(session, report, inbox, gate) as checks:
            yield _Server(session, report, gate, inbox, checks, {} if standby is None else stages_ms)


def _bring_back(session: Session, order: Open, share: Steps) -> str:
    """Let the session hold what the snapshots say; returns why tokens were read again, "" where none were."""
    why = "no sealed carry was left"
    if order.seal is not None:
        share("restoring", 0.0)
        try:
            session.handing.take_over(order.seal)
            why = "they came after the sealed carry"
        except SplitctlError as error:
            why = f"the sealed carry could not be used ({error})"
    n_read = hosted.bring_to(session, order.sequences, lambda done, n: share("reading again", done / n))
    # A state is about to come to a standby, through memory that is then ready; others go on meanwhile.
    session.reserve(min(session.placement.n_ctx, _N_RESERVED), wait=order.standby_for is not None)
    return f"{n_read} tokens were read again: {why}" if n_read else ""


def _about(session: Session) -> dict[str, Any]:
    facts, model = session.facts, session.model
    return {
        "path": str(facts.path),
        "name": facts.name,
        "architecture": facts.architecture,
        "n_layer": facts.n_layer,
        "n_vocab": model.n_vocab,
        "decoder_start": max(model.decoder_start_token, 0) if model.has_encoder and model.has_decoder else None,
        "n_ctx_train": facts.n_ctx_train,
        "weight_bytes": facts.weight_bytes,
        "weights_from": session.weights_from.value,
        "has_chat_template": bool(model.chat_template()),
        "build": model.library.build,
        # Asked now, when the weights and the cache lie there, and not between free and place (law 5 of the switch).
        "devices": [{**device_body(one), "link_gb_s": _link(session, one.name)} for one in model.library.devices()],
    }


def _link(session: Session, device: str) -> dict[str, float] | None:
    """Measure what the link to a device of the placement allows; None where that is not known."""
    devices = session.placement.devices
    return link_gb_s(session.model.library, device) if not devices or device in devices else None


class _Checks:
    """Checks targets on a thread of its own, one after the other, so that streams go on meanwhile.

    Thread: the worker's one, and the one that it starts.
    """

    def __init__(self, session: Session, report: _Reporter, inbox: Inbox, gate: CancelGate) -> None:
        self._session = session
        self._report = report
        self._inbox = inbox
        self._gate = gate
        self._orders: queue.SimpleQueue[orders.Switch | orders.Check | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checks", daemon=True)

    def begin(self, order: orders.Switch | orders.Check) -> None:
        """Check what an order asks for; the end of it comes into the inbox."""
        self._orders.put(order)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End a check that is under way: nobody waits for it any more."""
        self._gate.ask()
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            found: Checked | Exception
            why_not_beside = None
            self._reached(order, Stage.CHECKING)
            try:
                found = self._session.check(order.target, order.options)
                if not isinstance(order, orders.Switch) or order.may_be_beside:
                    why_not_beside = hosted.why_not_beside(self._session, found)
                found = hosted.in_place(self._session, found, why_not_beside)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this order's answer
                found = error
            else:
                if why_not_beside != "":
                    self._reached(order, Stage.QUIESCING)
            self._inbox.put(CheckDone(order, found, why_not_beside))

    def _reached(self, order: orders.Switch | orders.Check, stage: Stage) -> None:
        if isinstance(order, orders.Switch):
            self._report(orders.StageReached(order.order, stage.value))


class _Server:
    """One session that serves. Thread: the worker's one."""

    def __init__(
        self,
        session: Session,
        report: _Reporter,
        gate: CancelGate,
        inbox: Inbox,
        checks: _Checks,
        opening_ms: dict[str, float],
    ) -> None:
        """Serve a session that is open; of a standby ``opening_ms`` says what that took, by stage."""
        self._session = session
        self._report = report
        self._gate = gate
        self._inbox = inbox
        self._checks = checks
        self._batcher = Batcher(session, report)
        self._handing = session.handing
        self._on_trial: SwitchOutcome | None = None
        self._last_reported: SwitchOutcome | None = None
        self._opening_ms = opening_ms
        self._beside: CheckDone | None = None
        """The switch for which a second worker is started."""
        self._copying: int | None = None
        """The order by which idle sequences are being copied for it."""
        self._taken: tuple[int, int] | None = None
        """The switch by which the session came here, and the decodes before; until one has been done since."""

    def run(self) -> JobEvent:
        """Carry out orders and carry on streams; returns the last event."""
        try:
            while True:
                order = self._inbox.take(waiting=not self._batcher.is_busy and self._copying is None)
                if isinstance(order, orders.Close):
                    return Result({})
                if order is not None:
                    self._carry_out(order)
                # However many orders come, the streams have a decode after each that takes time.
                if not isinstance(order, orders.Start | orders.Halt):
                    self._batcher.turn()
                self._report_trial()
                self._report_first_step()
                self._copy_ahead()
        except Parked as error:
            self._report_trial()
            failure = failure_of(error)
            return Failure(
                Fault.PARKED, failure.name, failure.message, {"parked_at": to_plain(self._session.parked_at)}
            )

    def _carry_out(self, order: Order | CheckDone) -> None:
        """Carry out one order; whatever goes wrong with it is its answer."""
        match order:
            case orders.Start():
                self._batcher.start(order)
            case orders.Halt():
                self._batcher.halt(order.stream)
            case orders.Switch() | orders.Check():
                self._checks.begin(order)
            case orders.GoOn():
                self._beside = self._copying = None
                self._handing.end_ahead()
            case orders.Open() | orders.Close() | Measure():
                raise MessageInvalid("", type(order).__name__, "an order of a session that is open")
            case _:
                number = order.order.order if isinstance(order, CheckDone) else order.order
                try:
                    answer = self._answer(order)
                    if answer is not None:
                        self._report(answer)
                except Parked:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, it is this order's answer
                    self._report(_failed(number, error))
        if isinstance(order, CheckDone) and self._session.stage is Stage.PARKED:
            raise Parked(self._session.parked_at)

    def _answer(self, order: _Answered) -> Report | None:
        """Carry out an order and give its answer; None where that comes later."""
        match order:
            case orders.Tokenize():
                return self._tokenize(order)
            case CheckDone():
                return self._checked(order)
            case CopyAhead():
                self._begin_ahead(order)
                return None
            case TakeAhead():
                return self._take_ahead(order)
            case orders.HandOver():
                return self._hand_over(order)
            case orders.TakeOver():
                return self._take_over(order)
            case orders.Save():
                return orders.Saved(order.order, self._session.save(order.path))
            case orders.Restore():
                return self._restore(order)

    def _checked(self, done: CheckDone) -> Report:
        with self._cancellable():
            if isinstance(done.found, Exception):
                raise done.found
            if isinstance(done.order, orders.Switch):
                return self._begin(done, done.order, done.found)
            return hosted.judgement(self._session, done.order.order, done.found, done.why_not_beside)

    def _tokenize(self, order: orders.Tokenize) -> Report:
        if sum(one is not None for one in (order.text, order.messages, order.tokens)) != 1:
            raise ConfigInvalid("text", order.text, "a text, messages or tokens, one of them")
        tokens, text = order.tokens, order.text or ""
        if order.messages is not None:
            text = prompts.chat_text(
                self._session,
                order.messages,
                chat_template_kwargs=order.chat_template_kwargs,
                continue_final_message=order.continue_final_message,
            )
            if order.text_alone:
                return orders.Tokenized(order.order, (), text)
        if tokens is None:
            parse_special = order.parse_special or order.messages is not None
            tokens = tuple(
                prompts.text_tokens(self._session, text, add_special=order.add_special, parse_special=parse_special)
            )
        pieces = prompts.pieces_of(self._session, tokens, self._report.tick) if order.with_pieces else ()
        return orders.Tokenized(order.order, tokens, pieces=pieces)

    def _begin(self, done: CheckDone, order: orders.Switch, checked: Checked) -> Report:
        """Switch in place, or say that a second worker may do it."""
        if done.why_not_beside == "":
            self._beside = done
            return orders.FitsBeside(order.order, checked.target, hosted.checking_ms(checked))
        if done.why_not_beside is not None and order.options.via is Route.BESIDE:
            return orders.Switched(order.order, hosted.refused(self._session, checked, done.why_not_beside).to_json())
        return self._switch(order, checked)

    def _target_beside(self, number: int) -> Checked:
        done = self._beside
        if done is None or done.order.order != number or isinstance(done.found, Exception):
            raise ConfigInvalid("order", number, "that of a switch for which a second worker was started")
        return done.found

    def _begin_ahead(self, order: CopyAhead) -> None:
        """Copy idle sequences for a second worker from now on."""
        self._handing.begin_ahead(self._target_beside(order.order))
        self._copying = order.order

    def _copy_ahead(self) -> None:
        """Copy an idle sequence for a second worker, or say where all of them lie."""
        if self._copying is not None and not self._handing.copy_next(self._batcher.busy):
            self._report(CopiedAhead(self._copying, *self._handing.copied()))
            self._copying = None

    def _take_ahead(self, order: TakeAhead) -> Report:
        """Restore what another worker has copied of its sequences so far."""
        return TookAhead(order.order, self._handing.take_ahead(order.arena, order.segments))

    def _hand_over(self, order: orders.HandOver) -> Report:
        """Seal the session for a second worker, and let go of its streams."""
        checked = self._target_beside(order.order)
        if order.in_one_piece:
            self._handing.end_ahead("the library did not take a sequence by itself")
        try:
            handed = self._handing.hand_over(checked, lambda stage: self._reached(order.order, stage))
        except Refused as error:
            self._beside = None
            checked = dataclasses.replace(checked, reasons=tuple(error.reasons))
            return orders.Switched(order.order, hosted.refused(self._session, checked).to_json())
        self._batcher.detach()
        told = (handed.n_sequences, handed.n_tokens, *handed.pinned, *handed.ahead)
        return orders.HandedOver(order.order, handed.stood_at, handed.stages_ms, *told)

    def _take_over(self, order: orders.TakeOver) -> Report:
        """Become what another worker has sealed; the next decode is the trial."""
        if self._batcher.is_busy:
            raise Busy("streams")
        taken = self._handing.take_over(
            order.seal,
            proof=order.options.proof,
            is_trial=True,
            reached=lambda stage: self._reached(order.order, stage),
        )
        self._taken = (order.order, self._session.n_decodes)
        return orders.TookOver(
            order.order,
            self._opening_ms | taken.stages_ms,
            taken.conversions,
            self._session.model.size_bytes,
            *taken.weights,
        )

    def _reached(self, number: int, stage: Stage) -> None:
        self._report(orders.StageReached(number, stage.value))

    def _report_first_step(self) -> None:
        """Report the first decode of a session that came from another worker, once."""
        if self._taken is not None and self._session.n_decodes > self._taken[1]:
            self._report(orders.FirstStep(self._taken[0]))
            self._taken = None

    def _switch(self, order: orders.Switch, checked: Checked) -> Report:
        share = Steps(lambda stage, done: self._report(orders.StageReached(order.order, stage, done)))
        outcome = self._session.switch(
            checked.target,
            timeout_s=None,
            progress=lambda stage, done: None if stage in _REPORTED_BEFORE else share(stage.value, done),
            checked=checked,
        )
        outcome = dataclasses.replace(outcome, via_reason=checked.via_reason)
        if self._session.stage is not Stage.TRIAL:
            self._on_trial = None
        elif outcome.status is SwitchStatus.SWITCHED:
            self._on_trial = outcome
        self._last_reported = self._session.last_switch
        return orders.Switched(order.order, self._outcome_body(outcome))

    def _restore(self, order: orders.Restore) -> Report:
        if self._batcher.is_busy:
            raise Busy("streams")
        restored = self._session.restore(order.path)
        return orders.Replaced(
            order.order, hosted.snapshots_of(self._session), restored.conversions, restored.recomputed, restored.reason
        )

    def _report_trial(self) -> None:
        """Report how the trial of a switch went, once."""
        if self._on_trial is None or self._session.stage is Stage.TRIAL:
            return
        outcome, last = self._on_trial, self._session.last_switch
        if last is not None and last.status is not SwitchStatus.SWITCHED and last is not self._last_reported:
            outcome = last
        else:
            # The last switch may be another one by now, which was refused while this one was on trial.
            outcome = dataclasses.replace(outcome, confirmed=True)
        self._on_trial = None
        self._report(orders.Trial(self._outcome_body(outcome)))

    def _outcome_body(self, outcome: SwitchOutcome) -> dict[str, Any]:
        """Write an outcome as the contract has it; of a parked session with its place."""
        body: dict[str, Any] = outcome.to_json()
        if outcome.status is SwitchStatus.PARKED:
            body["parked_at"] = to_plain(self._session.parked_at)
        return body

    @contextmanager
    def _cancellable(self) -> Iterator[None]:
        """Let a cancel be heard by what runs inside."""
        self._gate.begin()
        try:
            yield
        finally:
            self._gate.end()


def _failed(number: int, error: Exception) -> Report:
    failure = logged_failure_of(error)
    return orders.Failed(number, failure.fault, failure.name, failure.message, failure.body)
