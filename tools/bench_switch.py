"""Time our switch against the bare sequence of library calls: size, get, free, free, load, build, set.

    python -m tools.bench_switch [--json] [--pairs N] [--models NAME|FILE ...] [--tokens N] [-k ROUTE] [--lib PATH]

One session is moved in three ways in turn: by the bare calls (through cffi directly on the session's own model and
context, with the library's log thrown away in C and a buffer that is allocated and touched once), by ``Session.switch``
with its proof on positions, and with ``--proof bytes``. All move the same objects in the same memory, so none has an
advantage from the heap. A round goes there and back once in each way, in an order that changes from round to round;
every ratio is of two times of the same round. After each move the session decodes one token, which ends a trial.

overhead_ratio    median of (our switch, proof on positions) / (bare calls); the worst of all models and routes
bytes_ratio       median of (proof on bytes) / (proof on positions): what reading the state back costs more
interval          95 % of the medians of 2,000 resamples of the rounds
cpu_ratio         overhead_ratio in processor time, which other programs on the machine disturb less

times_faster      median of layer-tensor / median of the route, proof on positions, where both were run

Buffers of some MiB come from fresh pages: malloc would give recycled ones to some moves and not to others.

Routes: layer-layer moves the tensor_split between 1,1 and 3,1; layer-tensor changes the mode, with weights from the
file; layer-tensor-pinned and layer-tensor-resident are the same in the other tiers of weights. Their bare calls are
get, free, free, make from the copy (`llama_native.load_user_model`), build, set; and get, clear, set, between two
contexts. All of these are switched by our own sequence of calls. Where the library has a call of its own, there are
layer-tensor-native and layer-tensor-pinned-native too, whose bare call it is.

Exit code 0: every switch was done, or a route is left out with a reason; 1: one was not. The ratios are printed, not
judged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cffi
import numpy as np

from llama_native import Context, Library, load_user_model, state_get, state_set, state_size
from llama_native import library as opened  # the module: the log callback lives there
from llama_native.context import fill_context_params
from llama_native.model import fill_model_params
from splitctl import FlashAttn, Placement, Proof, SamplerSpec, Session, SplitMode, SwitchStatus
from splitctl.engine.engine import context_params, model_params
from splitctl.outcome import Route, StageTimes, WeightsTier
from tools.make_dummies import make_big
from tools.places import default_folder, small_model

N_RESAMPLES = 2000
#: Resamples lie between these quantiles.
QUANTILES = (0.025, 0.975)
#: Rounds before the first that counts: first faults of buffers, thread pools, imports.
WARM_UP = 2
#: Moves of a round: there and back in three ways, each followed by one token.
_MOVES = 6
#: Bytes of the bare calls' buffer beyond the state as it is at first: tokens are added.
_ROOM = 64 << 20
#: Source: glibc, malloc.h.
_M_MMAP_THRESHOLD = -3
_GREEDY = SamplerSpec(temp=0.0)
#: How long a copy of the weights may take to fill [s].
_COPY_S = 120.0
_BIG = "big-500"
BARE_STAGES = ("saving", "freeing", "placing", "building", "restoring")
_STAGES = tuple(one.name for one in fields(StageTimes))


class Bare:
    """The switch of a session by the library's calls alone, behind the session's back."""

    def __init__(self, library: Library, session: Session, room: int = _ROOM) -> None:
        """Move the model and the context of ``session``; there and back, so that what it knows stays true.

        The state may grow by ``room`` bytes.
        """
        self._library = library
        self._engine = session._live.engine  # noqa: SLF001 - moved without its knowledge, which is the point
        self._path = os.fsencode(self._engine.model_path)
        self.stages: dict[str, list[float]] = {}
        with library.calling() as (ffi, lib):
            silent = cffi.FFI()
            silent.cdef("int abs(int);")
            self._libc = silent.dlopen(None)
            self._silent = ffi.cast(
                "ggml_log_callback", int(silent.cast("uintptr_t", silent.addressof(self._libc, "abs")))
            )
            self.n_bytes = int(lib.llama_state_get_size(self._engine.live_context.pointer))
            self._buffer = np.ones(self.n_bytes + room, np.uint8)
            self._view = ffi.from_buffer("uint8_t[]", self._buffer)

    def switch(self, placement: Placement) -> Times:
        """Move; the log is given back to the session afterwards."""
        engine = self._engine
        model, context = engine.model, engine.live_context
        if model is None:
            msg = "a session that serves has a model"
            raise AssertionError(msg)
        with self._library.calling() as (ffi, lib):
            c_model, c_context = model.pointer, context.pointer
            lib.llama_log_set(self._silent, ffi.NULL)
            laps, cpu = [perf_counter()], process_time()
            n_bytes = lib.llama_state_get_size(c_context)
            self._refuse_larger(n_bytes)
            n = lib.llama_state_get_data(c_context, self._view, n_bytes)
            laps.append(perf_counter())
            lib.llama_free(c_context)
            lib.llama_model_free(c_model)
            laps.append(perf_counter())
            c_params, keep = fill_model_params(self._library, ffi, lib, model_params(placement))
            c_model = lib.llama_model_load_from_file(self._path, c_params)
            if not c_model:
                raise SystemExit(f"the library cannot place {os.fsdecode(self._path)} by itself")
            laps.append(perf_counter())
            c_context_params = lib.llama_context_default_params()
            fill_context_params(
                c_context_params, context_params(placement, embeddings=False), self._library.profile.context_fields
            )
            c_context = lib.llama_init_from_model(c_model, c_context_params)
            if not c_context:
                raise SystemExit("the library cannot build a context by itself")
            laps.append(perf_counter())
            n_set = lib.llama_state_set_data(c_context, self._view, n)
            laps.append(perf_counter())
            times = Times(laps[-1] - laps[0], process_time() - cpu)
            lib.llama_log_set(opened._log_callback, ffi.NULL)  # noqa: SLF001 - put back what the library module holds
            model._pointer, model.owned.keep = c_model, keep  # noqa: SLF001
            model._vocab = lib.llama_model_get_vocab(c_model)  # noqa: SLF001
            context._pointer = c_context  # noqa: SLF001
        if not n == n_set == n_bytes:
            raise SystemExit(f"the bare calls announced {n_bytes} bytes, wrote {n}, read {n_set}")
        self.n_bytes = n
        self._note(BARE_STAGES, laps)
        return times

    def _note(self, names: Sequence[str], laps: Sequence[float]) -> None:
        """Keep the times of stages, ms."""
        for name, (start, end) in zip(names, itertools.pairwise(laps), strict=True):
            self.stages.setdefault(name, []).append((end - start) * 1e3)

    def _saved(self, context: Context) -> int:
        size = state_size(context)
        self._refuse_larger(size)
        self.n_bytes = n = state_get(context, self._buffer[:size].data)
        return n

    def _refuse_larger(self, n_bytes: int) -> None:
        if n_bytes > self._buffer.size:
            raise SystemExit(f"the state has grown to {n_bytes} bytes, and the buffer holds {self._buffer.size}")


class BarePinned(Bare):
    """The same from the session's copy of the weights, by what `llama_native` has for each call."""

    def switch(self, placement: Placement) -> Times:
        """Move."""
        engine, params = self._engine, model_params(placement)
        placed, copy = engine._placed, engine.copy  # noqa: SLF001
        if placed is None or placed.context is None or copy is None:
            raise AssertionError("a session of this tier has a copy")
        laps, cpu = [perf_counter()], process_time()
        n = self._saved(placed.context)
        laps.append(perf_counter())
        placed.context.close()
        placed.model.close()
        laps.append(perf_counter())
        placed.params, placed.model = params, load_user_model(self._library, copy.weights, params)
        laps.append(perf_counter())
        placed.context = context = Context(placed.model, context_params(placement, embeddings=False))
        laps.append(perf_counter())
        state_set(context, self._buffer[:n].data)
        laps.append(perf_counter())
        times = Times(laps[-1] - laps[0], process_time() - cpu)
        self._note(BARE_STAGES, laps)
        return times


