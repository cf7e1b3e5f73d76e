"""What a client gets of a hosted session: frozen values, each with the plain object that came in `raw`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from splitctl.errors import Reason
from splitctl.ipc.stop_texts import Usage
from splitctl.outcome import SwitchOutcome
from splitctl.placement import FlashAttn, Placement, SplitMode

Raw = Mapping[str, Any]


class PlacementFields(TypedDict, total=False):
    """The fields of a `Placement` that a switch may name, in the forms that it takes."""

    mode: SplitMode | str
    devices: tuple[str, ...] | list[str] | str
    tensor_split: tuple[float, ...] | list[float] | str | None
    main_gpu: int
    n_gpu_layers: int
    n_ctx: int
    type_k: str
    type_v: str
    offload_kqv: bool
    flash_attn: FlashAttn | str | bool
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    kv_unified: bool
    n_threads: int
    n_threads_batch: int


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """What one sequence does.

    Attributes:
        seq_id: its number, from 0.
        n_tokens: tokens that it holds.
        state: idle, reading, generating or ending.
    """

    seq_id: int
    n_tokens: int
    state: str


@dataclass(frozen=True, slots=True)
class Status:
    """How a hosted session is.

    Attributes:
        name: the session's.
        state: loading, serving, switching, recovering, parked or stopping.
        pid: the host's process id.
        worker_pid: its worker's; None while there is none.
        placement: where the session is placed; None while it loads.
        requested: the mode that was asked for last.
        effective: the mode that it serves in; None while it does not serve.
        sequences: what each sequence does.
        n_streams: answers under way.
        n_queued: those of them that wait for a sequence.
        prompt_per_s: tokens a second of the last prompt; None where none was read.
        generate_per_s: tokens a second of the last steps, over all streams; None where there were none.
        stage: where a switch is; None without one.
        last_switch: how the last switch ended; None before one.
        parked_at: file of a parked session.
        started_at: of the host, seconds since 1970.
        raw: everything, as `splitctl ps --json` prints it.
    """

    name: str
    state: str
    pid: int | None
    worker_pid: int | None
    placement: Placement | None
    requested: SplitMode | None
    effective: SplitMode | None
    sequences: tuple[SequenceStatus, ...]
    n_streams: int
    n_queued: int
    prompt_per_s: float | None
    generate_per_s: float | None
    stage: str | None
    last_switch: SwitchOutcome | None
    parked_at: Path | None
    started_at: float
    raw: Raw = field(repr=False)

    @classmethod
    def read(cls, raw: Raw) -> Status:
        """Read a status."""
        rates = raw.get("tokens_per_second") or {}
        return cls(
            name=str(raw["name"]),
            state=str(raw["state"]),
            pid=raw.get("pid"),
            worker_pid=raw.get("worker_pid"),
            placement=_placement(raw.get("placement")),
            requested=_mode(raw.get("requested")),
            effective=_mode(raw.get("effective")),
            sequences=tuple(
                SequenceStatus(one["seq_id"], one["n_tokens"], one["state"]) for one in raw.get("sequences") or ()
            ),
            n_streams=raw.get("streams") or 0,
            n_queued=raw.get("queued") or 0,
            prompt_per_s=rates.get("prompt"),
            generate_per_s=rates.get("generate"),
            stage=raw.get("stage"),
            last_switch=None if raw.get("last_switch") is None else SwitchOutcome.from_json(raw["last_switch"]),
            parked_at=_path(raw.get("parked_at")),
            started_at=raw.get("started_at") or 0.0,
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer is on a sequence, and its prompt is being read.

    Attributes:
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
    """

    n_prompt: int
    n_reused: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One token of an answer, and the text that is certain by now; or, at the end, text that was held back.

    Attributes:
        text: whole characters; may be empty, and may be that of earlier tokens. It holds no stop text.
        token: its id; None for text alone.
        index: the token's number, from 0; of text alone that of the last token.
    """

    text: str
    token: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Paused:
    """No token comes for a while: the session is moved, or has lost its worker.

    Attributes:
        why: for a person.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """Tokens come again."""


