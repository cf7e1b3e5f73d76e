"""What a build does with one placement, measured in a child that may die of it: `verify` in the worker.

What is found is reported at once, because the next step may be the last.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from llama_native import CallFailed, Context, Library, LoadCancelled, Model
from splitctl.engine.buffer_lines import BufferLine, buffer_lines
from splitctl.engine.engine import FLASH_TURNED_OFF, context_params, model_params, resolve_threads
from splitctl.last_words import telling_line
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing.comparing import (
    CONTROL_STAGE,
    MAX_KEPT_BYTES,
    WINDOW_ROWS,
    Logits,
    Tally,
    in_another_order,
    is_sound,
    nmse_limit,
    surprise,
    widened,
)
from splitctl.probing.computing import (
    SMALL_BYTES,
    ProbeCancelled,
    Wrong,
    numbers_as_tokens,
    put_back,
    state_of,
    why_failed,
)
from splitctl.probing.verdicts import Verdict

#: Tokens of one decode while a text is read: later ones find their predecessors in the cache.
_CHUNK = 32
#: Tokens of the batch of several after a restore.
_N_SEVERAL = 5
#: Tokens of the reference that are read again, one by one in another order of floats.
_N_CONTROL = 64
#: More than is decoded after the text and what was generated [tokens].
_N_SPARE = 16

_FLOAT_BYTES = 4
_RETRIED = "retrying without pipeline parallelism"
_STATUS = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured of a placement.

    Attributes:
        text: what is read.
        n_tokens: most tokens of it.
        n_generate: tokens generated greedily after it.
        reference: logits of the reference mode, as `keep` left them; None for the reference itself.
        twin: logits of the reference mode with the same cache types; None where there are none.
        keep: where this one's logits are left; None: nowhere.
        control: how far what it is judged by (the twin, else the reference) is from itself in another order of floats,
            NMSE; 0 where nobody knows.
    """

    text: str
    n_tokens: int
    n_generate: int
    reference: Path | None
    twin: Path | None
    keep: Path | None
    control: float = 0.0

    def limit(self, placement: Placement) -> float:
        """Give the NMSE beyond which the placement is wrong."""
        return widened(nmse_limit(placement.type_k, placement.type_v), self.control)


@dataclass(slots=True)
class _Listener:
    """What the library's log says of the buffers of a model and its first context."""

    is_listening: bool = True
    buffers: list[BufferLine] = field(default_factory=list)
    is_degraded: bool = False
    is_flash_off: bool = False

    def __call__(self, _level: int, text: str) -> None:
        if not self.is_listening:
            return
        self.buffers += buffer_lines([text])
        self.is_degraded = self.is_degraded or _RETRIED in text
        self.is_flash_off = self.is_flash_off or bool(FLASH_TURNED_OFF.search(text))


