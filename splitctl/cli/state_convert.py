"""Changes a state by what the command line asks for, in an order in which every step can be done, and writes it.

Order: a damaged tail dropped, one sequence out or several together, other ids, the first tokens; then streams; then a
newer version before the types, because it has words for what the types need; V plain before types, transposed after; an
older version last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import statecodec
from splitctl.carry.durable import replacing
from splitctl.cli.state_file import StateFile
from splitctl.model.facts import ModelFacts
from statecodec import Rotation, StateImage, TensorType, transcode


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to become of a state; None leaves a thing as it is.

    Args:
        version: session version.
        flash_attn: whether it is for a context with flash attention.
        type_k: type of K.
        type_v: type of V.
        n_stream: streams, 1 for unified.
        source_rotation: blocks that rows are rotated with where the bytes do not say.
        rotation: blocks that rows are to be rotated with.
        first: positions below it stay.
        cut_at_gap: whether what stands behind a missing position goes.
        drop_tail: whether what is whole of a damaged state is enough.
        extract: the sequence that is taken out.
        merge: whether several sequence states become one context.
        architecture: the name for a merged context.
        renumber: old id -> new id.
        as_file: whether the result is a file with tokens (True) or a bare blob (False).
    """

    version: int | None = None
    flash_attn: bool | None = None
    type_k: TensorType | None = None
    type_v: TensorType | None = None
    n_stream: int | None = None
    source_rotation: Rotation | None = None
    rotation: Rotation | None = None
    first: int | None = None
    cut_at_gap: bool = False
    drop_tail: bool = False
    extract: int | None = None
    merge: bool = False
    architecture: str | None = None
    renumber: Mapping[int, int] | None = None
    as_file: bool | None = None

    @property
    def is_anything(self) -> bool:
        """Whether any change was asked for."""
        return self != Wanted()


def convert(files: Sequence[StateFile], images: Sequence[StateImage], wanted: Wanted) -> StateImage:
    """Change a state; its changes are listed in it. One file and image, unless they are merged.

    Raises:
        statecodec.NotRepresentable: it cannot become that; the message says what to do.
    """
    image = images[0]
    tokens = _tokens(files[0], image, wanted.extract)
    if wanted.merge:
        image = _merged(images, wanted)
        tokens = None
    elif wanted.extract is not None:
        image = transcode.extract(image, wanted.extract)
    if wanted.renumber:
        image = transcode.renumber(image, wanted.renumber)
    if wanted.first is not None:
        image = transcode.keep_first(image, wanted.first)
    if wanted.cut_at_gap:
        image = transcode.cut_at_gap(image)
    if tokens is not None and (wanted.first is not None or wanted.cut_at_gap or wanted.drop_tail):
        # A file's own list is cut with its cells; this one stands beside them, in a carry.
        tokens = tokens[: max((span.pos_max + 1 for span in image.sequences().values()), default=0)]
    if wanted.n_stream is not None:
        image = transcode.to_streams(image, wanted.n_stream)
    image = _rewritten(image, wanted)
    return _formed(image, wanted, tokens)


def _tokens(file: StateFile, image: StateImage, seq_id: int | None) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """The tokens that the state was made from: of its file, or of its one sequence in a carry; packed ones stay out."""
    if image.tokens is not None:
        return image.tokens.text if image.tokens.packed_version is None else None
    if file.carry is None:
        return None
    ids = list(image.sequences()) if seq_id is None else [seq_id]
    return file.carry.found.tokens(ids[0]) if len(ids) == 1 else None


def _merged(images: Sequence[StateImage], wanted: Wanted) -> StateImage:
    names = {image.architecture for image in images} - {None} | ({wanted.architecture} - {None})
    if len(names) != 1:
        found = f"the architectures {sorted(map(str, names))}" if names else "no architecture"
        action = "Name it with --architecture, or the model with --model."
        raise statecodec.NotRepresentable("sequence states", found, "a context, which begins with one", action)
    states = {number: transcode.as_blob(image) for number, image in enumerate(images)}
    return transcode.merge(states, architecture=str(names.pop()), n_stream=wanted.n_stream or 1)