AnswerEvent = Begun | Delta | Paused | Resumed


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        text: all of it.
        tokens: ids of its tokens.
        why: what ended it: eos, stop (a stop text), length, context (it is full) or cancelled.
        usage: what it took.
        raw: the last message of the host.
    """

    text: str
    tokens: tuple[int, ...]
    why: str
    usage: Usage
    raw: Raw = field(repr=False)


@dataclass(frozen=True, slots=True)
class SwitchStage:
    """Where a switch is.

    Attributes:
        stage: its name, such as checking or restoring.
        share: of it that is done, 0 to 1.
    """

    stage: str
    share: float


@dataclass(frozen=True, slots=True)
class SwitchCheck:
    """What a switch would do.

    Attributes:
        target: the whole placement.
        is_unchanged: the session serves in it already.
        reasons: why it would be refused; empty where it would be tried.
        conversions: what would be converted in the state, one phrase each.
        via: where the target would be built, beside or in-place; None where it would not.
        state_bytes: size of the state now; None where there is none.
        expected_s: seconds that such a switch has taken so far; None before one.
        raw: everything, as `splitctl switch --dry-run --json` prints it.
    """

    target: Placement
    is_unchanged: bool
    reasons: tuple[Reason, ...]
    conversions: tuple[str, ...]
    via: str | None
    state_bytes: int | None
    expected_s: float | None
    raw: Raw = field(repr=False)

    @property
    def is_allowed(self) -> bool:
        """Whether it would be tried."""
        return not self.reasons

    @classmethod
    def read(cls, raw: Raw) -> SwitchCheck:
        """Read the answer to a check."""
        target = _placement(raw["target"])
        if target is None:
            raise ValueError("a check without a target")
        return cls(
            target=target,
            is_unchanged=bool(raw.get("is_unchanged")),
            reasons=tuple(Reason(one["code"], one["text"]) for one in raw.get("reasons") or ()),
            conversions=tuple(raw.get("conversions") or ()),
            via=raw.get("via"),
            state_bytes=raw.get("state_bytes"),
            expected_s=raw.get("expected_s"),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A session was written to a file, and goes on.

    Attributes:
        path: the file; over HTTP its name in the server's folder.
        n_bytes: its size.
        n_sequences: sequences in it.
        n_tokens: tokens in it.
        raw: everything.
    """

    path: Path
    n_bytes: int
    n_sequences: int
    n_tokens: int
    raw: Raw = field(repr=False)

    @classmethod
    def read(cls, raw: Raw) -> Saved:
        """Read the answer to a save."""
        return cls(Path(raw["path"]), raw["bytes"], raw["sequences"], raw["tokens"], raw)


@dataclass(frozen=True, slots=True)
class Restored:
    """A session holds what was in a file.

    Attributes:
        path: the file; over HTTP its name in the server's folder.
        n_sequences: sequences that hold something.
        n_tokens: tokens that they hold.
        conversions: what was converted, one phrase each.
        recomputed: the tokens were read again: the same positions, not the same bytes.
        reason: why; empty where they were not.
        raw: everything.
    """

    path: Path
    n_sequences: int
    n_tokens: int
    conversions: tuple[str, ...]
    recomputed: bool
    reason: str
    raw: Raw = field(repr=False)

    @classmethod
    def read(cls, raw: Raw) -> Restored:
        """Read the answer to a restore."""
        return cls(
            Path(raw["path"]),
            raw["sequences"],
            raw["tokens"],
            tuple(raw.get("conversions") or ()),
            bool(raw.get("recomputed")),
            str(raw.get("reason") or ""),
            raw,
        )


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """Whether a session switches by itself.

    Attributes:
        policy: auto or off.
        decision: what was decided last, a sentence; None before that, and with off.
        n_held: prompts that are held.
        raw: everything.
    """

    policy: str
    decision: str | None
    n_held: int
    raw: Raw = field(repr=False)

    @classmethod
    def read(cls, raw: Raw) -> PolicyStatus:
        """Read a policy's status."""
        return cls(str(raw["policy"]), raw.get("decision"), raw.get("held") or 0, raw)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A host has ended.

    Attributes:
        path: where its session was saved, or lies parked; None where it held nothing, or was not saved.
        reason: why it was not saved; empty where it was.
        raw: everything.
    """

    path: Path | None
    reason: str
    raw: Raw = field(repr=False)

    @classmethod
    def read(cls, raw: Raw) -> Stopped:
        """Read the answer to a stop."""
        return cls(_path(raw.get("path")), str(raw.get("reason") or ""), raw)


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened to a session.

    Attributes:
        kind: switch_stage, switch_ended, trial_ended, worker_gone, session_recovered, session_parked, session_saved.
        raw: its fields.
    """

    kind: str
    raw: Raw

    @property
    def outcome(self) -> SwitchOutcome | None:
        """Of a switch or a trial that ended: how it did; else None."""
        plain = self.raw.get("outcome")
        return None if plain is None else SwitchOutcome.from_json(plain)


@dataclass(frozen=True, slots=True)
class Restarted:
    """The host that a client speaks with is another process than before.

    Attributes:
        name: the session, or the URL.
        n: how often that has happened to this client.
    """

    name: str
    n: int


def _placement(plain: Raw | None) -> Placement | None:
    if plain is None:
        return None
    return Placement.from_json({one.name: plain[one.name] for one in fields(Placement) if one.name in plain})


def _mode(word: str | None) -> SplitMode | None:
    return None if word is None else SplitMode(word)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
