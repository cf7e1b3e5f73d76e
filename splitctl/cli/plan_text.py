"""How a plan looks on the terminal: a bar for each device, and what there is to say in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from splitctl.placement import SplitMode
from splitctl.planning.fitting import Chunk, Need, lacking
from splitctl.planning.memory import DeviceFacts, Share
from splitctl.planning.survey import ModeAnswer, SwitchAnswer
from splitctl.planning.tiers import BESIDE, TierPlan

_WIDTH = 44
_MIB = 1024 * 1024
#: What a bar is made of: name, character, style.
PARTS = (
    ("weights", "█", "blue"),
    ("cache", "▓", "green"),
    ("compute", "▒", "yellow"),
    ("other", "░", "magenta"),
    ("carry", "#", "red"),
)


def sizes(share: Share) -> tuple[int, ...]:
    """Give the bytes of each part of a bar."""
    other = share.exchange + share.output + share.fixed
    return (share.weights, share.cache, share.compute, other, share.carry)


def mib(n_bytes: int) -> str:
    """Write a size."""
    return f"{n_bytes / _MIB:,.2f} MiB" if n_bytes < 100 * _MIB else f"{n_bytes / _MIB:,.0f} MiB"


def room_of(share: Share, devices: Sequence[DeviceFacts]) -> int | None:
    """Tell the free memory of a share's device."""
    names = {share.device} if share.index >= 0 else {"host", "CPU"}
    return next((device.free for device in devices if device.name in names), None)


def _bar(share: Share, whole: int) -> Text:
    """Draw one bar; a part that is there has a character at least."""
    bar = Text()
    left = _WIDTH
    for n_bytes, (_, char, style) in zip(sizes(share), PARTS, strict=True):
        if n_bytes:
            n_chars = min(max(round(_WIDTH * n_bytes / max(whole, 1)), 1), left)
            bar.append(char * n_chars, style)
            left -= n_chars
    bar.append("·" * left, "dim")
    return bar


def rows(answer: ModeAnswer | SwitchAnswer) -> Iterator[tuple[str, Share]]:
    """Give the bars of an answer with their labels."""
    shares = answer.plan.shares if isinstance(answer, ModeAnswer) else answer.plan.peaks
    for share in shares:
        yield f"{share.index} {share.device}", share
    yield "host", answer.plan.host


def title_of(answer: ModeAnswer | SwitchAnswer) -> str:
    """Name an answer."""
    if isinstance(answer, ModeAnswer):
        return answer.plan.placement.mode.value
    return f"{answer.plan.before.placement.mode.value}->{answer.plan.after.placement.mode.value}"


def show(
    console: Console,
    answers: Sequence[ModeAnswer | SwitchAnswer],
    devices: Sequence[DeviceFacts],
    chunk: Chunk | None,
) -> None:
    """Write a plan: its modes and the switch, what is free on devices, and the prompt chunk where it was asked for."""
    legend = Text()
    for name, char, style in PARTS:
        legend.append(f"{char} {name}  ", style)
    console.print(legend)
    for answer in answers:
        console.print()
        console.print(f"[bold]{escape(title_of(answer))}[/bold]  {_verdict(answer)}")
        whole = max((share.total for _, share in rows(answer)), default=1)
        for label, share in rows(answer):
            room = room_of(share, devices)
            scale = max(share.total, room) if room is not None and room < 4 * whole else whole
            line = Text(f"  {label:<22.22} ")
            line.append_text(_bar(share, scale))
            line.append(f" {mib(share.total)}" + (f" of {mib(room)} free" if room is not None else ""))
            console.print(line)
        for line_of_text in _notes(answer):
            console.print(f"  {escape(line_of_text)}")
    if chunk is not None:
        console.print()
        console.print(escape(chunk_text(chunk)))


def chunk_text(chunk: Chunk) -> str:
    """Say the largest prompt chunk, with both numbers where it is refused."""
    if chunk.refused:
        why = chunk.limited_by.text if chunk.limited_by else ""
        return (
            f"prompt chunk: {chunk.n_ubatch} tokens are the most that every device can lend and 256 are wanted: {why}; "
            "free memory there, shorten the context (-c), or use another split"
        )
    if chunk.limited_by is None:
        return f"prompt chunk: {chunk.n_ubatch} tokens, all that was asked for"
    return f"prompt chunk: {chunk.n_ubatch} tokens; for more, {chunk.limited_by.text}"


def _verdict(answer: ModeAnswer | SwitchAnswer) -> str:
    if isinstance(answer, ModeAnswer) and answer.refused:
        return "[red]refused[/red]"
    return "[green]fits[/green]" if answer.fits else "[red]does not fit[/red]"


def _notes(answer: ModeAnswer | SwitchAnswer) -> Iterator[str]:
    yield f"all devices together {mib(answer.plan.total)}"
    for need in lacking(answer.needs):
        yield need.text
    yield f"largest context: {_largest(answer.largest.n_ctx, answer.largest.lacking)}"
    if isinstance(answer, SwitchAnswer):
        yield f"the carry takes {mib(answer.plan.carry)} of host memory while it lasts"
        yield from map(_tier_text, answer.tiers)
        return
    plan = answer.plan
    if plan.asked and plan.placement.mode is not SplitMode.NONE:
        yield f"tensor split asked {_split(plan.asked)}, effective {_split(plan.effective)}" + (
            f" (cache {_split(plan.effective_cache)})" if plan.effective_cache else ""
        )
    if answer.balanced:
        yield "equally full with -ts " + ",".join(f"{one:g}" for one in answer.balanced)
    if not plan.measured:
        yield f"compute buffers by a formula, which is too high rather than too low: {answer.unsaid or 'nothing said'}"
    for reason in (*answer.refused, *answer.warnings):
        yield f"{reason.code}: {reason.text}"


def _tier_text(tier: TierPlan) -> str:
    """Say in a line what a switch takes with weights from a tier, or beside."""
    name = tier.name if tier.name == BESIDE else f"weights {tier.name}"
    held = ", ".join(f"{share.device} {mib(share.total)}" for share in (*tier.devices, tier.host))
    return f"{name:<17}" + (f"fits: {held}" if tier.fits else f"does not fit: {tier.reason}")


def _largest(n_ctx: int, missing: Sequence[Need]) -> str:
    if not n_ctx:
        return f"none: {missing[0].text}" if missing else "none"
    return f"{n_ctx} tokens" + (f"; for more, {missing[0].text}" if missing else " (the model was trained for no more)")


def _split(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.3f}" for share in shares)
