"""What the supervisor orders a serving worker to do, and what the worker reports.

Laws:
    1. The supervisor owns the session: it keeps what was reported, so a worker may be gone after any report.
    2. A worker takes orders between two decodes, in the order in which they came.
    3. Every order with an ``order`` number is answered by exactly one report with that number, Failed included; a
       stream is answered by Ended. Other reports come on the way.
    4. A token is drawn once: a reported one is never drawn again, and one that was not reported was never drawn.
    5. A session that is parked ends its worker with a Failure of fault "parked" and ``parked_at`` in its body; no
       stream has ended by that.

Everywhere ``order`` is the number of an order, ``stream`` that of a stream, and ``target`` a whole placement. Paths are
absolute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.seal import Seal
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.ipc.jobs import Fault, JobEvent
from splitctl.ipc.measuring import Measure, Measured, Timed
from splitctl.ipc.wire import kinds_of
from splitctl.model.identity import FileIdentity
from splitctl.outcome import SwitchOptions, Via, WeightsTier
from splitctl.placement import Placement


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A LoRA file in GGUF form that is loaded with the model, applied with a scale, and travels with every switch."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """What one sequence holds, as far as the supervisor knows.

    Attributes:
        seq_id: its id in the context.
        tokens: everything read and drawn, oldest first.
        is_pending: the newest token was drawn and delivered, and has not been decoded yet.
        sampler: how the next token is drawn; None: not said yet.
        n_draws: random draws made since the seed was set.
        encoder_tokens: what an encoder-decoder's encoder read.
        grammar: what is drawn follows it, in GBNF; empty: none.
        n_ruled: how many of the tokens, the newest ones, were drawn under it.
    """

    seq_id: int
    tokens: tuple[int, ...]
    is_pending: bool = False
    sampler: SamplerSpec | None = None
    n_draws: int = 0
    encoder_tokens: tuple[int, ...] = ()
    grammar: str = ""
    n_ruled: int = 0


# ---- orders ----


@dataclass(frozen=True, slots=True)
class Open:
    """Load the model and serve; the first order. Answered by Opened, or by a Failure that ends the worker.

    Attributes:
        force: open even if a trial in a child process failed.
        seal: a sealed carry to begin with; None: read the tokens of `sequences` again.
        sequences: what each sequence must hold in the end; sequences of the seal that are not in it are forgotten.
        files: what the session was opened from before: anything else is refused; none: whatever lies there.
        weights: where switches take the weights from.
        standby_for: number of the switch that this worker is to take the session over for; it opens without sequences,
            makes a first decode that is forgotten again, and waits for TakeOver. None: it serves at once.
    """

    placement: Placement
    adapters: tuple[AdapterFile, ...] = ()
    force: bool = False
    seal: Seal | None = None
    sequences: tuple[SequenceSnapshot, ...] = ()
    files: tuple[FileIdentity, ...] = ()
    weights: WeightsTier = WeightsTier.FILE
    standby_for: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Turn a text, or a chat through the model's template, into tokens. Answered by Tokenized.

    Attributes:
        messages: a chat in place of a text: objects with role and content.
        tokens: tokens in place of a text.
        with_pieces: give the bytes of each different token as well.
        text_alone: give the text that a chat becomes, and no tokens.
        add_special: put the model's first token before a text.
        parse_special: let names of special tokens in a text be those tokens.
        chat_template_kwargs: more variables of the template.
        continue_final_message: field of the last message after whose text the prompt ends.
    """

    order: int
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    add_special: bool = True
    parse_special: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: str | None = None
    tokens: tuple[int, ...] | None = None
    with_pieces: bool = False
    text_alone: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Make a sequence hold these tokens and generate after them. Answered by Ended, whenever that is.

    Attributes:
        seq_id: the sequence; what it holds is reused as far as it is the beginning of ``tokens``.
        tokens: the whole prompt; with tokens of the stream that were delivered before a worker was lost.
        sampler: how to draw, its seed a number.
        n_predict: most tokens to generate; negative: until the model ends or the context is full.
        n_draws: random draws that the stream has made before.
        is_pending: the newest of ``tokens`` was drawn and delivered already.
        n_delivered: how many of ``tokens`` were: a grammar accepts these, and an encoder reads the others.
        grammar: what is drawn follows it, in GBNF; empty: none.
    """

    stream: int
    seq_id: int
    tokens: tuple[int, ...]
    sampler: SamplerSpec
    n_predict: int = -1
    n_draws: int = 0
    is_pending: bool = False
    n_delivered: int = 0
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Halt:
    """End a stream; its sequence keeps what it holds. Answered by Ended, unless that was on its way."""

    stream: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Move the session. Answered by Switched; StageReached and Sealed come on the way, Trial after it.

    Attributes:
        may_be_beside: a second worker can be started; FitsBeside then comes where the target may be built in it, and
            the switch is under way until HandOver or GoOn.
    """

    order: int
    target: Placement
    options: SwitchOptions = field(default_factory=SwitchOptions)
    may_be_beside: bool = False


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seal the session for a second worker, at a token boundary.

    Answered by HandedOver, after Sealed: from then on streams are detached, with all that their sequences hold, and the
    worker does nothing until GoOn or Close. Answered by Switched where the session does not allow the switch any more.

    Attributes:
        in_one_piece: what was copied ahead does not count.
    """

    order: int
    in_one_piece: bool = False


@dataclass(frozen=True, slots=True)
class GoOn:
    """A switch beside this worker is off: serve as before. No answer; streams are started again."""

    order: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Become what another worker has sealed; for a standby. Answered by TookOver, or Failed.

    Attributes:
        seal: what it has sealed.
        options: how the state is proved.
    """

    order: int
    seal: Seal
    options: SwitchOptions = field(default_factory=SwitchOptions)


