"""`splitctl state`: what a saved state is, whether it is sound, as what else it can be written, and whether two agree.

Everything happens in this process: the codec reads bytes, and no library is loaded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import statecodec
from splitctl.carry import file as carries
from splitctl.cli import state_convert, state_text
from splitctl.cli.hosts import with_screen
from splitctl.cli.options import Parsed
from splitctl.cli.output import ExitCode, Screen, error_body, one_line, print_json
from splitctl.cli.state_convert import Wanted
from splitctl.cli.state_diff import Comparison, compare
from splitctl.cli.state_file import NothingKept, StateFile, opened, refuse_part, repaired
from splitctl.errors import BadModelFile, CarryDamaged, SplitctlError
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import KV_TYPES
from splitctl.switching.state_facts import state_facts
from statecodec import Rotation, StateCodecError, StateFormatError, StateImage, TensorType

_files = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
_model = click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="GGUF",
    help="The model's file: its facts decide and are checked.",
)

#: What a file may do to a command; nothing else is expected of one.
_FAULTS = (StateCodecError, SplitctlError, OSError)


def _streams(text: str) -> int:
    if text == "unified":
        return 1
    if text.isdecimal() and 1 <= int(text) <= 256:
        return int(text)
    raise ValueError(f"{text!r} is not unified or a number from 1 to 256")


def _blocks(text: str) -> Rotation:
    """Read Hadamard blocks of K and V: one number for both, or two."""
    words = text.split(",")
    if len(words) <= 2 and all(word.isdecimal() for word in words):
        blocks = [int(word) for word in words]
        if all(block == 0 or (block <= 1 << 16 and block & (block - 1) == 0) for block in blocks):
            return Rotation(blocks[0], blocks[-1])
    raise ValueError(f"{text!r} is not one or two powers of two (0: not rotated), for example 64,64")


def _renumbering(text: str) -> dict[int, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    is_whole = all(old.isdecimal() and new.isdecimal() for old, _, new in pairs)
    if is_whole and len({old for old, _, _ in pairs}) == len(pairs):
        return {int(old): int(new) for old, _, new in pairs}
    raise ValueError(f"{text!r} is not pairs of ids, for example 0=2,1=0")


def _read_by(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Turn the word of a choice into a value; one that is not given stays None."""
    return lambda _context, _option, word: None if word is None else read(word)


_STREAMS, _BLOCKS = Parsed("unified|N", _streams), Parsed("K,V", _blocks)
_KIND = _read_by(lambda name: TensorType[name.upper()])


@click.group()
def state() -> None:
    """Look into saved states: llama.cpp's blobs, session and sequence files, slot files, and splitctl's own carry."""


@state.command()
@_files
@_model
@with_screen
def inspect(*, files: tuple[Path, ...], model: Path | None, screen: Screen) -> int:
    """Say what states are: form, version, layout, sections, cells, types."""

    def look(file: StateFile, image: StateImage, _facts: ModelFacts | None) -> dict[str, Any]:
        body = state_text.describe(file, image)
        if not screen.as_json:
            _show(list(state_text.rows(body)))
        return body

    return _each(files, model, look, screen)


@state.command()
@_files
@_model
@with_screen
def validate(*, files: tuple[Path, ...], model: Path | None, screen: Screen) -> int:
    """Say whether states are sound, by themselves and as states of a model; 1 when one is not."""

    def look(file: StateFile, image: StateImage, facts: ModelFacts | None) -> dict[str, Any]:
        if file.carry is not None:
            carries.check(file.path, file.carry.words, file.carry.found.tensors, file.carry.checksums)
        refuse_part(image)
        noted = [finding.text for finding in statecodec.findings(image)]
        if file.is_stateless:
            noted.append("it holds no state: restoring it reads its tokens again")
        if facts is not None and state_facts(facts)[0].sections is None:
            noted.append(f"layers and widths are not judged: no state of {facts.architecture} has been seen")
        # What is not understood may be cut or damaged as well as sound.
        is_valid = None if image.is_opaque else True
        verdict = "not judged, as its memory has a format of its own" if image.is_opaque else "sound"
        if not screen.as_json:
            lines = [f"{file.path}: {verdict}: {_short(image)}", *(f"  ! {text}" for text in noted)]
            sys.stdout.write("\n".join(lines) + "\n")
        return {"file": str(file.path), "valid": is_valid, "reading": _short(image), "findings": noted}

    return _each(files, model, look, screen)


