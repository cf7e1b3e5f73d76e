"""Plays one cell of the table of faults: a hosted session that generates, a switch, the fault; and what came of it.

What must hold in each: the session serves in the end in a placement that the outcome names (or is parked and brought
back), every stream is complete with no token lost or doubled, the sequences hold what those of a session hold that was
never disturbed, the outcome says where and why it failed, and no process of it is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

import statecodec
from splitctl.carry import file as carries
from splitctl.carry.sampling import SamplerSpec
from splitctl.cli.state_diff import compare
from splitctl.control.requests import GenerateRequest
from splitctl.host.config import HostConfig
from splitctl.host.events import TrialEnded
from splitctl.host.streams import Why
from splitctl.host.supervisor import Supervisor
from splitctl.outcome import Route, SwitchOptions, WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from tests.stublib import FaultFile
from tools.clients import Text, start_streams
from tools.fault_cells import SILENT, Cell, End

#: A switch is ordered when every stream has so many tokens.
N_BEFORE = 4
#: Nothing in a cell takes as long; a hang of ours is a failure too [seconds].
GUARD_S = 240.0
#: How often a copy of weights is looked at [seconds].
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Setup:
    """What cells are played on.

    Args:
        library: the libllama.
        model: the GGUF.
        devices: two.
        prompts: one for each stream, as tokens.
        n_predict: tokens that each stream is to draw.
        n_ctx: size of the context [tokens].
        folder: for verdicts, faults and carries of all cells.
        deadline_s: longest silence of a worker that has work, where the fault is a silence [seconds].
        env: added to the workers' environment.
        is_exact: tokens and bytes are the same however they were computed, as the stub's are.
        beside_pace: what is asked of the stub while a second worker is started.
        n_beside: tokens that each stream is to draw where a second worker is started; None: as many as else.
    """

    library: Path
    model: Path
    devices: tuple[str, str]
    prompts: tuple[tuple[int, ...], ...]
    n_predict: int
    n_ctx: int
    folder: Path
    deadline_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = True
    beside_pace: str = ""
    n_beside: int | None = None
    weights: WeightsTier = WeightsTier.FILE

    def of(self, cell: Cell) -> Setup:
        """Give the setup for a cell."""
        n_predict = self.n_beside if cell.is_beside and self.n_beside else self.n_predict
        return replace(self, n_predict=n_predict, weights=cell.weights)

    def unfinished(self, text: Text) -> list[str]:
        """Say why a text is not whole; a real model may end one by itself."""
        if text.done is None or text.done.why not in ({Why.LENGTH} if self.is_exact else {Why.LENGTH, Why.EOS}):
            return [f"it ended with {text.done}"]
        n, is_cut = len(text.tokens), text.done.why is Why.LENGTH
        return [f"it has {n} tokens and not {self.n_predict}"] if is_cut and n != self.n_predict else []

    def config(self, mode: str, n_streams: int, n_idle: int, folder: Path, *, is_silent: bool) -> HostConfig:
        """Say how a session is to be hosted."""
        placement = Placement(
            mode=SplitMode(mode),
            devices=self.devices,
            n_ctx=self.n_ctx,
            n_batch=32,
            n_ubatch=32,
            n_seq_max=n_streams + n_idle,
            kv_unified=n_streams > 1 and not n_idle,
            flash_attn=FlashAttn.ON,
            n_threads=1,
            n_threads_batch=1,
        )
        return HostConfig(
            model=self.model,
            library=self.library,
            placement=placement,
            name="faults",
            deadline_s=self.deadline_s if is_silent else GUARD_S,
            state_folder=folder / "sessions",
            weights=self.weights,
        )

    def environment(self, armed: FaultFile, folder: Path) -> dict[str, str]:
        """Give the environment of a session's workers; they share what tries in children found."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "STUB_"))}
        places = {"XDG_CACHE_HOME": str(self.folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
        return kept | {"GGML_NO_BACKTRACE": "1"} | dict(self.env) | places | armed.env


def sampler(stream: int, *, is_greedy: bool) -> SamplerSpec:
    """Give each stream a sampler of its own.

    A client that asks again after a parking begins a new sampler: only a greedy one without a window goes on as before.
    """
    if is_greedy:
        return SamplerSpec(temp=0.0)
    return SamplerSpec(temp=0.9, top_k=20, repeat_penalty=1.3, repeat_last_n=8, seed=100 + stream)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a session that was never disturbed comes to.

    Args:
        tokens: of each stream.
        carry: the session at its end.
    """

    tokens: tuple[tuple[int, ...], ...]
    carry: Path


@dataclass(slots=True)
class Played:
    """What a cell came to.

    Args:
        faults: what did not hold; empty: it passed.
        texts: prompt and answer of each stream, and the length of the prompt.
        recomputed: tokens were read again on the way.
        said: the last lines that the host said.
    """

    faults: list[str] = field(default_factory=list)
    texts: list[tuple[list[int], int]] = field(default_factory=list)
    recomputed: bool = False
    said: list[str] = field(default_factory=list)

    def need(self, holds: object, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.faults.append(what)


class Play:
    """One hosted session, and clients that read its streams."""

    def __init__(
        self, setup: Setup, mode: str, n_streams: int, n_idle: int, *, is_greedy: bool, is_silent: bool = False
    ) -> None:
        self.setup = setup
        self.n_streams = n_streams
        self.n_idle = n_idle
        self.is_greedy = is_greedy
        self.folder = Path(tempfile.mkdtemp(dir=setup.folder))
        self.armed = FaultFile(self.folder / "faults")
        self.said: list[str] = []
        self.texts: list[Text] = []
        self.pids: set[int] = set()
        self.fired: list[str] = []
        self.supervisor = Supervisor(
            setup.config(mode, n_streams, n_idle, self.folder, is_silent=is_silent),
            env=setup.environment(self.armed, self.folder),
            log=self.said.append,
        )

    def status(self) -> dict[str, Any]:
        """Look at the session; what workers it has is remembered."""
        status = self.supervisor.status()
        self.pids.update(pid for pid in (status["worker_pid"], status["standby_pid"]) if pid)
        return status

    def request(self, stream: int, drawn: Sequence[int] = ()) -> GenerateRequest:
        """Ask for the tokens of a stream that are not drawn yet."""
        return GenerateRequest(
            tokens=(*self.setup.prompts[stream], *drawn),
            n_predict=self.setup.n_predict - len(drawn),
            sampler=sampler(stream, is_greedy=self.is_greedy),
        )

    async def start(self) -> list[asyncio.Task[None]]:
        """Fill the idle sequences, and start every stream."""
        for prompt in self.setup.prompts[self.n_streams : self.n_streams + self.n_idle]:
            request = GenerateRequest(tokens=prompt, n_predict=N_BEFORE, sampler=sampler(0, is_greedy=self.is_greedy))
            async for _ in await self.supervisor.generate(request):
                pass
        requests = [self.request(stream) for stream in range(self.n_streams)]
        self.texts, readers = await start_streams(self.supervisor, requests, N_BEFORE)
        return readers

    def finish(self) -> list[asyncio.Task[None]]:
        """Ask again for what is left of every stream, as a client does after its session was brought back."""
        readers = []
        for stream, text in enumerate(self.texts):
            text.done = None
            if len(text.tokens) < self.setup.n_predict:
                request = self.request(stream, text.tokens)
                readers.append(asyncio.create_task(text.read(self.supervisor, request)))
        return readers

    async def save(self) -> Path:
        """Save the session at its end."""
        path = self.folder / "end.safetensors"
        await self.supervisor.save(path)
        return path


async def undisturbed(setup: Setup, n_streams: int, n_idle: int, *, is_greedy: bool) -> Reference:
    """Let a session generate without a fault; after it, try both modes, so that the tries in children are made."""
    play = Play(setup, "layer", n_streams, n_idle, is_greedy=is_greedy)
    await play.supervisor.start()
    try:
        await asyncio.gather(*await play.start())
        wrong = [fault for text in play.texts for fault in (*text.faults, *setup.unfinished(text))]
        if wrong:
            raise RuntimeError(f"a session without a fault goes wrong: {wrong} {play.said[-3:]}")
        carry = await play.save()
        for mode in ("tensor", "layer"):
            outcome = await play.supervisor.switch({"mode": SplitMode(mode)}, SwitchOptions(via=Route.IN_PLACE))
            if outcome["status"] != "switched":
                raise RuntimeError(f"a switch without a fault came to {outcome}")
        return Reference(tuple(tuple(text.tokens) for text in play.texts), carry)
    finally:
        await play.supervisor.stop(save=False)


async def play_cell(setup: Setup, cell: Cell, wanted: Reference | None) -> Played:
    """Play a cell.

    Args:
        setup: where.
        cell: what; one that makes sense.
        wanted: what a session comes to that is not disturbed; None: nobody can say exactly.

    Returns:
        What did not hold.
    """
    played = Played()
    try:
        async with asyncio.timeout(GUARD_S):
            await _play(setup, cell, wanted, played)
    except TimeoutError:
        played.faults.append(f"no end within {GUARD_S:g} s")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's failure and not that of the others
        played.faults.append(f"{type(error).__name__}: {error}")
    return played


async def _play(setup: Setup, cell: Cell, wanted: Reference | None, played: Played) -> None:
    is_greedy = cell.end is End.PARKED or wanted is None
    is_silent = cell.kind in SILENT
    play = Play(setup, cell.start, cell.n_streams, cell.n_idle, is_greedy=is_greedy, is_silent=is_silent)
    await play.supervisor.start()
    try:
        play.status()
        await _make_ready(play, cell, played)
        readers = await play.start()
        await asyncio.gather(*(text.has_some.wait() for text in play.texts))
        restarts = play.status()["worker_restarts"]
        outcome = await (_switch_beside(play, cell) if cell.is_beside else _switch_in_place(play, cell))
        if cell.stage == "first.handed" and outcome["status"] == "switched":
            # The system takes its time to end a process: the other one had taken over when that was seen.
            cell = dataclasses.replace(cell, end=End.SWITCHED)
        played.need(
            not any(reader.done() for reader in readers) or cell.end is End.PARKED, "no stream was left to see it"
        )
        await asyncio.gather(*readers)
        status = play.status()
        outcome = status["last_switch"] or outcome
        played.recomputed = bool(status["recomputed"] or outcome["recomputed"])
        played.need(play.fired or play.armed.fired(), f"the fault {cell.items or cell.signal} never struck")
        if cell.kind.is_for_ever:
            play.armed.clear()
        if cell.end is End.PARKED:
            await _bring_back(play, cell, outcome, status, played)
        else:
            _check_serving(cell, outcome, status, played)
            played.need(
                (status["worker_restarts"] > restarts) is cell.is_worker_lost,
                f"{status['worker_restarts']} workers were lost",
            )
            if cell.weights is WeightsTier.PINNED:
                played.need(status["weights"]["from"] == "pinned", f"the worker is back from {status['weights']}")
        _check_texts(setup, play, wanted, played)
        if wanted is not None:
            played.faults += different(wanted.carry, await play.save())
    finally:
        await play.supervisor.stop(save=False)
        played.said = play.said[-6:]
    played.need(not [pid for pid in play.pids if psutil.pid_exists(pid)], "a worker outlived its session")


async def _make_ready(play: Play, cell: Cell, played: Played) -> None:
    """Let the weights be there: a copy that is filled and tried, or both placements, which a switch each way makes."""
    if cell.weights is WeightsTier.FILE:
        return
    is_copied = cell.weights is WeightsTier.PINNED
    while is_copied and play.status()["weights"]["copy"] != "complete":  # noqa: ASYNC110 - nobody tells when it is
        await asyncio.sleep(_LOOK_S)
    for mode in (cell.target, cell.start):
        outcome = await play.supervisor.switch({"mode": SplitMode(mode)}, SwitchOptions(via=Route.IN_PLACE))
        played.need(outcome["weights"] == cell.weights.value, f"weights from {outcome['weights_reason']}")


async def _switch_in_place(play: Play, cell: Cell) -> dict[str, Any]:
    play.armed.arm(cell.items)
    return await play.supervisor.switch({"mode": SplitMode(cell.target)}, SwitchOptions(via=Route.IN_PLACE))


async def _switch_beside(play: Play, cell: Cell) -> dict[str, Any]:
    """Switch beside; decodes are slow until it is over, so that streams are there to see it: a worker has to start."""
    first = play.status()["worker_pid"]
    events = play.supervisor.subscribe()
    play.armed.arm(f"{cell.items} {play.setup.beside_pace}")

    def strike() -> None:
        if cell.signal is not None and not play.fired:
            os.kill(first, cell.signal)
            play.fired.append(f"first:{cell.signal.name}")

    def on_stage(stage: str, _share: float) -> None:
        play.status()
        if cell.signal is not None and stage == cell.failed_at:
            strike()

    target, options = {"mode": SplitMode(cell.target)}, SwitchOptions(via=Route.BESIDE)
    outcome = await play.supervisor.switch(target, options, on_stage=on_stage)
    if cell.failed_at == "swapped":
        strike()
    if outcome["status"] == "switched":
        await anext(one async for one in events if isinstance(one, TrialEnded))
    play.fired += [one for one in play.armed.fired() if not one.startswith("pace:")]
    play.armed.clear()
    return outcome


def _check_serving(cell: Cell, outcome: Mapping[str, Any], status: Mapping[str, Any], played: Played) -> None:
    played.need(status["state"] == "serving", f"it is {status['state']} and not serving")
    is_switched = cell.end is End.SWITCHED
    played.need(outcome["status"] == ("switched" if is_switched else "fell_back"), f"it came to {outcome['status']}")
    places = (outcome["requested"], outcome["effective"], status["effective"])
    there = cell.target if is_switched else cell.start
    played.need(places == (cell.target, there, there), f"requested, effective and serving are {places}")
    played.need(outcome["via"] == ("beside" if cell.is_beside else "composed"), f"it went {outcome['via']}")
    if not is_switched:
        played.need(outcome["stage"] in cell.may_fail_at, f"the outcome names the stage {outcome['stage']}")
        missing = [words for words in cell.words if words not in outcome["reason"]]
        played.need(not missing and outcome["reason"], f"the reason lacks {missing}: {outcome['reason']!r}")
    is_recomputed = cell.end is End.RECOMPUTED
    played.need(played.recomputed is is_recomputed, f"recomputed is {played.recomputed}: {outcome['reason']!r}")


async def _bring_back(
    play: Play, cell: Cell, outcome: Mapping[str, Any], status: Mapping[str, Any], played: Played
) -> None:
    """Check a parking, restore from its file, and let every client ask for the rest."""
    played.need(status["state"] == "parked", f"it is {status['state']} and not parked")
    parked_at = str(status["parked_at"])
    played.need(_is_file(parked_at), f"nothing is parked at {parked_at}")
    if cell.stage != "trial":
        played.need(outcome["status"] == "parked", f"the outcome is {outcome['status']}")
    for text in play.texts:
        told = text.done.message if text.done else "nothing"
        played.need(text.done and text.done.why is Why.ERROR and parked_at in told, f"a stream ended with {text.done}")
    await play.supervisor.restore(Path(parked_at))
    await asyncio.gather(*play.finish())
    played.need(play.status()["state"] == "serving", "it does not serve after the restore")


def _is_file(path: str) -> bool:
    return Path(path).is_file()


def _check_texts(setup: Setup, play: Play, wanted: Reference | None, played: Played) -> None:
    for stream, text in enumerate(play.texts):
        played.faults += [f"stream {stream}: {fault}" for fault in (*text.faults, *setup.unfinished(text))]
        prompt = setup.prompts[stream]
        played.texts.append(([*prompt, *text.tokens], len(prompt)))
        if wanted is not None and tuple(text.tokens) != wanted.tokens[stream]:
            pairs = zip(text.tokens, wanted.tokens[stream], strict=False)
            at = next((index for index, (one, other) in enumerate(pairs) if one != other), "its end")
            played.faults.append(f"stream {stream}: {len(text.tokens)} tokens, others than wanted from {at} on")


def different(wanted: Path, found: Path) -> list[str]:
    """Say what two saved sessions hold differently: tokens, what is decoded of them, cells and their rows."""
    one, two = carries.read(wanted).carry, carries.read(found).carry
    told = []
    held = [{each.seq_id: (each.n_past, each.tokens.tolist()) for each in carry.sequences} for carry in (one, two)]
    if held[0] != held[1]:
        lengths = [{seq_id: (n_past, len(tokens)) for seq_id, (n_past, tokens) in each.items()} for each in held]
        told.append(f"sequences (n_past, tokens) are {lengths[1]}, wanted {lengths[0]}, or of other tokens")
    result = compare(statecodec.parse(one.state), statecodec.parse(two.state))
    if not result.is_same(0.0):
        told.append(f"the state differs: {result.differences[:3]} nmse {result.nmse}")
    return told
