"""The trial itself: one model in layer mode and in the placement asked for, compared. Runs in a child, which may die.

What is tried is what is known to go wrong in some build for some architecture: batches of exactly one token and of
several, after a prompt and after a restore; logits that are silently wrong; a state that does not come back.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llama_native import (
    CallFailed,
    Context,
    Library,
    LoadCancelled,
    Model,
    TensorUnknown,
    load_user_model,
)
from splitctl.engine.engine import context_params, model_params, resolve_threads
from splitctl.engine.host_copy import HostCopy
from splitctl.placement import Placement, SplitMode
from splitctl.probing.comparing import Logits, in_another_order, is_sound, nmse, nmse_limit, widened
from splitctl.probing.computing import (
    SMALL_BYTES,
    ProbeCancelled,
    Wrong,
    numbers_as_tokens,
    put_back,
    state_of,
    why_failed,
)
from splitctl.probing.short_model import short_model
from splitctl.probing.verdicts import ProbeVerdict, Verdict

#: A trial needs no more context than this [tokens].
MAX_CTX = 512

_TEXT = "The quick brown fox jumps over the lazy dog, and 7 wizards count to 1234 while it rains in Paris."
_N_PROMPT = 24
_N_SINGLE = 3
_N_SEVERAL = 5
_MAX_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch: which tokens of which sequences at which positions; every one gives logits."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    seq_ids: tuple[int, ...]

    def singly(self) -> Iterator[_Step]:
        """Give the same tokens in batches of one."""
        for one in zip(self.tokens, self.positions, self.seq_ids, strict=True):
            yield _Step(*((value,) for value in one))


@dataclass(frozen=True, slots=True)
class _Script:
    """What is decoded: prompts, one-token batches and a batch of several; and the same kinds again after a restore."""

    encoder: _Step | None
    before: tuple[_Step, ...]
    after: tuple[_Step, ...]


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

    target = _shrunk(placement)
    reference = dataclasses.replace(target, mode=SplitMode.LAYER, tensor_split=None)
    try:
        with load(reference, "reference") as model:
            embeddings, wanted = _reference(model, reference)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except (CallFailed, _NoReference) as error:
        return _without_reference(error)
    try:
        with load(target, "target: loading") as model:
            script = _script(model, target)
            got, state = _first_run(model, target, script, embeddings=embeddings, stage=stage)
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
    where = _shrunk(placement)
    on_stage("reference")
    short = short_model(Path(model_path), placement)
    try:
        # What cannot be compared with a few layers may be with all of them.
        if short is not None:
            found = _compared(library, f"/proc/self/fd/{short}", where, on_stage, is_cancelled)
            if found.verdict is not Verdict.INCONCLUSIVE:
                return found
        return _compared(library, model_path, where, on_stage, is_cancelled)
    finally:
        if short is not None:
            os.close(short)


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
            embeddings, wanted = _reference(model, where)
        loading = load_user_model(library, copy.weights, params, progress=lambda _: stage("target: loading"))
        with loading as model:
            got, _ = _first_run(model, where, _script(model, where), embeddings=embeddings, stage=None)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except _NoReference as error:
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


class _NoReference(Exception):
    """Layer mode gives nothing to compare with."""


def _without_reference(error: CallFailed | _NoReference) -> ProbeVerdict:
    why, is_short = why_failed(error) if isinstance(error, CallFailed) else (str(error), False)
    what = "not enough memory for the try" if is_short else "layer mode itself cannot be tried"
    return ProbeVerdict(Verdict.INCONCLUSIVE, f"{what} ({why})")


def _shrunk(placement: Placement) -> Placement:
    """Make the context as small as the trial allows, and keep what decides: modes, devices, types, streams."""
    n_seq = min(placement.n_seq_max, _MAX_SEQUENCES)
    n_ctx = min(placement.n_ctx or MAX_CTX, MAX_CTX)
    return resolve_threads(
        dataclasses.replace(
            placement,
            n_ctx=max(n_ctx, 2 * n_seq * (_N_PROMPT + 2 * (_N_SINGLE + _N_SEVERAL))),
            n_seq_max=n_seq,
            n_batch=min(placement.n_batch, MAX_CTX),
            n_ubatch=min(placement.n_ubatch, MAX_CTX),
        )
    )


def _tokens(model: Model) -> list[int]:
    """Make a prompt: words where the model has some, else numbers inside its vocabulary."""
    if model.has_tokenizer:
        tokens = model.tokenize(_TEXT)
        if len(tokens) >= _N_PROMPT:
            return tokens[:_N_PROMPT]
    return numbers_as_tokens(model, _N_PROMPT)


def _script(model: Model, placement: Placement) -> _Script:
    """Lay out the batches for a model and a number of sequences."""
    prompt = _tokens(model)
    encoder = None
    if model.has_encoder:
        encoder = _Step(tuple(prompt), tuple(range(len(prompt))), (0,) * len(prompt))
        start = model.decoder_start_token
        prompt = [start if start >= 0 else max(model.token_bos, 0), *prompt[:_N_SEVERAL]]
    sequences = range(min(2, placement.n_seq_max))
    most = min(placement.n_batch, placement.n_ubatch)
    before: list[_Step] = []
    for seq_id in sequences:
        # Another order of the words for each sequence: mixed-up sequences must not agree by chance.
        words = prompt[seq_id:] + prompt[:seq_id]
        for at in range(0, len(words), most):
            part = tuple(words[at : at + most])
            before.append(_Step(part, tuple(range(at, at + len(part))), (seq_id,) * len(part)))
    n_several = max(1, min(_N_SEVERAL, most // len(sequences)))
    n_round = _N_SINGLE + n_several
    before.extend(_follow(prompt, len(prompt), sequences, n_several))
    after = tuple(_follow(prompt, len(prompt) + n_round, sequences, n_several))
    return _Script(encoder, tuple(before), after)


def _follow(prompt: Sequence[int], start: int, sequences: Sequence[int], n_several: int) -> Iterator[_Step]:
    """Go on from position `start`: batches of one token, then one batch of several of every sequence."""
    for at in range(start, start + _N_SINGLE):
        token = prompt[at % len(prompt)]
        yield _Step((token,), (at,), (0,))
        if len(sequences) > 1:
            yield _Step((token,), (at,), (1,))
    several = range(start + _N_SINGLE, start + _N_SINGLE + n_several)
    pairs = [(at, seq_id) for seq_id in sequences for at in several]
    yield _Step(
        tuple(prompt[(2 * at) % len(prompt)] for at, _ in pairs),
        tuple(at for at, _ in pairs),
        tuple(seq_id for _, seq_id in pairs),
    )


def _open(model: Model, placement: Placement, *, embeddings: bool) -> Context:
    if model.size_bytes < SMALL_BYTES:
        placement = dataclasses.replace(placement, n_threads=1, n_threads_batch=1)
    return Context(model, context_params(placement, embeddings=embeddings))


def _run(context: Context, steps: Sequence[_Step], *, embeddings: bool) -> list[Logits]:
    """Decode batches, and copy the logits (or embeddings) of every token."""
    rows: list[Logits] = []
    for step in steps:
        context.decode(step.tokens, step.positions, step.seq_ids, [True] * len(step.tokens))
        rows.append(_rows(context, step, embeddings=embeddings))
    return rows


def _rows(context: Context, step: _Step, *, embeddings: bool) -> Logits:
    """Copy what the last batch computed: float32[n_tokens, n_vocab or n_embd]."""
    read = context.embeddings if embeddings else context.logits
    raw = [read(index) for index in range(len(step.tokens))]
    return np.stack([np.frombuffer(one, np.float32) for one in raw])


def _encode(context: Context, script: _Script, *, embeddings: bool) -> list[Logits]:
    """Run the encoder where there is one; an encoder alone also answers."""
    if script.encoder is None:
        return []
    step = script.encoder
    context.encode(step.tokens, step.positions, step.seq_ids, [True] * len(step.tokens))
    return [_rows(context, step, embeddings=True)] if embeddings and not context.model.has_decoder else []


def _reference(model: Model, placement: Placement) -> tuple[bool, list[Logits]]:
    """Run layer mode, and find out whether this model answers in logits or in embeddings."""
    script = _script(model, placement)
    with _open(model, placement, embeddings=False) as context:
        # What keeps nothing between decodes and is no diffusion model is an encoder: it has no logits to read.
        answers = (False, True) if context.has_memory or model.is_diffusion else (True,)
    for embeddings in answers:
        try:
            rows, _ = _first_run(model, placement, script, embeddings=embeddings, stage=None)
        except CallFailed as error:
            if embeddings or error.function != "llama_get_logits_ith":
                raise
            continue
        if not all(map(is_sound, rows)):
            raise _NoReference("it gives what is no number")
        if rows and all(np.any(row) for row in rows):
            return embeddings, rows
    raise _NoReference("it gives nothing but zeros")


def _first_run(
    model: Model, placement: Placement, script: _Script, *, embeddings: bool, stage: Callable[[str], None] | None
) -> tuple[list[Logits], bytearray | None]:
    """Decode the first half of the script in a fresh context; with stages to report, also take its state."""
    report = stage or (lambda _: None)
    report("target: context")
    with _open(model, placement, embeddings=embeddings) as context:
        report("target: first batches")
        rows = _encode(context, script, embeddings=embeddings)
        if model.has_decoder:
            steps = script.before if context.has_memory else _alone(script)
            rows += _run(context, steps, embeddings=embeddings)
        if stage is None or not context.has_memory:
            return rows, None
        report("target: state out")
        return rows, state_of(context)


def _alone(script: _Script) -> tuple[_Step, ...]:
    """Keep the batches that a model without memory can take: those that begin at position 0."""
    whole = tuple(step for step in script.before if step.positions[0] == 0)
    first = whole[0]
    return (*whole, _Step(first.tokens[:1], first.positions[:1], first.seq_ids[:1]))


def _restored_runs(
    model: Model,
    placement: Placement,
    script: _Script,
    state: bytearray,
    *,
    embeddings: bool,
    stage: Callable[[str], None],
) -> None:
    """Give the state to two fresh contexts, go on in both, and demand equal bytes."""
    answers: list[list[Logits]] = []
    for number in ("first", "second"):
        stage(f"target: {number} restore")
        with _open(model, placement, embeddings=embeddings) as context:
            _encode(context, script, embeddings=embeddings)
            put_back(context, state)
            stage(f"target: batches after the {number} restore")
            answers.append(_run(context, script.after, embeddings=embeddings))
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
    steps = _script(model, placement).before
    try:
        with _open(model, in_another_order(placement), embeddings=False) as context:
            rows = np.concatenate(_run(context, [one for step in steps for one in step.singly()], embeddings=False))
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