def _each(paths: Sequence[Path], model: Path | None, look: Any, screen: Screen) -> ExitCode:
    bodies: list[dict[str, Any]] = []
    failures: list[tuple[str, str]] = []
    facts = None if model is None else read_facts(model)
    for path in paths:
        try:
            with opened(path) as file:
                bodies.append(look(file, file.parsed(facts), facts))
        except _FAULTS as error:
            message = _message(path, error)
            failures.append((type(error).__name__, message))
            bodies.append({"file": str(path), "valid": False, "error": _error(error)})
            screen.line(f"splitctl: {message}")
    if screen.as_json and failures:
        print_json(error_body(*failures[0], ExitCode.FAILED, {"files": bodies}))
    elif screen.as_json:
        print_json({"files": bodies})
    return ExitCode.FAILED if failures else ExitCode.DONE


def _message(path: Path, error: Exception) -> str:
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return one_line(text if isinstance(error, CarryDamaged | BadModelFile) else f"{path}: {text}")


def _error(error: Exception) -> dict[str, Any]:
    """An error as an object, with the place where the bytes stop making sense."""
    body: dict[str, Any] = {"kind": type(error).__name__, "message": one_line(str(error))}
    place = error.damage if isinstance(error, NothingKept) else error
    if isinstance(place, StateFormatError):
        body |= {"offset": place.offset, "field": place.field}
        body |= {"found": str(place.found), "expected": str(place.expected)}
    if isinstance(error, NothingKept):
        body["tokens"] = error.tokens
    return body


def _failed(screen: Screen, path: Path, error: Exception, *, about: Path) -> ExitCode:
    more = {"files": [{"file": str(path), "error": _error(error)}]}
    return screen.fail(type(error).__name__, _message(about, error), ExitCode.FAILED, more)


def _short(image: StateImage) -> str:
    cells = ", ".join(
        f"{section.kind.value} {'' if section.n_cells is None else f'{section.n_cells} cells'}".strip()
        for section in image.sections
    )
    content = "" if image.content is statecodec.Content.FULL else f", {image.content.value}"
    content += ", empty" if image.sections and image.is_empty else ""
    layouts = " or ".join(sorted(layout.name for layout in image.layouts))
    return f"{image.form.value}, layout {layouts}{content}, {cells or 'no memory'}"