class BareResident(Bare):
    """The state alone, from one context that is there to the other."""

    def switch(self, placement: Placement) -> Times:
        """Move to the placement that is kept."""
        engine = self._engine
        here, (there,) = engine._placed, engine._kept  # noqa: SLF001
        if here is None or here.context is None or there.context is None or there.params != model_params(placement):
            raise AssertionError("a session of this tier keeps the other placement, with its context")
        laps, cpu = [perf_counter()], process_time()
        n = self._saved(here.context)
        laps.append(perf_counter())
        there.context.clear()
        laps.append(perf_counter())
        state_set(there.context, self._buffer[:n].data)
        laps.append(perf_counter())
        times = Times(laps[-1] - laps[0], process_time() - cpu)
        engine._placed, engine._kept = there, [here]  # noqa: SLF001
        self._note(("saving", "building", "restoring"), laps)
        return times


class BareOwn(Bare):
    """The library's own call alone; what it needs of the session's copy is given to it."""

    def switch(self, placement: Placement) -> Times:
        """Move."""
        context, mode = self._engine.live_context, model_params(placement).split_mode.value
        laps, cpu = [perf_counter()], process_time()
        is_moved = context.native_switch(mode, placement.tensor_split)
        laps.append(perf_counter())
        times = Times(laps[-1] - laps[0], process_time() - cpu)
        if not is_moved:
            raise SystemExit(f"the library cannot go to {placement.mode.value} mode by itself")
        self._engine.moved(placement)
        self._note(("switching_natively",), laps)
        return times


