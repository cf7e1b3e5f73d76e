"""What a probe found, and the file that remembers it.

Laws:
    1. A verdict belongs to everything that could change it (`ProbeKey`): another build or head count asks again. That a
       mode works or dies holds for every model of a shape; wrong values and calls that fail belong to these weights.
    2. Only what the mode itself did is remembered. What came of a shortage, of a file, of a signal from outside or of
       the mode that it is compared with is tried again.
    3. The file is written whole to a temporary file and renamed; a damaged file counts as empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from splitctl.last_words import is_shortage, telling_line
from splitctl.model.facts import ModelFacts
from splitctl.model.remembered import remembered
from splitctl.placement import FlashAttn, Placement, SplitMode

_FORMAT = 1
_MAX_FILE_BYTES = 16 * 1024 * 1024
_MAX_ENTRIES = 2000

#: Signals that say nothing about a mode: sent by somebody else, or raised where a mapped file or memory is gone.
_FROM_OUTSIDE = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGBUS")
#: What a child says before its work has begun, and while it tries the mode that another is compared with.
_NOT_THE_TARGET = ("starting", "reference")


class Verdict(enum.Enum):
    """What a trial came to."""

    OK = "ok"
    WRONG = "wrong"
    DIES = "dies"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"


#: How a key begins to say that the library's own call was tried.
OWN_CALL = "moved from"

#: Verdicts that hold for every model of a shape, whatever its weights.
_OF_THE_SHAPE = frozenset({Verdict.OK, Verdict.DIES})


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What a trial came to, why, and its numbers.

    Attributes:
        verdict: the kind.
        why: one phrase; empty for OK.
        numbers: what was measured, by name.
        remembered: whether it comes from the file and not from a trial just now.
    """

    verdict: Verdict
    why: str = ""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    remembered: bool = False

    def to_json(self) -> dict[str, Any]:
        """Give the verdict as plain values: verdict, why, numbers."""
        return {"verdict": self.verdict.value, "why": self.why, "numbers": dict(self.numbers)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], *, remembered: bool = False) -> ProbeVerdict:
        """Read back what `to_json` gave.

        Raises:
            ValueError: it is no verdict.
        """
        try:
            numbers = {str(name): float(value) for name, value in plain["numbers"].items()}
            return cls(Verdict(plain["verdict"]), str(plain["why"]), numbers, remembered)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no verdict: {error}") from error