def _rewritten(image: StateImage, wanted: Wanted) -> StateImage:
    is_newer = wanted.version is not None and wanted.version >= max(image.versions, default=0)
    is_typed = wanted.type_k is not None or wanted.type_v is not None
    if wanted.version is not None and is_newer:
        # Where the bytes do not say how rows are rotated and no type changes, --rotation is what they are.
        told = wanted.source_rotation if is_typed else wanted.source_rotation or wanted.rotation
        image = transcode.to_version(image, wanted.version, rotation=told)
    if wanted.flash_attn is True:
        image = transcode.to_v_trans(image, v_trans=False)
    if is_typed or (wanted.rotation is not None and {one.rotation for one in image.streams()} != {wanted.rotation}):
        image = transcode.to_types(
            image,
            type_k=wanted.type_k,
            type_v=wanted.type_v,
            source_rotation=wanted.source_rotation,
            rotation=wanted.rotation,
        )
    if wanted.flash_attn is False:
        image = transcode.to_v_trans(image, v_trans=True)
    if wanted.version is None or is_newer:
        return image
    return transcode.to_version(image, wanted.version, rotation=wanted.rotation or wanted.source_rotation)


def _formed(image: StateImage, wanted: Wanted, tokens: np.ndarray[Any, np.dtype[np.int32]] | None) -> StateImage:
    if wanted.as_file is False:
        return transcode.as_blob(image)
    if wanted.as_file is None or image.tokens is not None:
        return image
    if tokens is None:
        found, action = (
            "a state without the tokens of one sequence",
            "Take one sequence out of a session file or a carry.",
        )
        raise statecodec.NotRepresentable("the state", found, "a file, which lists them", action)
    return transcode.as_file(image, tokens)


def write(image: StateImage, out: Path, sources: Sequence[StateFile], facts: ModelFacts | None) -> int:
    """Write a state, whole or not at all, and read it again before it is put in its place; returns its size, bytes.

    What is written for a model is read again as one of that model.

    Raises:
        OSError: it is not safely in its place.
        StateUnreadable: a source changed meanwhile, so what was written is worth nothing.
        statecodec.StateFormatError: what was written is no sound state.
    """
    statecodec.validate(image)
    chunks = list(statecodec.emit(image))
    n_bytes = sum(len(chunk) for chunk in chunks)
    with replacing(out, n_bytes) as temporary:
        with temporary.open("xb") as file:
            file.writelines(chunks)
        _read_again(temporary, image, facts)
        for source in sources:
            source.check()
    return n_bytes


def _read_again(path: Path, image: StateImage, facts: ModelFacts | None) -> None:
    known = statecodec.ModelFacts(sections=tuple(one.kind.value for one in image.sections), versions=image.versions)
    with path.open("rb") as file:
        written = StateFile(path, file.fileno())
        statecodec.parse(written.view, facts=known)
        if facts is not None:
            written.parsed(facts)


def answer(image: StateImage, out: Path, n_bytes: int) -> dict[str, Any]:
    """Say what was written, as an object."""
    return {
        "out": str(out),
        "n_bytes": n_bytes,
        "form": image.form.value,
        "layouts": sorted(layout.name for layout in image.layouts),
        "version_word": image.version_word,
        "changes": [dataclasses.asdict(change) for change in image.changes],
    }


def lines(body: Mapping[str, Any]) -> Iterator[str]:
    """Say what was written, for people."""
    form = body["form"] if body["form"].endswith("file") else f"{body['form']} blob"
    yield f"{body['out']}: {body['n_bytes']:,} bytes, {form}, layout {' or '.join(body['layouts'])}"
    for change in body["changes"]:
        bound = "exact" if change["is_exact"] else f"each stored value off by {change['error_bound']:.3g} at most"
        yield f"  {change['what']}: {bound}"
        yield from (f"  ! {warning}" for warning in change["warnings"])
    if not body["changes"]:
        yield "  nothing had to be changed"