@dataclass(frozen=True, slots=True)
class Way:
    """Where a route's weights come from, what its bare calls are, and who does our switch."""

    tier: WeightsTier
    bare: type[Bare]
    via: Route = Route.COMPOSED


_WAYS: Mapping[str, Way] = {
    "layer-layer": Way(WeightsTier.FILE, Bare),
    "layer-tensor": Way(WeightsTier.FILE, Bare),
    "layer-tensor-pinned": Way(WeightsTier.PINNED, BarePinned),
    "layer-tensor-resident": Way(WeightsTier.RESIDENT, BareResident),
    "layer-tensor-native": Way(WeightsTier.FILE, BareOwn, Route.NATIVE),
    "layer-tensor-pinned-native": Way(WeightsTier.PINNED, BareOwn, Route.NATIVE),
}


class LeftOut(Exception):
    """A route that cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long one switch took: on the clock and of the processors [seconds]."""

    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class Samples:
    """The rounds of one model and route."""

    bare: list[Times] = field(default_factory=list)
    positions: list[Times] = field(default_factory=list)
    bytes: list[Times] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    bare_stages: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median of paired ratios and its interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Pair by round."""
        ratios = np.array(ours) / np.array(theirs)
        drawn = np.random.default_rng(0).integers(0, len(ratios), (N_RESAMPLES, len(ratios)))
        low, high = np.quantile(np.median(ratios[drawn], axis=1), QUANTILES)
        return cls(round(float(np.median(ratios)), 4), round(float(low), 4), round(float(high), 4))


def main() -> int:
    """Run the benchmark."""
    options = _options()
    _use_fresh_pages()
    library = Library.open(options.lib, env=os.environ)
    runs, left_out = list[dict[str, Any]](), list[dict[str, str]]()
    for name, path in _models(options.models):
        for route in (one for one in _routes(library) if options.k in one):
            try:
                runs.append(_run(library, name, path, route, options))
            except LeftOut as why:
                left_out.append({"model": name, "route": route, "why": str(why)})
    if not runs:
        raise SystemExit(left_out[0]["why"] if left_out else f"no route is called {options.k!r}")
    files = {run["model"]: run["median_ms"]["positions"] for run in runs if run["route"] == "layer-tensor"}
    for run in runs:
        if run["route"] not in {"layer-layer", "layer-tensor"} and run["model"] in files:
            run["times_faster"] = round(files[run["model"]] / run["median_ms"]["positions"], 2)
    worst = max(runs, key=lambda run: run["overhead_ratio"])
    summary = {
        "library": library.version or library.path.name,
        "pairs": options.pairs,
        "overhead_ratio": worst["overhead_ratio"],
        "interval": worst["interval"],
        "bytes_ratio": max(run["bytes_ratio"] for run in runs),
        "runs": runs,
        "left_out": left_out,
    }
    if options.json:
        print(json.dumps(summary))
    else:
        _show(summary)
    return 0


def _routes(library: Library) -> Sequence[str]:
    """Name the routes that a build has."""
    return [name for name, way in _WAYS.items() if way.via is Route.COMPOSED or library.has("native-switch")]


def _use_fresh_pages() -> None:
    ffi = cffi.FFI()
    ffi.cdef("int mallopt(int, int);")
    ffi.dlopen(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--pairs", type=int, default=60, help="rounds that count")
    parser.add_argument("--models", nargs="+", default=["smollm2", _BIG], help="smollm2, big-500, or GGUF files")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("-k", default="", help="only routes whose name holds this")
    parser.add_argument("--lib", type=Path, help="the libllama; default: the first that is found")
    return parser.parse_args()


def _models(names: Sequence[str]) -> list[tuple[str, Path]]:
    found = []
    for name in names:
        path = make_big(default_folder(), 500) if name == _BIG else Path(name)
        if name == "smollm2":
            path = small_model()
        if not path.is_file():
            raise SystemExit(f"{path} is not there; ci/model smollm2 fetches the small model")
        found.append((name, path))
    return found


def _run(library: Library, name: str, path: Path, route: str, options: argparse.Namespace) -> dict[str, Any]:
    here = Placement(
        mode=SplitMode.LAYER,
        devices=("CPU", "CPU"),
        tensor_split=(1.0, 1.0),
        n_ctx=-(-(options.tokens + _MOVES * (options.pairs + WARM_UP) + 8) // 256) * 256,
        n_batch=512,
        flash_attn=FlashAttn.ON,
        n_threads=1,
        n_threads_batch=1,
    )
    there = here.changed(tensor_split=(3.0, 1.0)) if route == "layer-layer" else here.changed(mode=SplitMode.TENSOR)
    tokens = [int(t) for t in np.random.default_rng(0).integers(5, 900, options.tokens)]
    samples = Samples()
    way = _WAYS[route]
    with Session.open(path, here, library=library, prober=None, weights=way.tier) as session:
        session.prefill(tokens)
        bare = way.bare(library, session)
        here = session.placement
        there = there.changed(n_ctx=here.n_ctx)
        _make_ready(session, way, (there, here))
        arms: dict[str, Callable[[Placement], Times]] = {
            "bare": bare.switch,
            "positions": lambda target: _switch(session, target, Proof.POSITIONS, samples, way.via),
            "bytes": lambda target: _switch(session, target, Proof.BYTES, None, way.via),
        }
        orders = list(itertools.permutations(arms))
        for number in range(-WARM_UP, options.pairs):
            if number == 0:
                samples.stages.clear()
                bare.stages.clear()
            for arm in orders[number % len(orders)]:
                times = _there_and_back(session, arms[arm], (there, here))
                if number >= 0:
                    getattr(samples, arm).append(times)
        last = session.last_switch
        samples.bare_stages = bare.stages
    return {
        "model": name,
        "route": route,
        "tokens": options.tokens,
        "state_bytes": last.state_bytes if last else None,
        "weight_bytes": last.weight_bytes if last else None,
        **_ratios(samples),
    }


def _make_ready(session: Session, way: Way, route: Sequence[Placement]) -> None:
    """Let a tier have what it needs; LeftOut where it does not get it."""
    copy = session._live.engine.copy  # noqa: SLF001 - nobody else has to wait for it
    if copy is not None and not copy.wait(_COPY_S):
        raise LeftOut(f"there is no copy of the weights: {copy.why}")
    for target in (*route, *route) if way.tier is not WeightsTier.FILE else ():
        _switch(session, target, Proof.POSITIONS, None)
    last = session.last_switch
    if last is not None and last.weights is not way.tier:
        raise LeftOut(f"weights came from {last.weights}: {last.weights_reason}")


def _there_and_back(session: Session, move: Callable[[Placement], Times], route: Sequence[Placement]) -> Times:
    """Return the mean of the moves of a round."""
    times = []
    for placement in route:
        times.append(move(placement))
        for _token in session.generate(n=1, sampler=_GREEDY):
            pass
    return Times(statistics.mean(t.wall_s for t in times), statistics.mean(t.cpu_s for t in times))


def _switch(
    session: Session, target: Placement, proof: Proof, samples: Samples | None, via: Route = Route.COMPOSED
) -> Times:
    started, cpu = perf_counter(), process_time()
    outcome = session.switch(target, proof=proof, via=via)
    times = Times(perf_counter() - started, process_time() - cpu)
    if outcome.status is not SwitchStatus.SWITCHED:
        raise SystemExit(f"a switch ended {outcome.status.value}: {outcome.reason}")
    if samples is not None:
        for stage in _STAGES:
            samples.stages.setdefault(stage, []).append(getattr(outcome.stages_ms, stage) or 0.0)
        spent = sum(getattr(outcome.stages_ms, stage) or 0.0 for stage in _STAGES)
        samples.stages.setdefault("between", []).append(times.wall_s * 1e3 - spent)
    return times


def _ratios(samples: Samples) -> dict[str, Any]:
    bare, ours, proved = samples.bare, samples.positions, samples.bytes
    overhead = Ratio.of([t.wall_s for t in ours], [t.wall_s for t in bare])
    more = Ratio.of([t.wall_s for t in proved], [t.wall_s for t in ours])
    return {
        "overhead_ratio": overhead.median,
        "interval": [overhead.low, overhead.high],
        "bytes_ratio": more.median,
        "bytes_interval": [more.low, more.high],
        "cpu_ratio": asdict(Ratio.of([t.cpu_s for t in ours], [t.cpu_s for t in bare])),
        "bytes_cpu_ratio": asdict(Ratio.of([t.cpu_s for t in proved], [t.cpu_s for t in ours])),
        "median_ms": {
            name: round(statistics.median(t.wall_s for t in times) * 1e3, 2)
            for name, times in (("bare", bare), ("positions", ours), ("bytes", proved))
        },
        "stages_ms": _medians(samples.stages),
        "bare_stages_ms": _medians(samples.bare_stages),
    }


def _medians(stages: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 3) for name, values in stages.items()}


def _show(summary: dict[str, Any]) -> None:
    print(f"{summary['library']}, {summary['pairs']} pairs")
    for run in summary["runs"]:
        low, high = run["interval"]
        medians = run["median_ms"]
        print(
            f"{run['model']:10} {run['route']:26} overhead {run['overhead_ratio']:.3f} [{low:.3f}, {high:.3f}]"
            f"  cpu {run['cpu_ratio']['median']:.3f}  bytes x{run['bytes_ratio']:.3f}"
            f"  ({medians['bare']:.1f} / {medians['positions']:.1f} / {medians['bytes']:.1f} ms)"
            + (f"  {run['times_faster']:.1f} times as fast as file" if "times_faster" in run else "")
        )
        for whose in ("stages_ms", "bare_stages_ms"):
            print("           " + "  ".join(f"{name} {ms:.2f}" for name, ms in run[whose].items()))
    for one in summary["left_out"]:
        print(f"{one['model']:10} {one['route']:26} left out: {one['why']}")


if __name__ == "__main__":
    sys.exit(main())
