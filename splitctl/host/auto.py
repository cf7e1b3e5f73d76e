"""A hosted session that switches by itself: what is seen of it goes to the policy, and what that says is done.

`Auto` keeps what `planning.policy` needs and cannot know: since when a prompt waits, how long the answers became, how
fast the session reads and generates, and which switch was its own. It holds prompts back, and orders switches where a
client's go in.

Main path: `saw` takes what a worker reports -> `look` makes a `Situation` of the ledger and asks `Policy.decide` ->
`StreamTable.held`, and an order. The session looks when a stream comes, has been read or ends, when a switch has ended,
and when the policy wants to be asked again.

Laws:
    1. A client's switch, save, restore and stop go before. While the session does not serve nothing is decided.
    2. No prompt is held for longer than `max_wait_s` since it came, whatever the policy says.
    3. What goes wrong here ends the policy of this session, never a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from splitctl.carry.sequence import common
from splitctl.errors import ConfigInvalid
from splitctl.host.config import PolicyConfig
from splitctl.host.ledger import StreamJob, choose_row
from splitctl.host.streams import StreamTable
from splitctl.host.switches import Switches, SwitchRecord
from splitctl.ipc.orders import Ended, Reading, Report, Saved, Step
from splitctl.outcome import SwitchStatus
from splitctl.placement import Placement, SplitMode
from splitctl.planning.learned import MODES, Answers, Learned
from splitctl.planning.policy import Active, Decision, Policy, Situation, Waiting

_MS = 1e-3

#: Least time until the policy is asked again [s].
_SOONEST_S = 0.01

#: A decision that takes longer is made less often: after it come so many times as long without one [s, times].
_LONG_S, _REST = 0.001, 3.0

#: Ends of a stream that say nothing of how long answers get.
_NO_ANSWER = frozenset({"error", "context"})


@dataclass(frozen=True, slots=True)
class Session:
    """What the policy may ask and do of the session.

    Attributes:
        is_free: whether it serves, and no client has asked for something that a switch would be in the way of.
        begin: orders a switch; gives its end.
        cancel: asks the switch under way to end in the old placement.
        changed: called when something may start, or has to be decided.
        log: takes lines for a person.
    """

    is_free: Callable[[], bool]
    begin: Callable[[Placement], asyncio.Future[dict[str, Any]]]
    cancel: Callable[[], None]
    changed: Callable[[], None]
    log: Callable[[str], None]


class Auto:
    """Switches one session by itself. Thread: the supervisor's loop. Lifetime: until `close`."""

    def __init__(
        self,
        config: PolicyConfig,
        streams: StreamTable,
        switches: Switches,
        session: Session,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch a session.

        Args:
            config: how fast the modes are, and what the policy keeps to; without costs nothing is ever decided.
            streams: those of the session; `held` is written here.
            switches: the records, which are only read.
            session: the rest of it.
            clock: gives seconds, and never goes back.
        """
        self._config = config
        self._streams = streams
        self._switches = switches
        self._session = session
        self._clock = clock
        self._learned = None if config.costs is None else Learned(config.costs)
        self._policy = None if self._learned is None else Policy(self._learned, config.settings)
        self._answers = Answers()
        self._fault = ""
        self._decision: Decision | None = None
        self._action = ""
        self._since: float | None = None
        self._counts: Counter[str] = Counter()
        # Since when a stream waits, and since when it is held, seconds of the clock.
        self._came: dict[int, float] = {}
        self._held: dict[int, float] = {}
        self._n_waits, self._sum_s, self._longest_s = 0, 0.0, 0.0
        # How far a prompt had been read at its last report, and the time that it had taken.
        self._reads: dict[int, tuple[int, float]] = {}
        # What a waiting prompt has in common with the sequence that it would get, for the sequences as they were.
        self._cached: dict[int, tuple[object, int]] = {}
        self._splits: dict[SplitMode, tuple[float, ...] | None] = {}
        # Ends of switches that the policy knows: that of a trial may come after another switch.
        self._told: deque[tuple[SwitchRecord, str]] = deque(maxlen=4)
        self._mine: SwitchRecord | None = None
        self._yielded: SwitchRecord | None = None
        self._end: asyncio.Future[dict[str, Any]] | None = None
        self._n_guests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        # While the loop has a rest from decisions: until when, and which streams waited at the last one.
        self._rests_until, self._known = 0.0, frozenset[int]()

    # ---- what the session tells ----

    @property
    def is_due(self) -> bool:
        """Whether a report has changed what there is to decide since the last look."""
        return self._is_due and self._policy is not None

    def saw(self, report: Report) -> None:
        """Learn from a worker's report, before the ledger takes it, which refuses one that is impossible."""
        policy = self._policy
        if policy is not None and isinstance(report, Reading | Step | Ended | Saved):
            self._guarded(lambda: self._learn(policy, report))

    def look(self) -> None:
        """Decide what is held back and whether to switch, for the session as it is now."""
        policy = self._policy
        if policy is not None:
            self._guarded(lambda: self._look(policy))

    async def give_way(self) -> None:
        """Let a client's wish go first; nothing comes between its end and the caller's next step.

        A switch of the policy's own is cancelled if streams still run, and has its end waited for.
        """
        mine, end = self._mine, self._end
        if mine is None or end is None or end.done():
            return
        self._n_guests += 1
        try:
            if self._switches.under_way is mine and not self._switches.is_moving:
                self._yielded = mine
                self._session.cancel()
            await asyncio.wait({end})
        finally:
            self._n_guests -= 1
            # Should nothing come of the wish.
            asyncio.get_running_loop().call_soon(self._session.changed)

    def turn(self, *, is_on: bool) -> None:
        """Begin to decide, anew after a fault, or end it; raises ConfigInvalid where nobody says how fast modes are."""
        if is_on and self._learned is None:
            wanted = "off, or a host that was started with --policy auto: it looks for how fast the modes are"
            raise ConfigInvalid("policy", "auto", wanted)
        if is_on == (self._policy is not None):
            return
        self.close()
        self._fault = ""
        if self._learned is not None and is_on:
            self._policy = Policy(self._learned, self._config.settings)
        self._session.log(f"policy: turned {'on' if is_on else 'off'}")

    def close(self) -> None:
        """Decide nothing any more."""
        self._policy = None
        self._let_go()

    def status(self) -> dict[str, Any]:
        """Say what was decided last, and why; as JSON types."""
        if self._policy is None:
            return {"policy": "off"} | ({"fault": self._fault} if self._fault else {})
        decision, now = self._decision, self._clock()
        return {
            "policy": "auto",
            "profile": self._config.source,
            "decision": None if decision is None else decision.sentence,
            "numbers": {} if decision is None else dict(decision.numbers),
            "since": self._since,
            "held": len(self._held),
            "backoff_s": 0.0 if decision is None else decision.numbers.get("backoff_s", 0.0),
            "decisions": dict(self._counts),
            "waits": {
                "count": self._n_waits,
                "sum_s": self._sum_s,
                "longest_s": max([self._longest_s, *(now - at for at in self._held.values())]),
            },
        }

    # ---- what is learned ----

    def _learn(self, policy: Policy, report: Reading | Step | Ended | Saved) -> None:
        jobs, mode = self._streams.ledger.jobs, self._switches.effective.mode
        match report:
            case Reading():
                before, ms = self._reads.get(report.stream, (report.n_done, report.ms))
                self._reads[report.stream] = report.n_done, report.ms
                job, n = jobs.get(report.stream), report.n_done - before
                if mode in MODES and n > 0 and report.ms > ms:
                    others_s = policy.costs.others_s(mode, n * (self._n_shared() - before), is_read=True)
                    policy.observe_read(mode, n, before, max((report.ms - ms) * _MS - others_s, 0.0))
                self._is_due |= job is not None and report.n_done >= len(job.prompt)
            case Step():
                stepped = [jobs[one.stream] for one in report.tokens if one.stream in jobs]
                self._is_due |= any(not job.drawn for job in stepped)
                # A first token comes from the last decode of the prompt: such a step is shorter than others.
                if mode in MODES and stepped and all(job.drawn for job in stepped):
                    g, held = len(stepped), sum(len(job.prompt) + len(job.drawn) for job in stepped)
                    others_s = policy.costs.others_s(mode, g * self._n_shared() - held, is_read=False)
                    policy.observe_step(mode, g, held / g, max(report.ms * _MS - others_s, 0.0))
            case Ended():
                self._reads.pop(report.stream, None)
                job = jobs.get(report.stream)
                if job is not None and report.why not in _NO_ANSWER:
                    self._answers.ended(job.n_predict, job.n_predicted)
                self._is_due = True
            case Saved():
                self._is_due = True

    def _n_shared(self) -> int:
        """Count the tokens that all sequences hold; without one cache for all what is asked of it costs nothing."""
        return sum(len(row.tokens) for row in self._streams.ledger.rows)

    def _note_switches(self, policy: Policy, now: float) -> None:
        """Tell the policy of a switch that has ended since the last look, whoever has asked for it."""
        mine, newest = self._mine, self._switches.newest
        if mine is not None and self._switches.under_way is not mine:
            self._mine = self._end = None
            if not mine.outcome:
                self._failed(policy, mine, now, "the worker could not take it")
        if newest is None or (told := (newest, str(newest.outcome["status"]))) in self._told:
            return
        self._told.append(told)
        outcome, status = newest.outcome, SwitchStatus(told[1])
        if status is SwitchStatus.SWITCHED:
            ms, way = outcome.get("pause_ms"), (newest.original.mode, newest.target.mode)
            seconds = newest.took_s if ms is None else ms * _MS
            if self._learned is not None and set(way) == set(MODES):
                self._learned.observe_switch(*way, int(outcome.get("n_tokens") or 0), seconds)
            policy.switched(now, succeeded=True, seconds=seconds, after=way[1])
        elif newest is mine or status is SwitchStatus.FELL_BACK:
            # A person's wish that was refused, or taken back, says nothing of the next switch.
            self._failed(policy, newest, now, str(outcome.get("reason") or status.value))

    def _failed(self, policy: Policy, record: SwitchRecord, now: float, why: str) -> None:
        if record is self._yielded:
            return
        mode = record.target.mode
        policy.switched(now, succeeded=False, seconds=record.took_s, after=mode)
        self._session.log(f"policy: the switch to {mode.value} failed, the next may wait: {why}")

    # ---- what is decided ----

    def _look(self, policy: Policy) -> None:
        now, queued = self._clock(), self._streams.ledger.queued
        self._is_due = False
        self._note_switches(policy, now)
        self._came = {job.number: self._came.get(job.number, now) for job in queued}
        self._cached = {number: known for number, known in self._cached.items() if number in self._came}
        here = self._switches.effective
        self._splits[here.mode] = here.tensor_split
        if self._n_guests or self._switches.under_way is not None or not self._session.is_free():
            # What is held stays held; what comes meanwhile is read in the mode that there is.
            self._hold(set(self._held), now, None)
            return
        if now < self._rests_until:
            # What has just come waits for its decision.
            self._hold({*self._held, *(self._came.keys() - self._known)}, now, self._rests_until - now)
            return
        self._known = frozenset(self._came)
        if here.mode in MODES:
            started = time.thread_time()
            decision = policy.decide(self._situation(here, queued, now))
            took_s = time.thread_time() - started
            self._rests_until = now + (1.0 + _REST) * took_s if took_s > _LONG_S else 0.0
        else:
            text = f"stays in {here.mode.value}: nothing was measured of this mode"
            decision = Decision(here.mode, frozenset(), None, text)
        self._take(decision, here.mode)
        self._hold(decision.hold, now, decision.look_again_s)
        if decision.mode is not here.mode:
            split = self._splits.get(decision.mode)
            end = self._session.begin(here.changed(mode=decision.mode, tensor_split=split))
            self._mine, self._end = self._switches.under_way, end

    def _situation(self, here: Placement, queued: Collection[StreamJob], now: float) -> Situation:
        ledger, expected = self._streams.ledger, self._answers.expected
        waiting = []
        for job in queued:
            n_cached = self._n_cached(job)
            n, waited_s = len(job.prompt) - n_cached, now - self._came[job.number]
            waiting.append(Waiting(job.number, n, n_cached, expected(job.n_predict), waited_s))
        active = []
        for job in ledger.running:
            row = ledger.rows[job.seq_id or 0]
            n_held = len(row.encoder_tokens or row.tokens)
            n_unread = 0 if job.drawn else max(len(job.prompt) - n_held, 0)
            active.append(Active(job.number, n_unread, n_held, expected(job.n_predict, len(job.drawn))))
        return Situation(now, here.mode, tuple(waiting), tuple(active), here.n_seq_max)

    def _n_cached(self, job: StreamJob) -> int:
        """Count the tokens of a waiting prompt that its sequence would hold already."""
        ledger = self._streams.ledger
        if ledger.decoder_start is not None:
            return 0
        idle = tuple((row.seq_id, row.used_at, len(row.tokens)) for row in ledger.rows if row.stream is None)
        known = self._cached.get(job.number)
        if known is None or known[0] != idle:
            row = choose_row(ledger.rows, job.prompt)
            rows = ledger.rows if row is None else [row]
            known = idle, max((common(one.tokens, job.prompt) for one in rows), default=0)
            self._cached[job.number] = known
        return min(known[1], len(job.prompt) - 1)

    def _take(self, decision: Decision, mode: SplitMode) -> None:
        """Keep a decision for whoever asks, and log one that changes something."""
        action = "switch" if decision.mode is not mode else "hold" if decision.hold else "stay"
        self._counts[action] += 1
        if action != self._action or self._decision is None or decision.mode is not self._decision.mode:
            self._since = time.time()
        self._decision, self._action = decision, action
        if action == "switch" or not decision.hold <= self._held.keys():
            numbers = ", ".join(f"{name} {value:,.4g}" for name, value in decision.numbers.items())
            self._session.log(f"policy: {decision.sentence}{f' ({numbers})' if numbers else ''}")

    # ---- what is held ----

    def _hold(self, numbers: Collection[int], now: float, again_s: float | None) -> None:
        """Hold prompts, none for too long, and look again when one has to go or the policy wants it."""
        bound = self._config.settings.max_wait_s
        left = {one: self._came[one] + bound - now for one in numbers if one in self._came}
        held = {one: self._held.get(one, now) for one, seconds in left.items() if seconds > 0.0}
        for one in self._held.keys() - held.keys():
            self._n_waits += 1
            self._sum_s += now - self._held[one]
            self._longest_s = max(self._longest_s, now - self._held[one])
        self._held = held
        self._streams.held = frozenset(held)
        soonest = [left[one] for one in held] + ([] if again_s is None else [again_s])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if soonest:
            self._timer = asyncio.get_running_loop().call_later(max(min(soonest), _SOONEST_S), self._session.changed)

    def _let_go(self) -> None:
        self._held, self._streams.held = {}, frozenset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the session serves on as one without a policy
            self.close()
            self._fault = f"{type(error).__name__}: {error}"
            self._session.log(f"policy: off for this session, which serves on in its mode: {self._fault}")
            asyncio.get_running_loop().call_soon(self._session.changed)
