"""Compare what a kept profile predicts with running it: seconds of every choice, and which one is best.

    python -m tools.check_bench [--json] [--quick] [--points N] [--seconds S] [--fresh] [--models NAME|FILE ...]
                                [--device CPU,CPU] [-t N] [--lib PATH]

For each model the profile of `splitctl bench` is taken, or made (--fresh: always made). Then points (tokens of a
prompt, tokens of an answer) are chosen, over all of the band that fits into the time: for each choice that the profile
calls best anywhere, points where it does. At each point every choice is really run in one session, with an empty cache:
read in its first mode, switch where it does, generate in its second. A round goes over all points in an order of its
own; choices follow each other so that each begins in the mode in which the one before ended, and no switch is made that
is not measured. What is measured is the median of the rounds.

Models: smollm2 (ci/model smollm2), big-500 (a dummy of 500 MB), or a GGUF file; without any, the first two.

Exit code 0: at every point every choice was predicted within 15 %, and the choice that was predicted to be the best is
the best that was measured, or takes at most 5 % longer; 1: not so; 2: nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from llama_native import Library
from splitctl import Placement, SamplerSpec, Session, SplitMode, SwitchStatus
from splitctl.ipc.profiles import KeptProfile, day_of, look_up
from splitctl.model.facts import read_facts
from splitctl.planning.advice import advise
from splitctl.planning.cost import Choice, Work
from splitctl.planning.profile import ModeNotMeasured, Profile
from splitctl.probing.computing import numbers_as_tokens
from splitctl.probing.passage import PASSAGE
from tools.make_dummies import make_big
from tools.places import CHECKOUT, default_folder, small_model, usable_library

#: How far a prediction may be off, and how much longer than the best the chosen one may take [share].
MAX_ERROR, MAX_REGRET = 0.15, 0.05
#: Shortest prompt and answer: less takes no time that can be measured [tokens].
MIN_PROMPT, MIN_ANSWER = 64, 32
#: Neighbours among the points that are looked at differ by this factor.
_STEP = 2**0.5
#: Least context of the session [tokens].
_ROOM = 8192
#: Repetitions that time is planned for, and the most that are made.
_ROUNDS, _MAX_ROUNDS = 3, 15
#: The order in which the choices of a point need no switch between them, begun in layer mode.
CYCLE = (Choice.LAYER, Choice.LAYER_TO_TENSOR, Choice.TENSOR, Choice.TENSOR_TO_LAYER)
_BIG = "big-500"


@dataclass(frozen=True, slots=True)
class Point:
    """Some work, with what a profile says of it.

    Attributes:
        prompt: tokens to read.
        generate: tokens to generate.
        predicted: seconds of every choice.
    """

    prompt: int
    generate: int
    predicted: Mapping[Choice, float]

    @property
    def best(self) -> Choice:
        """The choice that is predicted to take least."""
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def seconds(self) -> float:
        """How long it takes to run all of them once."""
        return sum(self.predicted.values())

    def distance(self, other: Point) -> float:
        """How far another point lies, in factors of two."""
        return math.hypot(math.log2(self.prompt / other.prompt), math.log2(self.generate / other.generate))


@dataclass(slots=True)
class Compared:
    """A point that was run.

    Attributes:
        point: the point.
        runs: seconds of every run of each choice.
    """

    point: Point
    runs: dict[Choice, list[float]] = field(default_factory=dict)

    @property
    def measured(self) -> Mapping[Choice, float]:
        """Seconds of each choice: the median of its runs."""
        return {choice: statistics.median(runs) for choice, runs in self.runs.items()}

    @property
    def errors(self) -> Mapping[Choice, float]:
        """How much more was predicted than measured, as a share of the measured."""
        return {choice: self.point.predicted[choice] / seconds - 1.0 for choice, seconds in self.measured.items()}

    @property
    def worst_error(self) -> float:
        """The largest error of a choice, without its sign."""
        return max(abs(error) for error in self.errors.values())

    @property
    def best(self) -> Choice:
        """The choice that took least."""
        return min(self.measured, key=self.measured.__getitem__)

    @property
    def regret(self) -> float:
        """How much longer the choice took that was predicted to be the best than the one that was, as a share."""
        return self.measured[self.point.best] / self.measured[self.best] - 1.0

    def to_json(self) -> dict[str, Any]:
        """Give plain values."""
        return {
            "prompt": self.point.prompt,
            "generate": self.point.generate,
            "predicted_s": _named(self.point.predicted),
            "measured_s": _named(self.measured),
            "runs_s": _named(self.runs),
            "errors": _named(self.errors),
            "worst_error": self.worst_error,
            "predicted_best": self.point.best.value,
            "measured_best": self.best.value,
            "regret": self.regret,
        }


def _named(values: Mapping[Choice, Any]) -> dict[str, Any]:
    return {choice.value: value for choice, value in values.items()}


# ---- which points ----


def candidates(profile: Profile, n_ctx: int) -> Iterator[Point]:
    """Give the points that a context holds, with what the profile says of them; ModeNotMeasured where it cannot."""
    for prompt in _sizes(MIN_PROMPT, n_ctx):
        for generate in _sizes(MIN_ANSWER, n_ctx - prompt):
            advice = advise(profile, Work(prompt, generate))
            if advice.comparison is None:
                raise ModeNotMeasured("mode", "every", advice.sentence)
            yield Point(prompt, generate, dict(advice.seconds))


def _sizes(low: int, high: int) -> Iterator[int]:
    size = float(low)
    while round(size) <= high:
        yield round(size)
        size *= _STEP


def chosen(found: Sequence[Point], n: int, budget_s: float) -> list[Point]:
    """Choose points over the band: of each choice that is best anywhere as many, as far apart as the time allows.

    Args:
        found: points to choose from.
        n: how many.
        budget_s: how long all of them together may take to run once, seconds.

    Returns:
        Fewer than ``n`` where the time, or the points, do not suffice.
    """
    taken: list[Point] = []
    cheap = sorted(one.seconds for one in found)
    n = min(n, len(cheap), int(budget_s / cheap[0]))
    left_s, cheap_s = budget_s, statistics.fmean(cheap[:n]) if n else 0.0
    groups = [[one for one in found if one.best is choice] for choice in Choice]
    groups = [group for group in groups if group]
    while len(taken) < n and groups:
        group = groups.pop(0)
        # One point may take twice its share, as long as cheap ones still fit after it.
        n_after = n - len(taken) - 1
        share = min(2 * left_s / (n_after + 1), left_s - n_after * cheap_s)
        fits = [one for one in group if one not in taken and one.seconds <= share]
        if not fits and not any(one in taken for one in group):
            fits = [one for one in (min(group, key=lambda point: point.seconds),) if one.seconds <= left_s / 2]
        if not fits:
            continue
        point = max(fits, key=lambda one: (min((one.distance(other) for other in taken), default=0.0), one.seconds))
        taken.append(point)
        left_s -= point.seconds
        groups.append(group)
    return sorted(taken, key=lambda one: (one.prompt, one.generate))


# ---- running them ----


class Runner:
    """Runs choices in one session, which goes to and fro between two placements."""

    def __init__(self, session: Session, placements: Mapping[SplitMode, Placement]) -> None:
        """Begin; the session is in one of the placements."""
        self._session = session
        self._placements = placements
        model = session.model
        self._text = model.tokenize(PASSAGE) if model.has_tokenizer else numbers_as_tokens(model, 1024)

    def run(self, choice: Choice, prompt: int, generate: int) -> float:
        """Do some work with an empty cache; returns its seconds. A switch before it is not counted."""
        session = self._session
        self.move(choice.reads_in)
        if session.n_held(0):
            session.remove_sequence(0)
        tokens = (self._text * (prompt // len(self._text) + 1))[:prompt]
        started = perf_counter()
        session.prefill(tokens)
        self.move(choice.generates_in)
        session.begin(0, SamplerSpec(temp=0.0))
        for _ in range(generate):
            (token,) = session.step([0]).values()
            if isinstance(token, Exception):
                raise token
        return perf_counter() - started

    def move(self, mode: SplitMode) -> None:
        """Be in a mode."""
        if self._session.placement.mode is mode:
            return
        outcome = self._session.switch(self._placements[mode])
        if outcome.status is not SwitchStatus.SWITCHED:
            raise SystemExit(f"a switch to {mode.value} mode ended {outcome.status.value}: {outcome.reason}")


def measure(runner: Runner, points: Sequence[Point], n_rounds: int, until: float) -> list[Compared]:
    """Run every choice of every point in rounds, at least once, and as long as the time allows.

    Args:
        runner: what runs.
        points: the points.
        n_rounds: most rounds.
        until: when no other round begins that would not end before it, on the clock of `perf_counter`.
    """
    compared = [Compared(point) for point in points]
    order = random.Random(0)  # noqa: S311 - an order, and the same one every time
    took = 0.0
    for number in range(n_rounds):
        if number and perf_counter() + took > until:
            break
        began = perf_counter()
        for one in order.sample(compared, len(compared)):
            for choice in CYCLE:
                one.runs.setdefault(choice, []).append(runner.run(choice, one.point.prompt, one.point.generate))
        took = perf_counter() - began
        _tell(f"  round {number + 1}: {took:,.0f} s")
    return compared


# ---- the profile ----


def profile_of(
    model: Path, library: Library, placement: Placement, words: Sequence[str], *, is_fresh: bool
) -> KeptProfile:
    """Take the kept profile of a model, or let `splitctl bench` make it.

    Raises:
        SystemExit: there is none, and none could be made.
    """

    def look() -> tuple[KeptProfile | None, str]:
        names = tuple(device.name for device in library.devices(memory=False))
        found = look_up(library.path, read_facts(model), placement, names)
        return found.kept, found.why

    kept, _ = look()
    if kept is None or is_fresh:
        command = [sys.executable, "-m", "splitctl", "bench", "-m", str(model), "--lib", str(library.path), *words]
        _tell("  " + " ".join(command[2:]))
        began = perf_counter()
        done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise SystemExit(f"splitctl bench ended with exit status {done.returncode}; run it by hand to see why")
        _tell(f"  measured in {perf_counter() - began:,.0f} s")
        kept, why = look()
        if kept is None:
            raise SystemExit(f"splitctl bench kept no profile: {why}")
    return kept


def check(model: Path, kept: KeptProfile, library: Library, placement: Placement, given: argparse.Namespace) -> Any:
    """Compare one model; returns what was found as plain values."""
    profile = kept.profile
    n_ctx_train = read_facts(model).n_ctx_train
    n_ctx = min(n_ctx_train, given.ctx)
    found = list(candidates(profile, n_ctx))
    # All points once, rather than some of them several times.
    tried = [chosen(found, given.points, given.seconds / n) for n in range(_ROUNDS, 0, -1)]
    points = max(tried, key=len)
    if not points:
        raise SystemExit(f"no point can be run within {given.seconds:g} s: give more --seconds")
    # A context costs a switch its size: one such as people have, whatever the points need of it.
    room = max(min(n_ctx_train, _ROOM), *(point.prompt + point.generate + 8 for point in points))
    placements = {
        mode: placement.changed(mode=mode, n_ctx=room, n_ubatch=profile.of(mode).n_ubatch)
        for mode in (SplitMode.LAYER, SplitMode.TENSOR)
    }
    until = perf_counter() + given.seconds
    _tell(f"  {len(points)} points, {sum(point.seconds for point in points):,.0f} s a round as predicted")
    with Session.open(model, placements[SplitMode.LAYER], library=library) as session:
        runner = Runner(session, placements)
        for choice in CYCLE:
            # Threads wake, clocks rise, buffers are made, trials are run.
            runner.run(choice, MIN_PROMPT, 2)
        compared = measure(runner, points, _MAX_ROUNDS, until)
    nowhere = [choice.value for choice in Choice if all(one.best is not choice for one in found)]
    return {
        "model": kept.model_name,
        "profile": day_of(kept),
        "noise": max(one.noise for one in profile.modes),
        "best_nowhere": nowhere,
        "n_ctx": n_ctx,
        "rounds": len(compared[0].runs[CYCLE[0]]),
        "points": [one.to_json() for one in compared],
        **summary(compared),
    }


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Count what holds: points within the bound, choices that are right; and say so in one sentence."""
    within = sum(one.worst_error <= MAX_ERROR for one in compared)
    right = sum(one.regret <= MAX_REGRET for one in compared)
    errors = [abs(error) for one in compared for error in one.errors.values()]
    sentence = (
        f"{within} of {len(compared)} points were predicted within {MAX_ERROR:.0%} (all {len(errors)} predictions: "
        f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}), and {right} of {len(compared)} choices are "
        f"the best or at most {MAX_REGRET:.0%} from it (worst {max(one.regret for one in compared):.1%})"
    )
    return {"within": within, "right": right, "passed": within == right == len(compared), "sentence": sentence}


