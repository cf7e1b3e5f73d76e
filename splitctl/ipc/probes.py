"""Gives the verdict on a placement: from the file of verdicts, else from a trial in a child, which may die of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from splitctl.errors import BadModelFile, Cancelled, DeadlineExceeded, FileChanged, WorkerLost
from splitctl.ipc.jobs import Failure, ProbeRequest
from splitctl.ipc.process import run_job
from splitctl.ipc.wire import MessageInvalid
from splitctl.model.facts import ModelFacts
from splitctl.model.identity import model_digest, statuses
from splitctl.placement import Placement, SplitMode
from splitctl.places import cache_folder
from splitctl.probing import ProbeKey, ProbeVerdict, Verdict, VerdictCache, is_of_the_target, verdict_of_death
from splitctl.probing.verdicts import OWN_CALL

#: A trial that says nothing for so long hangs [seconds]; a step of it is a load, or a few tokens.
DEADLINE_S = 300.0


def verdicts_file() -> Path:
    """Name the file of verdicts, in the user's cache folder; it may not exist."""
    return cache_folder() / "probes.json"


@dataclass(frozen=True, slots=True)
class Prober:
    """Gives the verdict on a placement; what a session's check calls.

    Attributes:
        library: the library file that the session uses.
        env: the environment of the children.
        cache: the file of verdicts; None: a trial every time.
        device_names: the devices behind a placement that names none.
        rpc: RPC servers, HOST:PORT each. One that serves this process answers no child: run the trials that may be
            needed before a model is placed.
        is_cancelled: asked all the while a child runs, a silent one too; a cancelled trial gives INCONCLUSIVE.
        deadline_s: longest silence of a child, seconds.
    """

    library: Path
    env: Mapping[str, str] = field(repr=False)
    cache: VerdictCache | None = None
    device_names: Sequence[str] = ()
    rpc: tuple[str, ...] = ()
    is_cancelled: Callable[[], bool] = lambda: False
    deadline_s: float = DEADLINE_S

    def __call__(self, model_path: Path, placement: Placement, facts: ModelFacts) -> ProbeVerdict:
        """Give the verdict on a placement of a GGUF file, remembered or fresh."""
        return self._verdict(ProbeRequest(model_path, self.library, placement, self.rpc), facts)

    def known(self, placement: Placement, facts: ModelFacts) -> ProbeVerdict | None:
        """Give the verdict that is remembered, from a trial or from `verify`; None without one."""
        return self._known(self._key(placement, facts), facts)

    def why_no_copy(self, placement: Placement, facts: ModelFacts, *, known_only: bool = False) -> str:
        """Say why a placement's model cannot be made from a copy of its weights; "" where it can.

        Args:
            placement: of it only what decides how the tensors lie counts.
            facts: the model.
            known_only: whether to go without a trial.
        """
        plain = Placement(
            mode=placement.mode,
            devices=placement.devices,
            tensor_split=placement.tensor_split,
            main_gpu=placement.main_gpu,
            n_gpu_layers=placement.n_gpu_layers,
            flash_attn=placement.flash_attn,
        )
        request = ProbeRequest(facts.path, self.library, plain, self.rpc, of_copy=True)
        verdict = self._known(self._key(plain, facts, of_copy=True), facts)
        if verdict is None and not known_only:
            verdict = self._verdict(request, facts)
        what = f"{facts.architecture} in {placement.mode.value} mode"
        if verdict is None:
            return f"whether this build can make {what} from the copy of the weights has not been tried yet"
        if verdict.verdict is Verdict.OK:
            return ""
        could = "could not be tried" if verdict.verdict is Verdict.INCONCLUSIVE else "is refused"
        return f"{what} from the copy of the weights {could} with this build: {verdict.why}"

    def why_no_own_call(self, now: Placement, target: Placement, facts: ModelFacts, *, known_only: bool = False) -> str:
        """Say why the library's own call is not known to move a context from one placement to another rightly.

        Args:
            now: the one placement.
            target: the other, which differs in its mode or tensor split alone. One trial goes both ways.
            facts: the model.
            known_only: whether to go without a trial.

        Returns:
            "" where it does.
        """
        first, second = sorted((now, target), key=_from_layer_on)
        request = ProbeRequest(facts.path, self.library, second, self.rpc, moved_from=first)
        verdict = self._known(self._key(second, facts, moved_from=first), facts)
        if verdict is None and not known_only:
            verdict = self._verdict(request, facts)
        modes = f"{now.mode.value} and {target.mode.value} mode"
        what = f"the library's own call between {modes} for {facts.architecture}"
        if verdict is None:
            return f"{what} has not been tried yet"
        if verdict.verdict is Verdict.OK:
            return ""
        could = "could not be tried" if verdict.verdict is Verdict.INCONCLUSIVE else "is refused with this build"
        return f"{what} {could}: {verdict.why}"

    def _verdict(self, request: ProbeRequest, facts: ModelFacts) -> ProbeVerdict:
        key = self._key(request.placement, facts, of_copy=request.of_copy, moved_from=request.moved_from)
        if (known := self._known(key, facts)) is not None:
            return known
        before = statuses(facts.files)
        fresh = self._try(request)
        if None in before or statuses(facts.files) != before:
            return ProbeVerdict(Verdict.INCONCLUSIVE, f"the files of {facts.path} changed during the try")
        if self.cache is not None:
            # A full or read-only cache folder costs another trial next time, and is no reason to refuse a switch.
            with suppress(OSError, BadModelFile, FileChanged):
                self.cache.put(key, fresh, lambda: model_digest(facts.files))
        return fresh

    def _known(self, key: ProbeKey, facts: ModelFacts) -> ProbeVerdict | None:
        if self.cache is None:
            return None
        with suppress(BadModelFile, FileChanged):
            return self.cache.get(key, lambda: model_digest(facts.files))
        return None

    def _key(
        self,
        placement: Placement,
        facts: ModelFacts,
        *,
        of_copy: bool = False,
        moved_from: Placement | None = None,
    ) -> ProbeKey:
        key = ProbeKey.of(self.library, facts, placement, self.device_names, self.rpc)
        if moved_from is not None:
            shares = ":".join(map(str, moved_from.normalise().tensor_split or ())) or "even"
            return replace(key, trial=f"{OWN_CALL} {moved_from.mode.value} {shares}, {placement.n_gpu_layers} layers")
        return replace(key, trial=f"{placement.n_gpu_layers} layers") if of_copy else key

    def _try(self, request: ProbeRequest) -> ProbeVerdict:
        try:
            end = run_job(request, env=self.env, deadline_s=self.deadline_s, is_cancelled=self.is_cancelled)
        except Cancelled:
            return ProbeVerdict(Verdict.INCONCLUSIVE, "the trial was cancelled")
        except (OSError, MessageInvalid) as error:
            return ProbeVerdict(Verdict.INCONCLUSIVE, f"no child process could try it ({error})")
        match end.error:
            case WorkerLost() as lost:
                return verdict_of_death(lost.how, end.stage, lost.log_tail)
            case DeadlineExceeded() as lost:
                verdict = Verdict.DIES if is_of_the_target(end.stage) else Verdict.INCONCLUSIVE
                return ProbeVerdict(verdict, f"it hangs: {lost}")
            case Failure() as failure:
                # What the mode does comes as a verdict: this is the file, the library, the flags, or a fault of ours.
                return ProbeVerdict(Verdict.INCONCLUSIVE, failure.message)
        return ProbeVerdict.from_json(end.body)


def _from_layer_on(placement: Placement) -> tuple[bool, str, tuple[float, ...]]:
    """Order two placements of a move, so that both directions are one trial, which begins in layer mode."""
    plain = placement.normalise()
    return plain.mode is not SplitMode.LAYER, plain.mode.value, plain.tensor_split or ()
