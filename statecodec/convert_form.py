"""Changes of the outer form: version, blob or file, and ranges of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from statecodec.errors import NotRepresentable, raises_bare
from statecodec.image import (
    AttentionSection,
    Change,
    KvStream,
    OpaqueSection,
    RecurrentSection,
    Section,
    StateImage,
    Tokens,
)
from statecodec.layouts import EXT_DTYPES, LAYOUTS, Form, Layout
from statecodec.regroup import (
    STATE_IT,
    Rotations,
    changed,
    each_stream,
    require_whole,
    rotation_of_section,
    take_cells,
)
from statecodec.views import Cells, Rotation


@raises_bare
def to_version(image: StateImage, version: int, *, rotation: Rotations = None) -> StateImage:
    """Write a state as another session version does (its sequence version goes with it: 9 and 2, 10 and 3, 11 and 4).

    Args:
        image: a whole state.
        version: the wanted session version; the newest layout of that version is meant.
        rotation: blocks that rows are rotated with, where the source's bytes do not say and the target's do; one for
            all attention sections, or one for each.

    Returns:
        The state in that layout. The extra record grows from 8 to 12 bytes by the token list of a file where a position
        is one token's, and by the null token where it is not known; what the target cannot say is in the warnings.

    Raises:
        NotRepresentable: there is no such version, or the state has what it cannot hold, or the rotation is unknown.
    """
    require_whole(image, "the version")
    targets = [layout for layout in LAYOUTS if layout.session_version == version]
    if not targets:
        known = sorted({layout.session_version for layout in LAYOUTS})
        raise NotRepresentable("the version", version, f"versions {known}", "Choose one of them.")
    target = targets[-1]
    if target in image.layouts and image.version_word in {None, _word(image.form, target)}:
        return replace(image, layouts=frozenset({target}))
    warnings: list[str] = []
    sections: list[Section] = []
    number = 0
    for section in image.sections:
        if isinstance(section, AttentionSection):
            sections.append(_attention(image, section, target, rotation_of_section(rotation, number), warnings))
            number += 1
        else:
            if isinstance(section, RecurrentSection) and not target.has_history:
                _refuse_history(section)
            sections.append(section)
    if image.outputs is not None:
        warnings.append("logits and embeddings of the last decode are not kept: decode the last token again")
    written = replace(
        image,
        layouts=frozenset({target}),
        outputs=None,
        version_word=None if image.version_word is None else _word(image.form, target),
        source_seq_id=_source(image, target),
    )
    return changed(written, sections, Change(f"version {version}", warnings=tuple(dict.fromkeys(warnings))))


def _word(form: Form, layout: Layout) -> int:
    return layout.sequence_version if form.is_sequence else layout.session_version


def _source(image: StateImage, target: Layout) -> int | None:
    """The id in the prefix, which newer sequence blobs must have."""
    if image.form is not Form.SEQUENCE or (image.source_seq_id is None and False in target.prefixes):
        return image.source_seq_id
    return image.source_seq_id or 0


def _refuse_history(section: RecurrentSection) -> None:
    if any(layer.history is not None for layer in section.layers):
        raise NotRepresentable("recurrent layers", "second histories", "this version", "Choose 10 or newer.")


def _attention(
    image: StateImage, section: AttentionSection, target: Layout, told: Rotation | None, warnings: list[str]
) -> AttentionSection:
    streams: list[KvStream | None] = []
    ext_bytes = 0
    for stream in section.streams:
        if stream is None or not len(stream.cells):
            streams.append(None)
            continue
        cells = _with_ids(image, stream.cells)
        if cells.ext is not None and cells.ext_bytes not in target.ext_bytes:
            cells = replace(cells, ext=_ext(image, cells, max(target.ext_bytes), warnings))
        ext_bytes = cells.ext_bytes
        streams.append(replace(stream, cells=cells, rotation=_rotation(stream, target, told, warnings)))
    return AttentionSection(section.offset, ext_bytes, tuple(streams))


def _with_ids(image: StateImage, cells: Cells) -> Cells:
    """Cells of sequence blobs of early 2025 name no sequence; all later ones name one."""
    if len(cells.seq_ids) or not len(cells):
        return cells
    return take_cells(cells, np.arange(len(cells)), (image.source_seq_id or 0,))


def _ext(image: StateImage, cells: Cells, n_bytes: int, warnings: list[str]) -> npt.NDArray[np.void]:
    """The extra records in another size."""
    old = cells.ext
    new = np.zeros(len(cells), dtype=EXT_DTYPES[n_bytes])
    new["x"], new["y"] = old["x"], old["y"]  # type: ignore[index]
    if "token" in (new.dtype.names or ()):
        new["token"] = _tokens_at(image, cells, warnings)
    else:
        warnings.append("the cells' tokens are not kept")
    return new


def _tokens_at(image: StateImage, cells: Cells, warnings: list[str]) -> npt.NDArray[np.int32]:
    """The token of each cell by the file's list, or the null token where that does not say."""
    found = np.full(len(cells), -1, dtype="<i4")
    unique, places, counts = np.unique(cells.pos, return_index=True, return_counts=True)
    text = np.empty(0, dtype="<i4") if image.tokens is None else image.tokens.text
    if len(unique) and len(unique) == len(cells) == int(unique[-1]) + 1 <= len(text):
        found[places] = text[unique]
    else:
        single = (counts == 1).sum()
        warnings.append(f"the tokens of {len(cells)} cells are unknown ({single} of them at a position of their own)")
    return found