@remembered
def shape_of(facts: ModelFacts) -> str:
    """Name what a model's header says that can change a verdict; equal for models of one shape.

    The architecture, and a hash of its sizes, heads, norms and memories, and of its tensors with their types.
    """
    sizes = (
        facts.n_layer, facts.n_embd, facts.n_head, facts.n_head_kv, facts.n_embd_head_k, facts.n_embd_head_v,
        facts.n_swa, facts.n_expert, facts.max_alibi_bias, facts.has_k_norm, facts.is_mla, facts.n_embd_indexer,
        facts.recurrence, [(one.name, one.dims, one.type_id) for one in facts.tensors],
    )  # fmt: skip
    return f"{facts.architecture}-{hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """Everything that a verdict depends on.

    Attributes:
        build: which library, to the byte.
        shape: what the model's header says about its architecture, heads and norms.
        mode: the split mode tried.
        devices: names of the devices, in order.
        tensor_split: shares of the devices, or None.
        cache_types: types of keys and values.
        offload_kqv: whether the cache is on the devices.
        flash_attn: flash attention.
        many_sequences: whether the context holds more than one sequence.
        kv_unified: whether they share one stream.
        rpc: the servers behind RPC devices, whose names do not tell them apart.
        trial: what was tried other than the placement itself: a load from a copy of the weights, with how many layers
            on devices, or the library's own call, from where; else empty.
    """

    build: str
    shape: str
    mode: str
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...] | None
    cache_types: tuple[str, str]
    offload_kqv: bool
    flash_attn: str
    many_sequences: bool
    kv_unified: bool
    rpc: tuple[str, ...] = ()
    trial: str = ""

    @classmethod
    def of(
        cls,
        library: Path,
        facts: ModelFacts,
        placement: Placement,
        device_names: Sequence[str],
        rpc: tuple[str, ...] = (),
    ) -> Self:
        """Collect what a verdict depends on.

        Args:
            library: the library file.
            facts: what the model's header says.
            placement: the placement to try.
            device_names: the devices that stand behind a placement that names none.
            rpc: the RPC servers in use, HOST:PORT each.
        """
        plain = placement.normalise()
        # Tensor mode turns an automatic choice on, always: one verdict serves both spellings.
        always_on = plain.mode is SplitMode.TENSOR and plain.flash_attn is FlashAttn.AUTO
        return cls(
            build=build_id(library),
            shape=shape_of(facts),
            mode=plain.mode.value,
            devices=plain.devices or tuple(device_names),
            tensor_split=plain.tensor_split,
            cache_types=(plain.type_k, plain.type_v),
            offload_kqv=plain.offload_kqv,
            flash_attn=(FlashAttn.ON if always_on else plain.flash_attn).value,
            many_sequences=plain.n_seq_max > 1,
            kv_unified=plain.kv_unified,
            rpc=rpc,
        )

    def text(self) -> str:
        """Give the key as text, a JSON array; equal keys have equal texts."""
        told = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return json.dumps(told if self.trial else told[:-1])


def build_id(library: Path) -> str:
    """Hash the names, sizes and times of a library and the ggml files beside it: it changes when one is replaced."""
    folder = library.resolve().parent
    files = {library.resolve(), *folder.glob("libggml*.so*"), *folder.glob("libllama*.so*")}
    digest = hashlib.sha256()
    for file in sorted(files):
        try:
            facts = file.stat()
        except OSError:
            # A dangling link beside the library says nothing about the build.
            continue
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:24]


def verdict_of_death(how: str, stage: str, log_tail: Sequence[str]) -> ProbeVerdict:
    """Judge the end of a child that died while it tried.

    Args:
        how: how it ended, in words.
        stage: what it was doing: `reference` while layer mode was tried, else `target` and a step.
        log_tail: its last lines.

    Returns:
        DIES, or INCONCLUSIVE when memory was short, somebody ended it, or layer mode itself died.
    """
    said = telling_line(log_tail)
    why = f"{how}: {said}" if said else how
    if is_shortage(log_tail):
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"not enough memory for the try ({why})")
    if any(name in how for name in _FROM_OUTSIDE):
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"the try was killed, perhaps for memory ({why})")
    if not is_of_the_target(stage):
        return ProbeVerdict(Verdict.INCONCLUSIVE, f"layer mode itself cannot be tried ({why})")
    return ProbeVerdict(Verdict.DIES, why)


def is_of_the_target(stage: str) -> bool:
    """Tell whether a child in a stage was at the placement that is tried, and not at its start or at layer mode."""
    return not stage.startswith(_NOT_THE_TARGET)


class VerdictCache:
    """The file of verdicts, shared by processes.

    Thread:
        Safe; a lock file keeps processes apart.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; its folder is made when the first verdict is kept."""
        self._path = path

    def get(self, key: ProbeKey, weights: Callable[[], str] = str) -> ProbeVerdict | None:
        """Look a verdict up; None when it is not known or the file cannot be read.

        Args:
            key: what was tried.
            weights: gives what tells the model's files from all others; called only where that matters.
        """
        entries = self._read()
        plain, of_weights = entries.get(key.text()), f"{key.text()}@"
        if any(name.startswith(of_weights) for name in entries):
            plain = entries.get(of_weights + weights(), plain)
        if not isinstance(plain, dict):
            return None
        try:
            return ProbeVerdict.from_json(plain, remembered=True)
        except ValueError:
            return None

    def own_calls(self, build: str, shape: str, weights: Callable[[], str] = str) -> Iterator[dict[str, Any]]:
        """Give what is known of the library's own call for a build and a shape of model.

        Args:
            build: which library, as a key has it.
            shape: what the model's header says, as a key has it.
            weights: gives what tells the model's files from all others; called only where that matters.

        Yields:
            Keys mode, devices, tensor_split, trial (from where), verdict and why, in plain values.
        """
        for key, of_weights, found in self._entries():
            is_asked = (key["build"], key["shape"]) == (build, shape) and key["trial"].startswith(OWN_CALL)
            if is_asked and (not of_weights or of_weights == f"@{weights()}"):
                told = {name: key[name] for name in ("mode", "devices", "tensor_split", "trial")}
                yield told | {"verdict": found["verdict"], "why": found["why"]}

    def devices(self) -> set[str]:
        """Give the names of all devices that something was tried on."""
        return {name for key, _, _ in self._entries() for name in key["devices"]}

    def _entries(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """Give each key by its names, what says for which weights alone it holds ("@..." or empty), and its verdict."""
        names = [field.name for field in dataclasses.fields(ProbeKey)]
        for text, plain in self._read().items():
            try:
                told, end = json.JSONDecoder().raw_decode(text)
                # A key says which trial it is of where it was not of the placement itself.
                told = [*told, ""] if len(told) == len(names) - 1 else told
                key, found = dict(zip(names, told, strict=True)), ProbeVerdict.from_json(plain).to_json()
            except (TypeError, ValueError):
                continue
            yield key, text[end:], found

    def put(self, key: ProbeKey, verdict: ProbeVerdict, weights: Callable[[], str] = str) -> bool:
        """Keep a verdict in place of an earlier one, unless it is inconclusive; tells whether it was kept.

        Args:
            key: what was tried.
            verdict: what it came to.
            weights: gives what tells the model's files from all others.

        Raises:
            OSError: the file cannot be written.
        """
        if verdict.verdict is Verdict.INCONCLUSIVE:
            return False
        of_shape, of_weights = key.text(), f"{key.text()}@{weights()}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            entries = self._read()
            entries.pop(of_shape, None)
            entries.pop(of_weights, None)
            entries[of_shape if verdict.verdict in _OF_THE_SHAPE else of_weights] = verdict.to_json()
            # The oldest go first; they belong to builds long replaced.
            for old in list(entries)[: max(0, len(entries) - _MAX_ENTRIES)]:
                del entries[old]
            self._write(entries)
        return True

    def _read(self) -> dict[str, Any]:
        """Read every entry; a missing or damaged file has none."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
            plain = json.loads(raw) if len(raw) <= _MAX_FILE_BYTES else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT or not isinstance(plain.get("verdicts"), dict):
            return {}
        return dict(plain["verdicts"])

    def _write(self, entries: Mapping[str, Any]) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": _FORMAT, "verdicts": entries}, file)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out while the file is read and replaced."""
        with self._path.with_suffix(".lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
