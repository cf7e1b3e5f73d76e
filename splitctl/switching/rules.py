"""Whether a placement can be asked of a model, a build and a session: decided before anything is freed. Pure.

Laws:
    1. Pure: the same facts give the same diagnostics; nothing is read, asked or tried here.
    2. Every diagnostic names the fact, the limit and the way out.
    3. What a trial in a child process saw wins over the tables, in both directions. ALiBi is the exception: its wrong
       logits can pass a comparison, so it stays refused on several devices until a build proves right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from splitctl.errors import Reason
from splitctl.model.facts import ModelFacts
from splitctl.model.slices import effective_split
from splitctl.outcome import DOES_NOT_FIT
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.cells import cache_tensors, shape_of
from splitctl.probing.verdicts import ProbeVerdict, Verdict
from splitctl.switching import tables

NEEDS_CONVERSION = "needs-conversion"
"""The code of diagnostics that a conversion of the carry lifts."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing to say about a placement.

    Args:
        code: stable name for programs.
        text: one sentence with the fact, the limit and the way out.
        blocking: whether the placement is refused for it; otherwise it is a warning.
        settled_by_probe: whether a trial in a child process can lift it.
    """

    code: str
    text: str
    blocking: bool = True
    settled_by_probe: bool = False

    @property
    def reason(self) -> Reason:
        """The diagnostic as an outcome carries it."""
        return Reason(self.code, self.text)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """What is known about the library.

    Args:
        version: package and version, as discovery found them.
        max_devices: entries of a tensor split.
    """

    version: str
    max_devices: int = 16

    @property
    def number(self) -> int | None:
        """llama.cpp's build number, where the version tells it."""
        return tables.build_number(self.version)

    @property
    def measured(self) -> bool:
        """Whether the tables were filled by watching this build."""
        return self.version.strip() in tables.MEASURED


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known about the machine.

    Args:
        devices: names of the library's devices, in its order, with their kind ("cpu", "gpu", "igpu", "accel", "meta").
        mem_available: free memory of the host, bytes; None when it is not known.
    """

    devices: Mapping[str, str]
    mem_available: int | None = None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What the session holds.

    Args:
        tokens: tokens held by each sequence in use, by sequence id.
        state_bytes: size that the library gives for the state, bytes; None before it was asked.
        pending_shift: a context shift that no decode has applied yet.
        sealed_bytes: room that is mapped for the carry already, bytes.
        n_adapters: adapters that it loads wherever it goes.
        n_encoder_tokens: tokens of all sequences that an encoder reads again wherever it goes.
    """

    tokens: Mapping[int, int]
    state_bytes: int | None = None
    pending_shift: bool = False
    sealed_bytes: int = 0
    n_adapters: int = 0
    n_encoder_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens held, over all sequences."""
        return sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class _Case:
    """One question, with everything that the rules look at."""

    current: Placement | None
    target: Placement
    facts: ModelFacts
    build: BuildFacts
    host: HostFacts
    session: SessionFacts

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices that the target uses."""
        if self.target.devices:
            return self.target.devices
        return tuple(name for name, kind in self.host.devices.items() if kind != "cpu")

    @property
    def n_active(self) -> int:
        """Devices that get a share."""
        shares = self.target.tensor_split
        n_devices = len(self.device_names)
        if shares is None:
            return n_devices
        return sum(1 for share in shares[:n_devices] if share > 0)

    @property
    def flash(self) -> FlashAttn:
        """Flash attention as it would be: an unnamed choice keeps the session's."""
        if self.target.flash_attn is FlashAttn.AUTO and self.current is not None:
            return self.current.flash_attn
        return self.target.flash_attn

    @property
    def quantized(self) -> tuple[str, ...]:
        """The cache types that are quantized."""
        return tuple(one for one in (self.target.type_k, self.target.type_v) if one in tables.QUANTIZED_CACHE_TYPES)

    def known(self, code: str, text: str) -> Diagnostic:
        """Make a diagnostic that comes from a table, so that a trial can lift it."""
        return Diagnostic(code, text, settled_by_probe=True)