def _rotation(stream: KvStream, target: Layout, told: Rotation | None, warnings: list[str]) -> Rotation | None:
    if not target.has_rotation:
        if stream.rotation is not None and any(stream.rotation):
            warnings.append(
                f"rows are rotated by blocks of {stream.rotation.k} (K) and {stream.rotation.v} (V), which "
                "this version does not say"
            )
        return None
    known = told if stream.rotation is None else stream.rotation
    if known is not None:
        return known
    if not stream.is_quantized and (stream.values or not stream.keys):
        return Rotation(0, 0)
    raise NotRepresentable("rows", "an unknown rotation", "a version that says it", STATE_IT)


@raises_bare
def as_blob(image: StateImage) -> StateImage:
    """The state of a file as the blob that the library's calls take; tokens and version word stay behind.

    Returns:
        A context or sequence blob; a sequence blob gets a prefix where its layout has one.
    """
    if image.tokens is None:
        return image
    form = Form.SEQUENCE if image.form is Form.SEQUENCE_FILE else Form.CONTEXT
    prefixed = form is Form.SEQUENCE and all(True in layout.prefixes for layout in image.layouts)
    bare = replace(image, form=form, tokens=None, version_word=None, source_seq_id=0 if prefixed else None)
    return changed(bare, image.sections, Change("taken out of its file"))


@raises_bare
def as_file(image: StateImage, tokens: npt.NDArray[np.int32] | Sequence[int]) -> StateImage:
    """A blob as the file that the library's calls take.

    Args:
        image: a context or sequence blob.
        tokens: the tokens that it was made from; int32.

    Returns:
        A session or sequence file of the newest layout that the blob can be of.

    Raises:
        NotRepresentable: it is not all there, or is a file already.
    """
    if image.tokens is not None:
        raise NotRepresentable("a file", "a file", "a file around it", "Take the blob out of it first.")
    if image.content is not image.content.FULL:
        raise NotRepresentable("a file", f"a state that is {image.content.value}", "a file", "Take it without flags.")
    newest = max(image.layouts, key=lambda layout: (layout.session_version, not layout.has_outputs, layout.has_streams))
    words = np.asarray(tokens, dtype="<i4")
    words.flags.writeable = False
    form = Form.SEQUENCE_FILE if image.form is Form.SEQUENCE else Form.SESSION_FILE
    filed = replace(
        image,
        form=form,
        layouts=frozenset({newest}),
        tokens=Tokens(words, words, (), None),
        version_word=_word(form, newest),
        source_seq_id=None,
    )
    return changed(filed, image.sections, Change("put into a file"))


@raises_bare
def carve_layers(image: StateImage, first: int, last: int) -> StateImage:
    """The part of a state that a device with some of the layers needs.

    Args:
        image: a whole state.
        first: ordinal of the first layer that stays, among the layers that have a cache in each section.
        last: ordinal behind the last one.

    Returns:
        The state with these layers alone; a section may be left without any.

    Raises:
        NotRepresentable: the range is empty or beyond the layers of every section.
    """
    require_whole(image, "a range of layers")
    most = max((s.n_layers or 0 for s in image.sections if not isinstance(s, OpaqueSection)), default=0)
    if not 0 <= first < last <= most:
        raise NotRepresentable("a range of layers", f"{first} to {last}", f"{most} layers", "Choose a smaller one.")
    chosen = slice(first, last)
    sections = each_stream(
        image, lambda _, stream: replace(stream, keys=stream.keys[chosen], values=stream.values[chosen])
    )
    carved = [
        replace(section, layers=section.layers[chosen]) if isinstance(section, RecurrentSection) else section
        for section in sections
    ]
    return changed(image, carved, Change(f"layers {first} to {last - 1} carved out"))


@raises_bare
def join_layers(parts: Sequence[StateImage]) -> StateImage:
    """Ranges of layers of one state put together again, lowest first.

    Raises:
        NotRepresentable: the parts do not hold the same cells.
    """
    if not parts:
        raise NotRepresentable("ranges of layers", "none", "one state", "Give at least one.")
    first = parts[0]
    for part in parts:
        require_whole(part, "a range of layers")
        if _cells_of(part) != _cells_of(first):
            raise NotRepresentable("ranges of layers", "different cells", "one state", "Carve them from one state.")
    sections: list[Section] = []
    for same in zip(*(part.sections for part in parts), strict=True):
        caches = [section for section in same if isinstance(section, AttentionSection)]
        memories = [section for section in same if isinstance(section, RecurrentSection)]
        if caches:
            streams = tuple(
                _stacked([s for s in group if s is not None])
                for group in zip(*(cache.streams for cache in caches), strict=True)
            )
            sections.append(replace(caches[0], streams=streams))
        else:
            layers = tuple(layer for memory in memories for layer in memory.layers)
            sections.append(replace(memories[0], layers=layers))
    return changed(first, sections, Change(f"{len(parts)} ranges of layers put together"))


def _cells_of(image: StateImage) -> list[tuple[object, ...]]:
    """The cells of all sections, comparable."""
    found: list[tuple[object, ...]] = []
    for section in image.sections:
        if isinstance(section, AttentionSection):
            found += [(i, s.cells.pos.tobytes(), s.cells.seq_ids.tobytes()) for i, s in section.filled()]
        elif isinstance(section, RecurrentSection):  # pragma: no branch - opaque ones were refused before
            found.append((section.cells.pos.tobytes(), section.cells.seq_ids.tobytes()))
    return found


def _stacked(streams: Sequence[KvStream]) -> KvStream | None:
    """Layers of several streams over the same cells, one after the other."""
    if not streams:
        return None
    keys = tuple(layer for stream in streams for layer in stream.keys)
    values = tuple(layer for stream in streams for layer in stream.values)
    return replace(streams[0], keys=keys, values=values)  # type: ignore[arg-type]
