"""The trial itself: one model in layer mode and in the placement asked for, compared. Runs in a child, which may die.

What is tried is what is known to go wrong in some build for some architecture: batches of exactly one token and of
several, after a prompt and after a restore; logits that are silently wrong; a state that does not come back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llama_native import (
    CallFailed,
    Library,
    LoadCancelled,
    Model,
    TensorUnknown,
    load_user_model,
)
from splitctl.engine.engine import model_params
from splitctl.engine.host_copy import HostCopy
from splitctl.placement import Placement, SplitMode
from splitctl.probing.comparing import Logits, in_another_order, is_sound, nmse, nmse_limit, widened
from splitctl.probing.computing import (
    ProbeCancelled,
    Wrong,
    put_back,
    why_failed,
)
from splitctl.probing.script import (
    NoReference,
    Script,
    encode,
    first_run,
    open_context,
    reference_run,
    run,
    script_of,
    shrunk,
)
from splitctl.probing.short_model import tried_short
from splitctl.probing.verdicts import ProbeVerdict, Verdict


def try_placement(
    library: Library,
    model_path: str,
    placement: Placement,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ProbeVerdict:
    """Try a placement and compare it with layer mode.

    Args:
        library: the open library.
        model_path: the GGUF.
        placement: the placement to try; its context is made smaller, the rest is as given.
        on_stage: told what is being done, so that a death can be placed.
        is_cancelled: asked between the steps.

    Returns:
        OK, WRONG, FAILS or INCONCLUSIVE; DIES is for the parent to say.

    Raises:
        ProbeCancelled: `is_cancelled` said so.
    """

    def stage(name: str) -> None:
        if is_cancelled():
            raise ProbeCancelled
        on_stage(name)

    def load(where: Placement, name: str) -> Model:
        def loading(_: float) -> bool:
            # A large model takes longer to load than a child may be silent.
            on_stage(name)
            return not is_cancelled()

        stage(name)
        return Model.load(library, model_path, model_params(where), progress=loading)

    target = shrunk(placement)
    reference = dataclasses.replace(target, mode=SplitMode.LAYER, tensor_split=None)
    try:
        with load(reference, "reference") as model:
            embeddings, wanted = reference_run(model, reference)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except (CallFailed, NoReference) as error:
        return _without_reference(error)
    try:
        with load(target, "target: loading") as model:
            script = script_of(model, target)
            got, state = first_run(model, target, script, embeddings=embeddings, stage=stage)
            numbers = _compare(wanted, got)
            if state is not None:
                numbers["state_bytes"] = float(len(state))
                _restored_runs(model, target, script, state, embeddings=embeddings, stage=stage)
        if numbers["nmse"] > nmse_limit(target.type_k, target.type_v) and state is not None and not embeddings:
            with load(reference, "reference again") as model:
                numbers["nmse_control"] = _noise(model, reference, wanted)
        _judge(numbers, target)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except Wrong as error:
        return ProbeVerdict(Verdict.WRONG, error.why, error.numbers)
    except CallFailed as error:
        why, is_short = why_failed(error)
        if is_short:
            return ProbeVerdict(Verdict.INCONCLUSIVE, f"not enough memory for the try ({why})")
        # What fails in layer mode too by now (a file that is gone, a device that is lost) is not the mode's doing.
        try:
            load(reference, "reference again").close()
        except LoadCancelled as cancelled:
            raise ProbeCancelled from cancelled
        except CallFailed as again:
            return _without_reference(again)
        return ProbeVerdict(Verdict.FAILS, why)
    return ProbeVerdict(Verdict.OK, numbers=numbers)


def try_copy(
    library: Library,
    model_path: str,
    placement: Placement,
    *,
    on_stage: Callable[[str], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ProbeVerdict:
    """Make the model from weights in memory, and demand to the bit what a load from the file computes there.

    Args:
        library: the open library.
        model_path: the GGUF.
        placement: the placement to try; its context is made smaller, the rest is as given.
        on_stage: told what is being done, so that a death can be placed.
        is_cancelled: asked between the steps.

    Returns:
        OK, WRONG, FAILS or INCONCLUSIVE; DIES is for the parent to say.

    Raises:
        ProbeCancelled: `is_cancelled` said so.
    """
    if not library.has("model-from-memory"):
        return ProbeVerdict(Verdict.FAILS, "it cannot make models from metadata")
    where = shrunk(placement)
    on_stage("reference")
    return tried_short(model_path, placement, lambda path: _compared(library, path, where, on_stage, is_cancelled))


def _compared(
    library: Library, path: str, where: Placement, on_stage: Callable[[str], None], is_cancelled: Callable[[], bool]
) -> ProbeVerdict:
    """Compare a load of the file with one from memory."""

    def stage(name: str) -> bool:
        on_stage(name)
        return not is_cancelled()

    copy = HostCopy.of_file(Path(path))
    try:
        if copy.why:
            return ProbeVerdict(Verdict.INCONCLUSIVE, copy.why)
        params = model_params(where)
        with Model.load(library, path, params, progress=lambda _: stage("reference")) as model:
            embeddings, wanted = reference_run(model, where)
        loading = load_user_model(library, copy.weights, params, progress=lambda _: stage("target: loading"))
        with loading as model:
            got, _ = first_run(model, where, script_of(model, where), embeddings=embeddings, stage=None)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except NoReference as error:
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"a load from the file cannot be tried ({error})")
    except TensorUnknown as error:
        return ProbeVerdict(Verdict.FAILS, str(error))
    except CallFailed as error:
        why, is_short = why_failed(error)
        if is_short or error.function not in {"llama_model_init_from_user", "llama_model_load_from_file_with"}:
            return ProbeVerdict(Verdict.INCONCLUSIVE, f"not enough memory for the try ({why})" if is_short else why)
        return ProbeVerdict(Verdict.FAILS, why)
    finally:
        copy.close()
    if [one.tobytes() for one in got] != [one.tobytes() for one in wanted]:
        return ProbeVerdict(Verdict.WRONG, "its logits are not to the bit those of a load from the file")
    return ProbeVerdict(Verdict.OK)


def _without_reference(error: CallFailed | NoReference) -> ProbeVerdict:
    why, is_short = why_failed(error) if isinstance(error, CallFailed) else (str(error), False)
    what = "not enough memory for the try" if is_short else "layer mode itself cannot be tried"
    return ProbeVerdict(Verdict.INCONCLUSIVE, f"{what} ({why})")


def _restored_runs(
    model: Model,
    placement: Placement,
    script: Script,
    state: bytearray,
    *,
    embeddings: bool,
    stage: Callable[[str], None],
) -> None:
    """Give the state to two fresh contexts, go on in both, and demand equal bytes."""
    answers: list[list[Logits]] = []
    for number in ("first", "second"):
        stage(f"target: {number} restore")
        with open_context(model, placement, embeddings=embeddings) as context:
            encode(context, script, embeddings=embeddings)
            put_back(context, state)
            stage(f"target: batches after the {number} restore")
            answers.append(run(context, script.after, embeddings=embeddings))
    for first, second in zip(*answers, strict=True):
        if not is_sound(first):
            raise Wrong("logits after a restore are not finite")
        if not np.any(first):
            raise Wrong("logits after a restore are all zero")
        if first.tobytes() != second.tobytes():
            raise Wrong("two contexts that were given the same state go on differently")


def _compare(wanted: Sequence[Logits], got: Sequence[Logits]) -> dict[str, float]:
    """Compare batches: nmse of the worst, top1_agreement (0 to 1) and rows of all."""
    worst, agreed, n_rows = 0.0, 0, 0
    for mine, theirs in zip(got, wanted, strict=True):
        if not is_sound(mine):
            raise Wrong("its logits are not finite")
        if not np.any(mine):
            raise Wrong("its logits are all zero")
        worst = max(worst, nmse(mine, theirs))
        agreed += int((mine.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        n_rows += len(mine)
    return {"nmse": worst, "top1_agreement": agreed / n_rows, "rows": float(n_rows)}


def _noise(model: Model, placement: Placement, wanted: Sequence[Logits]) -> float:
    """Say how far layer mode is from itself when it adds in another order; 0 where that cannot be tried.

    The same tokens one by one, and without flash attention where the cache's types allow it: other kernels. What that
    comes to is the model's own doing: many layers, weights of few bits and activations that are rounded to 8 make more
    of the last bit than others.
    """
    steps = script_of(model, placement).before
    try:
        with open_context(model, in_another_order(placement), embeddings=False) as context:
            rows = np.concatenate(run(context, [one for step in steps for one in step.singly()], embeddings=False))
    except CallFailed:
        return 0.0
    ends = np.cumsum([len(step.tokens) for step in steps])
    return _compare(wanted, np.split(rows, ends[:-1]))["nmse"]


def _judge(numbers: Mapping[str, float], placement: Placement) -> None:
    """Demand that the logits are layer mode's, up to the order of floats."""
    limit = widened(nmse_limit(placement.type_k, placement.type_v), numbers.get("nmse_control", 0.0))
    if numbers["nmse"] > limit:
        n_rows = round(numbers["rows"])
        top = f"{round(numbers['top1_agreement'] * n_rows)} of {n_rows} top tokens equal"
        text = f"its logits differ from layer mode's: NMSE {numbers['nmse']:.3g} (limit {limit:.3g}), {top}"
        raise Wrong(text, dict(numbers))