def check(
    current: Placement | None,
    target: Placement,
    facts: ModelFacts,
    build: BuildFacts,
    host: HostFacts,
    session: SessionFacts,
    probe: ProbeVerdict | None = None,
) -> tuple[Diagnostic, ...]:
    """Judge a target.

    Args:
        current: where the session serves; None for a session that is opening.
        target: where it shall serve.
        facts: the model.
        build: the library.
        host: the host and its devices.
        session: what the session holds.
        probe: what a trial of the target in a child process saw; None or inconclusive when nothing is known.

    Returns:
        Diagnostics, blocking ones first; the placement is refused when one is blocking.
    """
    case = _Case(current, target, facts, build, host, session)
    found = [diagnostic for rule in _RULES for diagnostic in rule(case)]
    if probe is not None and probe.verdict is not Verdict.INCONCLUSIVE:
        found = list(_settled(found, probe, case))
    return tuple(sorted(found, key=lambda diagnostic: not diagnostic.blocking))


def refused(diagnostics: Iterable[Diagnostic]) -> tuple[Reason, ...]:
    """Give the reasons of blocking diagnostics; empty when the placement may be tried."""
    return tuple(diagnostic.reason for diagnostic in diagnostics if diagnostic.blocking)


def worth_a_try(diagnostics: Iterable[Diagnostic]) -> bool:
    """Tell whether a trial in a child process can still change the answer.

    False when something blocks that no trial can lift.
    """
    return all(diagnostic.settled_by_probe or not diagnostic.blocking for diagnostic in diagnostics)


def _settled(found: list[Diagnostic], probe: ProbeVerdict, case: _Case) -> Iterator[Diagnostic]:
    """Let a trial's verdict stand over what the tables say."""
    for diagnostic in found:
        if not (diagnostic.settled_by_probe and diagnostic.blocking and probe.verdict is Verdict.OK):
            yield diagnostic
    if probe.verdict is not Verdict.OK:
        saw = f"{probe.verdict.value} ({probe.why})" if probe.why else probe.verdict.value
        text = (
            f"{case.build.version} with {case.facts.architecture}, {case.target.describe()}, tried in a child process, "
            f"came to: {saw}; use another placement"
        )
        yield Diagnostic(f"probe-{probe.verdict.value}", text)


def _devices(case: _Case) -> Iterator[Diagnostic]:
    """Devices that exist, shares that fit them, a main device among them."""
    names = ", ".join(case.host.devices) or "none"
    for name in dict.fromkeys(case.target.devices):
        if name not in case.host.devices:
            text = f"device {name!r} is not among this library's devices ({names}); name one of them"
            yield Diagnostic("unknown-device", text)
    n_devices, mode = len(case.device_names), case.target.mode
    if mode is SplitMode.TENSOR and n_devices == 0:
        text = f"tensor mode takes CPU devices only by name, and there are {names}; name them, as in --device CPU,CPU"
        yield Diagnostic("no-device", text)
    limit = min(case.build.max_devices, n_devices or case.build.max_devices)
    shares = case.target.tensor_split
    if shares is not None and len(shares) > limit:
        text = f"the tensor split has {len(shares)} shares for {limit} device(s); give one share a device at most"
        yield Diagnostic("tensor-split-too-long", text)
    if len(case.target.devices) > case.build.max_devices:
        text = f"{len(case.target.devices)} devices are named and this build takes {case.build.max_devices}; name fewer"
        yield Diagnostic("too-many-devices", text)
    if case.target.main_gpu >= max(n_devices, 1):
        text = (
            f"main device {case.target.main_gpu} is named and there are {n_devices} (counted from 0); name one of them"
        )
        yield Diagnostic("main-gpu-out-of-range", text)