def _show(rows: list[tuple[str, str]]) -> None:
    """A table on a terminal, a line a fact elsewhere."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())
    if not console.is_terminal:
        sys.stdout.write("".join(f"{label}: {text}\n" for label, text in rows))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text)
    console.print(table, markup=False)


@state.command()
@_files
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, metavar="OUT", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there, even if it is the input.")
@click.option(
    "--to-version", "version", type=click.Choice(["9", "10", "11"]), callback=_read_by(int),
    help="Session version (sequence version 2, 3, 4).",
)  # fmt: skip
@click.option(
    "--flash-attn", type=click.Choice(["on", "off"]), callback=_read_by("on".__eq__),
    help="For a context with flash attention, or without.",
)  # fmt: skip
@click.option("--type-k", type=click.Choice(KV_TYPES), callback=_KIND, help="Type of K.")
@click.option("--type-v", type=click.Choice(KV_TYPES), callback=_KIND, help="Type of V.")
@click.option("--streams", "n_stream", type=_STREAMS, help="One stream for all sequences, or one for each of N.")
@click.option("--rotation", type=_BLOCKS, help="Hadamard blocks that the rows are to have; 0: not rotated.")
@click.option("--source-rotation", type=_BLOCKS, help="Those that they have, where the bytes do not say.")
@click.option("--first", type=click.IntRange(0), metavar="N", help="Keep the positions below N.")
@click.option("--cut-at-gap", is_flag=True, help="Keep what stands before the first missing position.")
@click.option("--drop-tail", is_flag=True, help="Keep what is whole where the end is missing or damaged (--model).")
@click.option("--extract", type=click.IntRange(0, 255), metavar="SEQ", help="Take one sequence out of a context.")
@click.option("--merge", is_flag=True, help="Make the sequences of several files one context, numbered from 0.")
@click.option("--architecture", metavar="NAME", help="What a merged context belongs to, unless --model says it.")
@click.option("--renumber", type=Parsed("OLD=NEW,...", _renumbering), help="Give sequences other ids.")
@click.option(
    "--form", "as_file", type=click.Choice(["blob", "file"]), callback=_read_by("file".__eq__),
    help="A bare state, or one in a file with its tokens.",
)  # fmt: skip
@_model
@with_screen
def convert(
    *, files: tuple[Path, ...], out: Path, force: bool, model: Path | None, screen: Screen, **given: Any
) -> int:
    """Write a state as another context wants it, and say how exact that is."""
    wanted = Wanted(**given)
    if len(files) > 1 and not wanted.merge:
        raise click.UsageError(f"one FILE is converted at a time, or several with --merge; given are {len(files)}")
    if wanted.merge and wanted.extract is not None:
        raise click.UsageError("--merge and --extract go opposite ways: give one of them")
    try:
        facts = None if model is None else read_facts(model)
        _refuse_existing(files, out, force=force)
        if facts is not None and wanted.merge:
            wanted = replace(wanted, architecture=facts.architecture)
        with contextlib.ExitStack() as stack:
            opens = [stack.enter_context(opened(path)) for path in files]
            for file in opens:
                file.refuse_stateless()
            if not wanted.is_anything and opens[0].carry is None:
                raise click.UsageError("say what to change, for example --to-version 11")
            images = [repaired(file, facts) if wanted.drop_tail else file.parsed(facts) for file in opens]
            image = state_convert.convert(opens, images, wanted)
            body = state_convert.answer(image, out, state_convert.write(image, out, opens, facts))
    except _FAULTS as error:
        return _failed(screen, files[0], error, about=out if isinstance(error, OSError) else files[0])
    return screen.answer(body, "\n".join(state_convert.lines(body)))


def _refuse_existing(files: Sequence[Path], out: Path, *, force: bool) -> None:
    if force or not out.exists():
        return
    is_input = any(path.exists() and path.samefile(out) for path in files)
    what = "is the input" if is_input else "is there already"
    raise click.UsageError(f"{out} {what}; name another file with -o, or replace it with --force")


@state.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option(
    "--nmse", type=click.FloatRange(0), default=0.0, show_default=True, help="Error of rows that counts as the same."
)
@_model
@with_screen
def diff(*, first: Path, second: Path, nmse: float, model: Path | None, screen: Screen) -> int:
    """Say whether two states hold the same, however each is written; 1 when they do not."""
    path = first
    try:
        facts = None if model is None else read_facts(model)
        with opened(first) as one, opened(second) as two:
            one.refuse_stateless()
            image = one.parsed(facts)
            path = second
            two.refuse_stateless()
            found = compare(image, two.parsed(facts))
    except _FAULTS as error:
        return _failed(screen, path, error, about=path)
    body = {"first": str(first), "second": str(second), **found.to_json(nmse)}
    screen.answer(body, "\n".join(_lines(found, nmse)))
    return ExitCode.DONE if found.is_same(nmse) else ExitCode.FAILED


def _lines(found: Comparison, limit: float) -> Iterator[str]:
    yield "the same" if found.is_same(limit) else "different"
    for what, one, two in found.differences:
        yield f"  {what}: {one} | {two}"
    for index, (sides, n_cells) in enumerate(zip(found.sections, found.n_cells, strict=True)):
        for side, error in sides.items():
            equal = "bytes equal" if error.is_equal else f"NMSE {error.nmse:.3g}"
            yield f"  section {index}: {side.upper()} of {n_cells} cells: {equal}"
    yield from (f"  ! {note}" for note in found.notes)
    for what, one, two in found.writings:
        yield f"  written differently: {what}: {one} | {two}"