# ---- saying it ----


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lay out the points of one model, a line each."""
    yield (
        f"{'prompt':>7} {'answer':>7}  "
        + "  ".join(f"{choice.value:>22}" for choice in Choice)
        + f"  {'predicted best':>15} {'measured best':>15} {'longer':>7}"
    )
    for one in found["points"]:
        cells = (
            f"{one['predicted_s'][name]:7.2f} {one['measured_s'][name]:7.2f} {one['errors'][name]:+6.1%}"
            for name in (choice.value for choice in Choice)
        )
        yield (
            f"{one['prompt']:7,} {one['generate']:7,}  "
            + "  ".join(f"{cell:>22}" for cell in cells)
            + f"  {one['predicted_best']:>15} {one['measured_best']:>15} {one['regret']:7.1%}"
        )
    yield "seconds as predicted, as measured, and the error of the prediction"
    if found["best_nowhere"]:
        yield f"best nowhere up to {found['n_ctx']:,} tokens, as predicted: {', '.join(found['best_nowhere'])}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _model(name: str) -> Path:
    if name == "smollm2":
        path = small_model()
        if not path.exists():
            raise SystemExit(f"{path} is not there: run ci/model smollm2")
        return path
    if name == _BIG:
        return make_big(default_folder(), 500)
    path = Path(name)
    if not path.exists():
        raise SystemExit(f"{path} is not there; name smollm2, {_BIG} or a GGUF file")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a quick bench, and 4 points in 45 s")
    parser.add_argument("--points", type=int, help="points of each model (default 12)")
    parser.add_argument("--seconds", type=float, help="time to run the points of a model in (default 450)")
    parser.add_argument("--fresh", action="store_true", help="measure again, whatever is kept")
    parser.add_argument("--budget", type=float, help="time of splitctl bench where it measures")
    parser.add_argument("--models", nargs="+", default=["smollm2", _BIG], help="smollm2, big-500, or GGUF files")
    parser.add_argument("--ctx", type=int, default=4096, help="most tokens of a prompt and its answer (default 4096)")
    parser.add_argument("--device", default="CPU,CPU", help="devices (default CPU,CPU)")
    parser.add_argument("-t", "--threads", type=int, default=0, help="threads (default: one for each core)")
    parser.add_argument("--lib", type=Path, help="the libllama; default: the first that is found")
    given = parser.parse_args(arguments)
    given.points = given.points or (4 if given.quick else 12)
    given.seconds = given.seconds or (45.0 if given.quick else 450.0)
    placement = Placement(devices=tuple(given.device.split(",")), n_threads=given.threads)
    words = ["--device", given.device, *(["-t", str(given.threads)] if given.threads else [])]
    words += ["--quick"] if given.quick else []
    words += ["--budget", f"{given.budget:g}"] if given.budget else []
    models = [(name, _model(name)) for name in given.models]
    library = Library.open(usable_library(given.lib), env=os.environ)
    told = []
    for name, path in models:
        _tell(f"{name}:")
        kept = profile_of(path, library, placement, words, is_fresh=given.fresh)
        try:
            found = check(path, kept, library, placement, given)
        except ModeNotMeasured as error:
            _tell(f"  nothing to compare: {error}")
            return 2
        told.append(found)
        if not given.json:
            print(f"{name}, measured {found['profile']}, {found['rounds']} rounds")
            print("\n".join(table(found)))
            print(found["sentence"], flush=True)
    if given.json:
        print(json.dumps({"library": library.version, "models": told}))
    return 0 if all(found["passed"] for found in told) else 1


if __name__ == "__main__":
    sys.exit(main())
