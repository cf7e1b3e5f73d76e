"""The work behind `bench`: a session in one placement, in which things are timed on demand.

What is timed are the calls that a served session makes: ``Session.read``, ``Session.step``, ``Session.switch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter

from llama_native import Library, Model
from splitctl.carry.sampling import SamplerSpec
from splitctl.engine.host_copy import HostCopy
from splitctl.errors import Reason, Refused
from splitctl.ipc import orders
from splitctl.ipc.jobs import BenchRequest, JobEvent, Progress, Result
from splitctl.ipc.measuring import Measure, Measured, Timed
from splitctl.ipc.orders import WorkerEvent
from splitctl.ipc.wire import MessageInvalid
from splitctl.outcome import SwitchStatus, WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.schedule import LEAST_WARM_STEPS, MOST_WARM_STEPS, WARM_S
from splitctl.probing.computing import numbers_as_tokens
from splitctl.probing.passage import PASSAGE
from splitctl.session import Session
from splitctl.session.opening import trials_of
from splitctl.worker.failures import logged_failure_of
from splitctl.worker.inbox import CancelGate, Inbox
from splitctl.worker.opening import Steps, read_generating, try_on_servers

Emit = Callable[[WorkerEvent], None]

#: Least time between two signs of life [seconds].
_ALIVE_S = 1.0
#: How long a copy of the weights may take to fill [seconds].
_COPY_S = 600.0
#: Most tokens that are read before what counts: threads wake, clocks rise, buffers are made.
_N_WARM = 64
#: Tokens that each of several sequences holds before they generate together.
_N_SHORT = 32
#: The likeliest token: drawing takes the least.
_GREEDY = SamplerSpec(temp=0.0)


def bench(
    request: BenchRequest, library: Library, env: Mapping[str, str], emit: Emit, inbox: Inbox, gate: CancelGate
) -> JobEvent:
    """Open a session and time what orders ask for, until one closes it; returns the last event.

    Args:
        request: which model, and where.
        library: the open library.
        env: the environment for the trials' children.
        emit: takes events.
        inbox: gives orders.
        gate: says whether what runs shall end.

    Raises:
        SplitctlError: the session cannot be opened.
        llama_native.NativeError: the library cannot open it.
        MessageInvalid: what came was no order of a bench.
    """
    tick = _ticking(emit)
    facts = read_generating(request.model)

    def is_cancelled() -> bool:
        # Asked all through a trial in a child, which has a deadline of its own: work goes on.
        tick()
        return gate.is_set()

    prober = trials_of(library, env, is_cancelled)
    if request.rpc:
        try_on_servers(prober, facts, request.placement.changed(mode=SplitMode.TENSOR), emit)
    copy = HostCopy() if request.weights is WeightsTier.PINNED else None
    share = Steps(lambda what, done: emit(Progress(what, done)))
    share("opening", 0.0)
    began: list[float] = []

    def loading(done: float) -> None:
        # What comes before is checks, and perhaps a trial, which is made once for a build.
        began.append(perf_counter())
        share("loading", done)

    with Session.open(
        request.model,
        request.placement,
        library=library,
        prober=prober,
        cancel=gate,
        progress=loading,
        on_tick=tick,
        weights=request.weights,
        copy=copy,
    ) as session:
        load_ms = (perf_counter() - began[0]) * 1e3 if began else 0.0
        if copy is not None and not copy.wait(_COPY_S):
            raise Refused((Reason("no-copy", f"there is no copy of the weights: {copy.why}"),))
        emit(orders.Opened(session.placement, {}, load_ms=load_ms))
        work = _Bench(session, emit)
        while not isinstance(order := inbox.take(waiting=True), orders.Close):
            if not isinstance(order, Measure):
                raise MessageInvalid("", type(order).__name__, "a Measure, or the Close")
            try:
                outcome = work.carry_out(order)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this order's answer
                failure = logged_failure_of(error, model=request.model)
                emit(orders.Failed(order.order, failure.fault, failure.name, failure.message))
            else:
                emit(Measured(order.order, outcome))
    return Result({})


def _ticking(emit: Emit) -> Callable[[], None]:
    """Give what says, not too often, that work goes on."""
    said_at = monotonic()

    def tick() -> None:
        nonlocal said_at
        if monotonic() - said_at >= _ALIVE_S:
            said_at = monotonic()
            emit(orders.Alive())

    return tick


class _Bench:
    """Times one session. Thread: the one that works with it."""

    def __init__(self, session: Session, emit: Emit) -> None:
        self._session = session
        self._emit = emit
        self._tokens = _text_of(session.model)

    def carry_out(self, order: Measure) -> dict[str, object] | None:
        """Do what an order asks for, and tell each time; returns the outcome of its switch."""
        for n in order.reads:
            self._empty()
            self._read(min(n, _N_WARM))
            self._empty()
            self._time_read(order, n)
        for n_seq in order.n_seqs:
            self._empty()
            for seq_id in range(n_seq):
                self._read(min(_N_SHORT, self._session.placement.n_batch), seq_id)
            self._time_steps(order, range(n_seq))
        if order.depths:
            self._time_depths(order)
        return None if order.target is None else self._time_switch(order)

    def _time_depths(self, order: Measure) -> None:
        self._empty()
        self._read(min(order.chunk, _N_WARM))
        self._empty()
        self._time_crowd(order)
        for depth in order.depths:
            self._read_to(depth)
            self._time_read(order, order.chunk)
            self._time_steps(order, (0,))
        self._time_crowd(order)

    def _time_crowd(self, order: Measure) -> None:
        """Time a second sequence beside what the first one holds, and empty it again."""
        if order.crowd:
            n_others = self._session.n_held(0)
            self._time_read(order, order.crowd, 1, n_others)
            self._time_steps(order, (1,), n_others)
            self._session.remove_sequence(1)

    def _time_switch(self, order: Measure) -> dict[str, object]:
        session, target = self._session, order.target
        if session.n_held(0) >= order.n_held:
            session.rewind(order.n_held - 1)
        self._read_to(order.n_held)
        self._warm_up()
        outcome = session.switch(session.placement if target is None else target)
        if outcome.status is SwitchStatus.SWITCHED:
            # Its first step is the trial of it.
            self._time_steps(order, (0,))
        told = session.last_switch or outcome
        return dict(told.to_json())

    def _time_read(self, order: Measure, n: int, seq_id: int = 0, n_others: int | None = None) -> None:
        depth = self._session.n_held(seq_id)
        seconds = self._read(n, seq_id)
        self._emit(Timed(order.order, is_read=True, n=n, depth=depth, seconds=seconds, n_others=n_others))

    def _time_steps(self, order: Measure, seq_ids: Sequence[int], n_others: int | None = None) -> None:
        """Time steps of some sequences; a step decodes a token and draws the next one."""
        depth = self._session.n_held(seq_ids[0])
        for seq_id in seq_ids:
            self._session.begin(seq_id, _GREEDY)
        self._warm_up(seq_ids)
        started = perf_counter()
        for _ in range(order.n_steps):
            self._step(seq_ids)
        seconds = (perf_counter() - started) / order.n_steps
        n = len(seq_ids)
        self._emit(Timed(order.order, is_read=False, n=n, depth=depth, seconds=seconds, n_others=n_others))

    def _warm_up(self, seq_ids: Sequence[int] = (0,)) -> None:
        """Make steps that do not count: the CUDA backend records its graphs in the third or fourth of a kind."""
        started = perf_counter()
        for number in range(MOST_WARM_STEPS):
            if number >= LEAST_WARM_STEPS and perf_counter() - started >= WARM_S:
                break
            self._step(seq_ids)

    def _step(self, seq_ids: Sequence[int]) -> None:
        for drawn in self._session.step(seq_ids).values():
            if isinstance(drawn, Exception):
                raise drawn

    def _read_to(self, depth: int) -> None:
        """Read until the first sequence holds so many tokens; one that generated has its newest token to decode."""
        held = self._session.n_held(0)
        if depth or held:
            self._session.prefill(self._words(held, max(depth - held, 1)))

    def _read(self, n: int, seq_id: int = 0) -> float:
        """Read tokens in one decode; returns the seconds until their logits were there."""
        tokens = self._words(self._session.n_held(seq_id), n)
        started = perf_counter()
        n_read = self._session.read(seq_id, tokens)
        seconds = perf_counter() - started
        if n_read != n:
            raise MessageInvalid("n_tokens", str(n), f"a batch of {n_read} tokens at most")
        return seconds

    def _words(self, at: int, n: int) -> list[int]:
        at %= len(self._tokens)
        return (self._tokens[at:] + self._tokens * (n // len(self._tokens) + 1))[:n]

    def _empty(self) -> None:
        for seq_id in range(self._session.placement.n_seq_max):
            if self._session.n_held(seq_id):
                self._session.remove_sequence(seq_id)


def _text_of(model: Model) -> list[int]:
    """Give what is read: a text, because experts are chosen by what it says; numbers where there is no tokenizer."""
    return model.tokenize(PASSAGE) if model.has_tokenizer else numbers_as_tokens(model, _N_WARM)