def _mode(case: _Case) -> Iterator[Diagnostic]:
    """Modes that the build has, architectures that it takes in them."""
    target, facts = case.target, case.facts
    if target.mode is SplitMode.ROW:
        text = (
            "row mode is deprecated: CPU and newer CUDA builds refuse it, others act as layer mode; use layer or tensor"
        )
        yield case.known("row-mode", text)
    if target.mode is not SplitMode.TENSOR:
        return
    fault = tables.tensor_fault(facts.architecture, case.build.number)
    if fault is not None:
        text = f"architecture {facts.architecture} does not run in tensor mode here: {fault}; use layer mode"
        yield case.known("architecture-in-tensor-mode", text)
    if facts.max_alibi_bias > 0 and case.n_active > 1:
        text = (
            f"architecture {facts.architecture} uses ALiBi (bias {facts.max_alibi_bias:g}), which gives wrong logits "
            f"silently in tensor mode on {case.n_active} devices; use layer mode, or one device"
        )
        yield Diagnostic("alibi-in-tensor-mode", text)


def _adapters(case: _Case) -> Iterator[Diagnostic]:
    """Adapters, which tensor mode cannot split; a trial loads none, so it settles nothing."""
    n_adapters = case.session.n_adapters
    if n_adapters and case.target.mode is SplitMode.TENSOR:
        text = (
            f"the session has {n_adapters} adapter(s), with which libllama aborts at its first decode in tensor mode, "
            "on one device too (ggml-backend-meta.cpp, split of lora_a and lora_b unknown); use layer mode, or merge "
            "it into the model"
        )
        yield Diagnostic("adapters-in-tensor-mode", text)


def _tensor_heads(case: _Case) -> Iterator[Diagnostic]:
    """Head counts that tensor mode can cut."""
    facts, target = case.facts, case.target
    heads = facts.least_head_kv
    if target.mode is not SplitMode.TENSOR or heads == 0:
        return
    if heads == 1 and facts.has_k_norm:
        text = (
            "the model has one KV head and norms over keys or queries: in tensor mode libllama aborts at the first "
            "batch of one token (ggml-backend-meta.cpp, src_ss[0].axis); use layer mode"
        )
        yield case.known("k-norm-with-one-kv-head", text)
    if heads == 1 and case.quantized:
        text = (
            f"the model has one KV head and the cache is {target.type_k}/{target.type_v}: in tensor mode libllama "
            "aborts at the first decode (unsupported split of mul_mat); use an f16 cache or layer mode"
        )
        yield case.known("quantized-cache-with-one-kv-head", text)
    if case.n_active > heads:
        text = (
            f"{case.n_active} devices share {heads} KV head(s), which some builds abort on or answer wrongly; "
            f"use {heads} device(s)"
        )
        yield Diagnostic("more-devices-than-kv-heads", text, blocking=not case.build.measured, settled_by_probe=True)
    elif case.n_active and heads % case.n_active:
        text = f"{heads} KV heads do not divide over {case.n_active} devices; the shares are rounded to whole heads"
        yield Diagnostic("uneven-kv-heads", text, blocking=False)


def _shares(case: _Case) -> Iterator[Diagnostic]:
    """What the devices really get of a tensor split, where it is not what was asked."""
    target, n_devices = case.target, len(case.device_names)
    asked = target.tensor_split
    if target.mode is not SplitMode.TENSOR or asked is None or n_devices < 2 or not sum(asked[:n_devices]):
        return
    wanted = [share / sum(asked[:n_devices]) for share in (*asked, *([0.0] * n_devices))][:n_devices]
    got = effective_split(case.facts, n_devices, asked)
    for what, shares in (("weights", got.weights), ("cache", got.cache)):
        if shares and max(abs(one - other) for one, other in zip(shares, wanted, strict=True)) > tables.SPLIT_NOISE:
            text = (
                f"the tensor split asks for {_of_one(wanted)} and whole heads give {_of_one(shares)} of the {what}, "
                "summed over the layers; plan with these shares, or ask for others"
            )
            yield Diagnostic("uneven-tensor-split", text, blocking=False)


def _of_one(shares: Iterable[float]) -> str:
    """Write shares of one."""
    return ":".join(f"{share:.3f}" for share in shares)