def measure(
    library: Library,
    model_path: str,
    placement: Placement,
    task: Task,
    *,
    on_stage: Callable[[str, float | None], None] = lambda _stage, _done: None,
    on_found: Callable[[Found], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Found:
    """Measure a placement.

    Args:
        library: the open library.
        model_path: the GGUF.
        placement: the placement; a context of 0 tokens becomes as large as the task needs.
        task: what to do in it.
        on_stage: told what is being done and how much of it, so that a death can be placed.
        on_found: told all that is known, each time that it is more.
        is_cancelled: asked between the steps.

    Returns:
        What was found, plain values; `verdict` is ok, wrong, fails or inconclusive (dies is for the parent to say).

    Raises:
        ProbeCancelled: `is_cancelled` said so.
        OSError: a file of logits cannot be read or written.
    """
    found: Found = {"loads": False, "effective": None, "rss_before_bytes": _memory()["VmRSS"]}
    heard = _Listener()
    stop = library.log.listen(heard)

    def stage(name: str, done: float | None = None) -> None:
        if is_cancelled():
            raise ProbeCancelled
        on_stage(name, done)

    def report() -> None:
        found["rss_peak_bytes"] = _memory()["VmHWM"]
        found["buffers"] = [{"name": one.buffer, "kind": one.kind, "bytes": one.n_bytes} for one in heard.buffers]
        found["buffer_bytes"] = sum(one.n_bytes for one in heard.buffers)
        found["degraded"] = heard.is_degraded
        on_found(found)

    try:
        _measure(library, model_path, placement, task, found, heard, stage, report, is_cancelled)
    except LoadCancelled as error:
        raise ProbeCancelled from error
    except Wrong as error:
        found |= {"verdict": Verdict.WRONG.value, "why": str(error)}
    except CallFailed as error:
        why, is_short = why_failed(error)
        verdict = Verdict.INCONCLUSIVE if is_short else Verdict.FAILS
        found |= {"verdict": verdict.value, "why": f"not enough memory: {why}" if is_short else why}
        said = telling_line(error.log_tail)
        found["end"] = {"by": "return", "function": error.function, "code": error.rc, "said": said}
    finally:
        stop()
    report()
    return found


def _measure(
    library: Library,
    model_path: str,
    placement: Placement,
    task: Task,
    found: Found,
    heard: _Listener,
    stage: Callable[..., None],
    report: Callable[[], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """Load, read, generate, take the state out and put it back; what is found is put into `found`.

    A reference is at last compared with itself: by then it is right, whatever comes of that.
    """
    stage("loading", 0.0)

    def loading(share: float) -> bool:
        # A large model takes longer to load than a child may be silent.
        stage("loading", share)
        return not is_cancelled()

    with ExitStack() as stack:
        model = stack.enter_context(Model.load(library, model_path, model_params(placement), progress=loading))
        found["model_bytes"] = model.size_bytes
        report()
        tokens = _tokens(model, task)
        fitted = _fitted(placement, len(tokens) + task.n_generate + _N_SPARE, model.size_bytes)
        stage("making the context")
        with Context(model, context_params(fitted, embeddings=False)) as context:
            heard.is_listening = False
            found |= {"effective": _effective(placement, heard), "flash_attn": _flash_attn(placement, heard).value}
            found |= {"loads": True, "n_tokens": len(tokens), "n_vocab": model.n_vocab, "n_ctx": context.n_ctx}
            report()
            texts = [tokens[start:] + tokens[:start] for start in _starts(len(tokens), fitted.n_seq_max)]
            _encode(context, texts)
            last, others = _read(context, texts, task, fitted, found, stage)
            report()
            generated = _generate(context, last, len(tokens), task.n_generate, stage)
            found |= _text(model, generated)
            report()
            if not context.has_memory:
                found |= {"verdict": Verdict.OK.value, "why": ""}
                return
            stage("taking the state out")
            state = state_of(context)
            found["state_bytes"] = len(state)
            report()
        for text, rows in zip(texts[1:], others, strict=True):
            stage("reading another text alone")
            _compare_alone(model, fitted, text, rows, task.limit(fitted))
        n_past = len(tokens) + max(len(generated) - 1, 0)
        found["state_equal"] = False
        _restore_twice(model, fitted, texts, state, n_past, stage)
        found |= {"state_equal": True, "verdict": Verdict.OK.value, "why": ""}
        if task.keep is not None:
            report()
            stage(CONTROL_STAGE)
            placed = replace(fitted, flash_attn=FlashAttn(found["flash_attn"]))
            found["nmse_control"] = _from_itself(model, placed, tokens, task.keep)


def _tokens(model: Model, task: Task) -> list[int]:
    """Turn the text into tokens, as many as are asked for and as the file of logits may hold."""
    most = max(2, min(task.n_tokens, MAX_KEPT_BYTES // (_FLOAT_BYTES * model.n_vocab)))
    if not model.has_tokenizer:
        return numbers_as_tokens(model, most)
    return model.tokenize(task.text)[:most]


def _fitted(placement: Placement, n_needed: int, weight_bytes: int) -> Placement:
    """Make room for the task where the placement leaves the room open, or has too little; say how many threads."""
    n_ctx = max(placement.n_ctx, -(-n_needed // 256) * 256 * placement.n_seq_max)
    n_threads = placement.n_threads or int(weight_bytes < SMALL_BYTES)
    return resolve_threads(placement.changed(n_ctx=n_ctx, n_threads=n_threads))


def _starts(n_tokens: int, n_seq: int) -> list[int]:
    """Say where each sequence begins in the text: mixed-up sequences must not agree by chance."""
    return [seq_id * n_tokens // n_seq for seq_id in range(n_seq)]


def _decode(context: Context, parts: list[list[int]], at: int) -> None:
    """Decode a piece of every sequence's text in one batch, from one position on; every token gives logits."""
    tokens = [token for part in parts for token in part]
    positions = [at + index for part in parts for index in range(len(part))]
    seq_ids = [seq_id for seq_id, part in enumerate(parts) for _ in part]
    context.decode(tokens, positions, seq_ids, [True] * len(tokens))


def _encode(context: Context, texts: list[list[int]]) -> None:
    """Let an encoder read the texts, where the model has one: its decoder looks at them."""
    if context.model.has_encoder:
        tokens = [token for text in texts for token in text]
        positions = [index for text in texts for index in range(len(text))]
        seq_ids = [seq_id for seq_id, text in enumerate(texts) for _ in text]
        context.encode(tokens, positions, seq_ids, [True] * len(tokens))


def _read(
    context: Context,
    texts: list[list[int]],
    task: Task,
    placement: Placement,
    found: Found,
    stage: Callable[..., None],
) -> tuple[list[Logits], list[deque[Logits]]]:
    """Read the texts, and compare every row of the first with the reference's.

    Returns:
        The last row of each; and the last rows of every text but the first.
    """
    plain, twin, surprises = Tally(), Tally(), []
    others: list[deque[Logits]] = [deque(maxlen=WINDOW_ROWS) for _ in texts[1:]]
    tokens = texts[0]
    row = np.zeros(0, np.float32)
    with ExitStack() as stack:
        keep = stack.enter_context(task.keep.open("wb")) if task.keep else None
        reference, same = (_rows_of(path, stack) for path in (task.reference, task.twin))
        for at, parts in _parts(context, texts):
            stage("reading the text", at / len(tokens))
            _decode(context, parts, at)
            n = len(parts[0])
            for index in range(n):
                row = _row(context, index)
                if keep is not None:
                    keep.write(row.tobytes())
                for rows, tally in ((reference, plain), (same, twin)):
                    if rows is not None:
                        tally.add(row, _next_row(rows, row.size))
                if at + index + 1 < len(tokens):
                    surprises.append(surprise(row, tokens[at + index + 1]))
            for number, kept in enumerate(others, start=1):
                kept.extend(_row(context, number * n + index) for index in range(n))
    found["perplexity"] = _perplexity(surprises)
    if task.reference is not None:
        found |= plain.numbers()
    if task.twin is not None:
        found |= twin.numbers("same_cache_")
    judged = twin if task.twin is not None else plain
    if judged.n_rows:
        found["nmse_limit"] = task.limit(placement)
        _judge(judged, found["nmse_limit"])
    return [row, *(kept[-1] for kept in others)], others


def _parts(context: Context, texts: list[list[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Cut the texts, which are of one length, into batches."""
    most = max(1, min(_CHUNK, context.n_batch // len(texts)))
    for at in range(0, len(texts[0]), most):
        yield at, [text[at : at + most] for text in texts]


def _compare_alone(model: Model, placement: Placement, text: list[int], rows: Sequence[Logits], limit: float) -> None:
    """Demand that a text gives the same logits beside others as alone, up to float order."""
    alone: deque[Logits] = deque(maxlen=len(rows))
    with Context(model, context_params(placement.changed(n_seq_max=1), embeddings=False)) as context:
        _encode(context, [text])
        for at, parts in _parts(context, [text]):
            _decode(context, parts, at)
            alone.extend(_row(context, index) for index in range(len(parts[0])))
    tally = Tally()
    for mine, theirs in zip(rows, alone, strict=True):
        tally.add(mine, theirs)
    _judge(tally, limit, "those of the same text alone")


def _judge(tally: Tally, limit: float, wanted: str = "the reference mode's") -> None:
    """Demand that the logits are those that are wanted, up to float order."""
    if tally.n_rows and tally.worst_nmse > limit:
        top = f"{tally.n_same_top} of {tally.n_rows} top tokens equal"
        raise Wrong(f"its logits differ from {wanted}: NMSE {tally.worst_nmse:.3g} (limit {limit:.3g}), {top}")


def _from_itself(model: Model, placement: Placement, tokens: list[int], kept: Path) -> float | None:
    """Say how far the first rows are from those that were kept, when read one by one in another order of floats.

    None where that cannot be tried.
    """
    tally = Tally()
    try:
        params = context_params(in_another_order(placement), embeddings=False)
        with kept.open("rb") as rows, Context(model, params) as context:
            _encode(context, [tokens])
            for at, token in enumerate(tokens[:_N_CONTROL]):
                _decode(context, [[token]], at)
                row = _row(context, 0)
                tally.add(row, _next_row(rows, row.size))
    except (CallFailed, Wrong):
        return None
    return tally.worst_nmse


def _row(context: Context, index: int) -> Logits:
    """Copy one row of the last batch, and refuse one that is none."""
    row = np.frombuffer(context.logits(index), np.float32)
    if not is_sound(row):
        raise Wrong("its logits are not finite")
    if not np.any(row):
        raise Wrong("its logits are all zero")
    return row


def _rows_of(path: Path | None, stack: ExitStack) -> IO[bytes] | None:
    return None if path is None else stack.enter_context(path.open("rb"))


def _next_row(rows: IO[bytes], n_vocab: int) -> Logits:
    """Read the next row: read and not mapped, so that it does not count as memory of this process."""
    raw = rows.read(n_vocab * _FLOAT_BYTES)
    if len(raw) != n_vocab * _FLOAT_BYTES:
        raise EOFError(f"the reference's logits end early ({len(raw)} bytes left of a row of {n_vocab} values)")
    return np.frombuffer(raw, np.float32)


def _perplexity(surprises: list[float]) -> float | None:
    """Give the exponential of the mean; None where it is no number."""
    if not surprises:
        return None
    mean = math.fsum(surprises) / len(surprises)
    return math.exp(mean) if mean < 700.0 else None


def _generate(context: Context, last: list[Logits], n_past: int, n: int, stage: Callable[..., None]) -> list[int]:
    """Take the likeliest token of every sequence n times, in batches of one each; returns those of the first."""
    generated: list[int] = []
    for index in range(n):
        stage("generating", index / n)
        tokens = [int(row.argmax()) for row in last]
        generated.append(tokens[0])
        if context.model.has_tokenizer and context.model.is_eog(tokens[0]):
            break
        if index + 1 < n:
            _decode(context, [[token] for token in tokens], n_past + index)
            last = [_row(context, number) for number in range(len(tokens))]
    return generated


def _text(model: Model, generated: list[int]) -> Found:
    """Tell the greedy text, and a short hash of it."""
    raw = json.dumps(generated).encode()
    if model.has_tokenizer:
        raw = b"".join(model.piece(token) for token in generated)
    return {
        "text": raw.decode("utf-8", "replace"),
        "text_tokens": len(generated),
        "text_hash": hashlib.sha256(raw).hexdigest()[:8],
    }


def _restore_twice(
    model: Model,
    placement: Placement,
    texts: list[list[int]],
    state: bytearray,
    n_past: int,
    stage: Callable[..., None],
) -> None:
    """Give the state to two fresh contexts, read it back, and go on in both: the same bytes, and the same logits."""
    answers: list[list[bytes]] = []
    for which in ("a fresh context", "a second fresh context"):
        stage(f"putting the state into {which}")
        with Context(model, context_params(placement, embeddings=False)) as context:
            _encode(context, texts)
            put_back(context, state)
            stage("going on after a restore")
            answers.append([row.tobytes() for row in _go_on(context, texts, n_past)])
    if answers[0] != answers[1]:
        raise Wrong("two contexts that were given the same state go on differently")


def _go_on(context: Context, texts: list[list[int]], n_past: int) -> Iterator[Logits]:
    """Decode batches of one token of every sequence, and one of several."""
    at = n_past
    for n in (1, 1, max(1, min(_N_SEVERAL, context.n_ubatch // len(texts)))):
        parts = [[text[(at + index) % len(text)] for index in range(n)] for text in texts]
        _decode(context, parts, at)
        at += n
        for index in range(n * len(texts)):
            yield _row(context, index)


def _effective(placement: Placement, heard: _Listener) -> str:
    """Name the mode that is in effect: a row split without buffers that are split is a layer split."""
    is_split = any("split" in one.buffer.lower() for one in heard.buffers)
    if placement.mode is SplitMode.ROW and not is_split:
        return SplitMode.LAYER.value
    return placement.mode.value


def _flash_attn(placement: Placement, heard: _Listener) -> FlashAttn:
    """Say what became of an open choice."""
    if placement.flash_attn is not FlashAttn.AUTO:
        return placement.flash_attn
    return FlashAttn.OFF if heard.is_flash_off else FlashAttn.ON


def _memory() -> dict[str, int]:
    """Read this process's resident memory now (VmRSS) and at its most (VmHWM), bytes.

    getrusage would give the parent's peak where that was higher: it survives the exec.
    """
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return {"VmRSS": 0, "VmHWM": 0} | {name: int(kib) * 1024 for name, kib in _STATUS.findall(text)}