@dataclass(frozen=True, slots=True)
class Check:
    """Say what a switch would do, without doing it. Answered by Checked."""

    order: int
    target: Placement
    options: SwitchOptions = field(default_factory=SwitchOptions)


@dataclass(frozen=True, slots=True)
class Save:
    """Write the whole session to a carry file. Answered by Saved."""

    order: int
    path: Path


@dataclass(frozen=True, slots=True)
class Restore:
    """Replace all that the session holds with a carry, or a session or slot file of llama.cpp. Answered by Replaced."""

    order: int
    path: Path


@dataclass(frozen=True, slots=True)
class Close:
    """End the session and the worker; answered by the last event."""


Order = (
    Open | Tokenize | Start | Halt | Switch | CopyAhead | TakeAhead | HandOver | GoOn | TakeOver | Check | Save
    | Restore | Measure | Close
)  # fmt: skip

ORDERS = kinds_of(Order)


# ---- reports ----


@dataclass(frozen=True, slots=True)
class Opened:
    """The session serves.

    Attributes:
        placement: where, with what the library resolved.
        model: what a client may want to know: path, name, architecture, n_layer, n_vocab, n_ctx_train, weight_bytes,
            has_chat_template, build (the library's), devices (each with link_gb_s: to and from it, GB/s, or null).
        recomputed: tokens were read again for it.
        reason: why; empty where they were not.
        load_ms: time to load and build, ms.
        restore_ms: time to get the sequences back, ms; 0 without any.
        files: what it was opened from, for the next worker's order.
    """

    placement: Placement
    model: dict[str, Any]
    recomputed: bool = False
    reason: str = ""
    load_ms: float = 0.0
    restore_ms: float = 0.0
    files: tuple[FileIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens of a text.

    Attributes:
        text: what the template made of a chat; empty unless asked for.
        pieces: bytes of each different token in the order in which they come first, control tokens by name; none unless
            asked for.
    """

    order: int
    tokens: tuple[int, ...]
    text: str = ""
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a stream's prompt has been read.

    Attributes:
        n_done: tokens of the prompt that the sequence holds, those reused included.
        n_reused: those that it held before.
        ms: time spent reading so far, ms.
    """

    stream: int
    n_done: int
    n_reused: int
    ms: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token of a stream.

    Attributes:
        token: its id.
        piece: its bytes; empty for one that ends the generation.
        n_draws: random draws of the stream, this one included.
        is_end: it ends the generation.
    """

    stream: int
    token: int
    piece: bytes
    n_draws: int
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one decode.

    Attributes:
        tokens: one for each stream that it served.
        ms: time of the step, ms.
    """

    tokens: tuple[Drawn, ...]
    ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream is over.

    Attributes:
        why: "eos", "length", "context", "halted" or "error".
        fault: whose fault an error is.
        message: an error's line for a person.
    """

    stream: int
    why: str
    fault: Fault | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Forgot:
    """An idle sequence was emptied to make room for others."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class StageReached:
    """Where a switch is, and the share of that stage that is done, 0 to 1."""

    order: int
    stage: str
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Sealed:
    """A carry lies sealed in an arena; whatever happens to the worker now, nothing of it is lost."""

    seal: Seal


@dataclass(frozen=True, slots=True)
class Unsealed:
    """What an arena, 0 or 1, held is about to be overwritten."""

    arena: int


@dataclass(frozen=True, slots=True)
class Switched:
    """A switch is over, whichever way.

    Attributes:
        outcome: the outcome object of the contract; of a parked session with ``parked_at``.
    """

    order: int
    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FitsBeside:
    """A switch was checked, and a second worker may build its target while this one serves.

    Attributes:
        target: the whole placement, with what is left open filled in.
        checking_ms: time that the check took, ms.
    """

    order: int
    target: Placement
    checking_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The session lies sealed for another worker, and no stream is on its way here.

    Attributes:
        stood_at: when the last step ended, seconds of the system's monotonic clock.
        stages_ms: time of each stage, ms.
        n_sequences: sequences that were sealed.
        n_tokens: tokens of all of them.
        carry_pinned: whether the state went through pinned memory; None where no device gains by it.
        carry_pinned_reason: why it did not.
        ahead_bytes: bytes of the state that were copied before.
        ahead_reason: why none of several sequences could be.
    """

    order: int
    stood_at: float
    stages_ms: dict[str, float] = field(default_factory=dict)
    n_sequences: int = 0
    n_tokens: int = 0
    carry_pinned: bool | None = None
    carry_pinned_reason: str = ""
    ahead_bytes: int = 0
    ahead_reason: str = ""


@dataclass(frozen=True, slots=True)
class TookOver:
    """The session is here, as another worker has sealed it, and proved.

    Attributes:
        stages_ms: time of each stage, ms; those of the opening included.
        conversions: how the state was converted, one phrase each.
        weight_bytes: size of the placed weights, bytes.
        weights: where they came from.
        weights_reason: why it was not the tier that was asked for; empty where it was.
    """

    order: int
    stages_ms: dict[str, float] = field(default_factory=dict)
    conversions: tuple[str, ...] = ()
    weight_bytes: int | None = None
    weights: WeightsTier = WeightsTier.FILE
    weights_reason: str = ""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first decode after TakeOver is done."""

    order: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The first decode after a switch is done: its outcome as it is now, confirmed or fallen back from."""

    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a switch would do.

    Attributes:
        target: the whole placement, with what is left open filled in.
        is_unchanged: the session serves in it already.
        reasons: why it would be refused: objects with code and text.
        conversions: what would be converted, one phrase each.
        state_bytes: size of the carry's state now; None where there is no memory.
        weight_bytes: weights that would be placed again.
        mem_available: free memory of the host, bytes.
        via: who would do the work; None where nobody would.
        via_reason: why not by a faster way, where it could have been.
        weights: where they would come from, in place; else None.
        weights_reason: why not from the tier that was asked for; empty where they would.
    """

    order: int
    target: Placement
    is_unchanged: bool = False
    reasons: tuple[dict[str, Any], ...] = ()
    conversions: tuple[str, ...] = ()
    state_bytes: int | None = None
    weight_bytes: int | None = None
    mem_available: int | None = None
    via: Via | None = None
    via_reason: str = ""
    weights: WeightsTier | None = None
    weights_reason: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """The session is in a file of this size, in bytes."""

    order: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The session holds what a file held.

    Attributes:
        sequences: what every sequence holds now.
        conversions: what was rewritten.
        recomputed: the tokens were read again.
        reason: why.
    """

    order: int
    sequences: tuple[SequenceSnapshot, ...]
    conversions: tuple[str, ...] = ()
    recomputed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """An order could not be carried out; the session is as it was. Its fields are those of a Failure."""

    order: int
    fault: Fault
    name: str
    message: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alive:
    """Work goes on inside the library; sent at most about once a second, so that silence means that it hangs."""


Report = (
    Opened | Tokenized | Reading | Step | Ended | Forgot | StageReached | Sealed | Unsealed | FitsBeside
    | CopiedAhead | TookAhead | HandedOver | TookOver | FirstStep | Switched | Trial | Checked | Saved | Replaced
    | Timed | Measured | Failed | Alive
)  # fmt: skip

REPORTS = kinds_of(Report)

#: All that a worker's pipe may bring.
WorkerEvent = JobEvent | Report
EVENTS = kinds_of(WorkerEvent)