def _cache(case: _Case) -> Iterator[Diagnostic]:
    """Cache types, residency and flash attention."""
    target, facts, flash = case.target, case.facts, case.flash
    tensor = target.mode is SplitMode.TENSOR
    if tensor and flash is FlashAttn.OFF:
        text = "tensor mode needs flash attention and it is off; turn it on, or use layer mode"
        yield Diagnostic("flash-attention-off", text)
    if tensor and not target.offload_kqv and facts.has_memory:
        text = (
            "tensor mode with the cache on the host (-nkvo) makes libllama die in the first decode, or answer wrongly; "
            "put the cache on the devices, or use layer mode"
        )
        yield case.known("cache-on-host-in-tensor-mode", text)
    if facts.equal_cache_types and target.type_k != target.type_v:
        text = (
            f"this model's K and V caches must have one type, asked are {target.type_k} and {target.type_v}; "
            "name the same twice"
        )
        yield Diagnostic("unequal-cache-types", text)
    if flash is FlashAttn.OFF and target.type_v in tables.QUANTIZED_CACHE_TYPES:
        text = f"a V cache of {target.type_v} needs flash attention and it is off; turn it on, or use f16"
        yield Diagnostic("quantized-v-without-flash-attention", text)
    if flash is not FlashAttn.OFF:
        for what, kind, width in (("K", target.type_k, facts.n_embd_head_k), ("V", target.type_v, facts.n_embd_head_v)):
            if kind in tables.QUANTIZED_CACHE_TYPES and width % tables.CACHE_BLOCK_VALUES:
                text = (
                    f"heads of {width} values do not fill blocks of {tables.CACHE_BLOCK_VALUES}, so the {what} cache "
                    f"cannot be {kind}; use f16"
                )
                yield Diagnostic("cache-type-does-not-fit-heads", text)
    number = case.build.number
    if tensor and not case.build.measured and (number is None or number < tables.FULL_CACHE_TYPES_SINCE):
        for kind in sorted({target.type_k, target.type_v} - tables.EARLY_TENSOR_CACHE_TYPES):
            since = tables.FULL_CACHE_TYPES_SINCE
            text = f"builds before {since} may assert on a {kind} cache in tensor mode; use q8_0 or f16"
            yield case.known("cache-type-in-tensor-mode", text)


def _room(case: _Case) -> Iterator[Diagnostic]:
    """Room in the target for what the session holds."""
    return room(case.session, case.target, case.facts)


def room(
    held: SessionFacts, target: Placement, facts: ModelFacts, *, holder: str = "the session"
) -> Iterator[Diagnostic]:
    """Find what a placement has no room for.

    Args:
        held: what is to be held.
        target: the placement.
        facts: the model.
        holder: what holds it now, for the texts.
    """
    last = max(held.tokens, default=-1)
    if last >= target.n_seq_max:
        text = f"sequence {last} is in use and the context has room for {target.n_seq_max}; raise -np to {last + 1}"
        yield Diagnostic("too-few-sequences", text)
    n_encoded = held.n_encoder_tokens
    if n_encoded and n_encoded > (most := shape_of(facts, target).n_ubatch):
        text = (
            f"the encoder has read {n_encoded} tokens and is to read them again as a whole, and the micro-batch "
            f"holds {most}; ask for -ub {n_encoded} or more"
        )
        yield Diagnostic("encoder-prompt-too-long", text)
    n_ctx = target.n_ctx or facts.n_ctx_train
    if not n_ctx or not held.tokens:
        return
    if target.kv_unified or target.n_seq_max == 1:
        have, most, who = held.n_tokens, n_ctx, holder
    else:
        have, most, who = max(held.tokens.values()), n_ctx // target.n_seq_max, f"a sequence of {holder}"
    if have > most and facts.has_memory and not facts.is_recurrent:
        least = have * (1 if target.kv_unified else target.n_seq_max)
        text = f"{who} holds {have} tokens and the context has room for {most}; ask for -c {least} or more"
        yield Diagnostic("context-too-small", text)


def _conversion(case: _Case) -> Iterator[Diagnostic]:
    """Differences in layout, for which the carry would have to be rewritten."""
    if case.current is None or case.facts.is_recurrent or not case.facts.has_memory:
        return
    current, target = case.current, case.target
    needed = [
        f"{what} cache from {old} to {new}"
        for what, old, new in (("K", current.type_k, target.type_k), ("V", current.type_v, target.type_v))
        if old != new
    ]
    if case.flash is not current.flash_attn and FlashAttn.AUTO not in {case.flash, current.flash_attn}:
        needed.append(f"flash attention from {current.flash_attn.value} to {case.flash.value}")
    if current.n_streams != target.n_streams:
        needed.append(f"{current.n_streams} stream(s) of cells to {target.n_streams}")
    elif case.facts.architecture in tables.OPAQUE_STATES:
        old, new = (_n_compressed(case.facts, one) for one in (current, target))
        if old != new:
            flags = [f"-c {one.n_ctx} -np {one.n_seq_max}" for one in (current, target)]
            needed.append(f"context from {flags[0]} to {flags[1]} ({old} compressed rows to {new})")
    for what in needed:
        if case.facts.architecture in tables.OPAQUE_STATES:
            text = (
                f"the {what} of {case.facts.architecture} cannot be converted: its state is carried whole, not "
                "understood; keep it as it is, or start afresh in the target"
            )
            yield Diagnostic("cannot-convert", text)
        elif any(f"to {kind}" in what for kind in tables.SOURCE_ONLY_CACHE_TYPES):
            text = f"the {what} cannot be converted: that type is read and not written; choose another cache type"
            yield Diagnostic("cannot-convert", text)
        else:
            text = f"needs conversion: {what}; allow it (without --no-convert), or keep it as it is"
            yield Diagnostic(NEEDS_CONVERSION, text)


def _n_compressed(facts: ModelFacts, placement: Placement) -> int:
    """Count the rows of older tokens, all of which are written out whether they are in use or not."""
    return sum(one.n_rows for one in cache_tensors(facts, placement) if one.section == "compressed")


def _restore(case: _Case) -> Iterator[Diagnostic]:
    """Some builds restore the last stream alone, which would show only after everything was freed."""
    number, n_held = case.build.number, len(case.session.tokens)
    if case.facts.is_recurrent or not case.facts.has_memory or min(n_held, case.target.n_streams) < 2:
        return
    if number is not None and number < tables.ALL_STREAMS_RESTORED_SINCE:
        text = (
            f"the session holds {n_held} sequences with a stream of cells each, and this libllama "
            f"({case.build.version}) restores the last one alone; use a newer one, or a unified cache"
        )
        yield Diagnostic("streams-lost-on-restore", text)


def _quiet(case: _Case) -> Iterator[Diagnostic]:
    """Nothing may be in flight when the state is taken."""
    if case.session.pending_shift:
        text = "a sequence shift is not applied yet, and the state would not hold it; decode one token first"
        yield Diagnostic("pending-shift", text)


def _memory(case: _Case) -> Iterator[Diagnostic]:
    """The host must hold the carry, and the largest tensor while it is placed."""
    available = case.host.mem_available
    if available is None or case.current is None or not case.session.tokens:
        return
    current = case.current
    state = case.session.state_bytes
    if state is None:
        state = case.facts.state_bytes(
            case.session.n_tokens, current.type_k, current.type_v, n_sequences=len(case.session.tokens)
        )
    wanted = max(state - case.session.sealed_bytes, 0) + case.facts.largest_tensor_bytes
    if wanted > available:
        text = (
            f"the carry ({state} bytes) and the largest tensor ({case.facts.largest_tensor_bytes} bytes) need {wanted} "
            f"more bytes of host memory and {available} are available; end other programs, shorten the session, or "
            "try it with --force"
        )
        yield Diagnostic(DOES_NOT_FIT, text)


_RULES: tuple[Callable[[_Case], Iterator[Diagnostic]], ...] = (
    _devices,
    _mode,
    _adapters,
    _tensor_heads,
    _shares,
    _cache,
    _room,
    _conversion,
    _restore,
    _quiet,
    _memory,
)
