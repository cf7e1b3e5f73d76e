"""The laws that a state keeps: against itself, and against what is known of the model.

`parse` applies both to every reading, so an image that came out of it is sound; `validate` applies them again to an
image whose facts became known later or that was made by a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from statecodec.envelope import LIST_OFFSET
from statecodec.errors import Inconsistent, raises_bare
from statecodec.facts import NO_FACTS, CacheFacts, ModelFacts, RecurrentFacts
from statecodec.image import AttentionSection, Content, OpaqueSection, RecurrentSection, Section, StateImage
from statecodec.tensor_types import TensorType
from statecodec.views import Cells, Columns, Rows


@raises_bare
def validate(image: StateImage, facts: ModelFacts | None = None) -> None:
    """Check an image against itself and, where given, against the model and context.

    Raises:
        StateFormatError: a law is broken; nothing of the image may be given to the library then.
    """
    check_laws(image)
    check_facts(image, NO_FACTS if facts is None else facts)


def check_laws(image: StateImage) -> None:
    """Laws that need nothing but the image.

    Raises:
        Inconsistent: the sections hold cells but no layer at all, or a cell repeats a (sequence, position).
    """
    held = [section for section in image.sections if not isinstance(section, OpaqueSection)]
    if any(section.n_cells for section in held) and not any(section.n_layers for section in held):
        raise Inconsistent(held[0].offset, "layers of all sections", 0, "at least one layer where there are cells")
    for index, section in enumerate(image.sections):
        if isinstance(section, AttentionSection):
            for number, stream in section.filled():
                # Several parts of an image may share a position; only the extra record tells them apart.
                if not section.ext_bytes:
                    _check_unique(stream.cells, f"section {index} stream {number}")
        elif isinstance(section, RecurrentSection):
            _check_single(section.cells, f"section {index}")
            if image.form.is_sequence and section.n_cells > 1:
                found = f"{section.n_cells} cells"
                raise Inconsistent(section.offset, f"section {index}", found, "one recurrent cell for one sequence")


def _check_unique(cells: Cells, where: str) -> None:
    ids, positions = cells.pairs()
    keys = (ids.astype(np.int64) << 32) | positions
    # A cache is mostly written in order, and then no sort is needed.
    steps = np.diff(keys)
    if bool(np.all(steps > 0)):
        return
    twice = _twice(keys)
    if len(twice):
        key = int(twice[0])
        found = f"sequence {key >> 32} at position {key & 0xFFFFFFFF} twice"
        raise Inconsistent(cells.offset, f"{where} cells", found, "each position of a sequence once")


def _twice(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values that are there more than once, in ascending order."""
    ordered: npt.NDArray[Any] = np.sort(values)
    again: npt.NDArray[Any] = ordered[1:][ordered[1:] == ordered[:-1]]
    return again


def _check_single(cells: Cells, where: str) -> None:
    twice = _twice(cells.seq_ids)
    if len(twice):
        found = f"sequence {int(twice[0])} in two cells"
        raise Inconsistent(cells.offset, f"{where} cells", found, "one recurrent cell for each sequence")


def check_facts(image: StateImage, facts: ModelFacts) -> None:
    """Laws that compare an image with what is known.

    Raises:
        Inconsistent: the state belongs to another model or context.
    """
    if image.architecture is not None:
        # A word for its length stands before it, and before that a file's head and tokens.
        check_name(
            image.architecture, 4 if image.tokens is None else LIST_OFFSET + image.tokens.words.nbytes + 4, facts
        )
    if facts.sections is not None and image.content is not Content.PARTIAL:
        kinds = tuple(section.kind.value for section in image.sections)
        _expect(image.n_bytes, "sections", kinds, facts.sections)
    if facts.n_vocab is not None and image.outputs is not None and image.outputs.logits.size:
        _expect(image.outputs.offset, "logits of each output", image.outputs.logits.shape[1], facts.n_vocab)
    if facts.n_vocab is not None and image.tokens is not None and image.tokens.text.size:
        last = int(image.tokens.text.max())
        if last >= facts.n_vocab:
            raise Inconsistent(LIST_OFFSET, "tokens", last, f"less than {facts.n_vocab}, the size of the vocabulary")
    if facts.versions is not None and not image.versions & facts.versions:
        _expect(0, "session version", sorted(image.versions), sorted(facts.versions))
    for index, section in enumerate(image.sections):
        if isinstance(section, AttentionSection):
            _check_attention(section, facts, f"section {index}")
        elif isinstance(section, RecurrentSection):
            _check_recurrent(section, facts, f"section {index}")
    # A partial state lacks the main cache, which these facts are about.
    if image.content is not Content.PARTIAL:
        for index, (cache, has_v) in enumerate(zip(image.caches, facts.has_v, strict=False)):
            for number, stream in cache.filled():
                if stream.keys:
                    _expect(stream.offset, f"cache {index} stream {number} V", bool(stream.values), has_v)
        for index, (section, part) in enumerate(zip(image.sections, facts.parts or (), strict=False)):
            _check_part(section, part, f"section {index}")


def check_name(architecture: str, offset: int, facts: ModelFacts) -> None:
    """Compare the architecture's name, which stands at `offset` [bytes], with the model's.

    Raises:
        Inconsistent: the state belongs to a model of another architecture.
    """
    if facts.architecture is not None:
        _expect(offset, "architecture name", architecture, facts.architecture)


def _expect(offset: int, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Inconsistent(offset, what, found, wanted)


def _at_most(offset: int, what: str, found: int, bound: int | None) -> None:
    if bound is not None and found > bound:
        raise Inconsistent(offset, what, found, f"at most {bound}")


def _check_ids(cells: Cells, facts: ModelFacts, where: str) -> None:
    if facts.n_seq_max is not None and len(cells.seq_ids):
        _at_most(cells.offset, f"{where} sequence id", int(cells.seq_ids.max()), facts.n_seq_max - 1)


def _check_attention(section: AttentionSection, facts: ModelFacts, where: str) -> None:
    _at_most(section.offset, f"{where} cells", section.n_cells, facts.n_ctx)
    _at_most(section.offset, f"{where} layers", section.n_layers or 0, facts.n_layer)
    if facts.n_stream is not None:
        _expect(section.offset, f"{where} n_stream", len(section.streams), facts.n_stream)
    for number, stream in section.filled():
        place = f"{where} stream {number}"
        _check_ids(stream.cells, facts, place)
        if facts.has_ext is not None:
            _expect(stream.cells.offset, f"{place} extra record", section.ext_bytes > 0, facts.has_ext)
        if facts.v_trans is not None and stream.values:
            _expect(stream.offset, f"{place} v_trans", stream.v_trans, facts.v_trans)
        _check_types(stream.keys, facts.type_k, f"{place} K")
        _check_types(stream.values, facts.type_v, f"{place} V")


def _check_types(layers: tuple[Rows | Columns, ...], wanted: TensorType | None, where: str) -> None:
    if wanted is not None:
        for index, layer in enumerate(layers):
            _expect(layer.offset, f"{where} type of layer {index}", layer.kind.name, wanted.name)


def _check_recurrent(section: RecurrentSection, facts: ModelFacts, where: str) -> None:
    _check_ids(section.cells, facts, where)
    if facts.n_layer is not None:
        _at_most(section.offset, f"{where} n_layer", section.n_layer, facts.n_layer)
    _at_most(section.offset, f"{where} cells", section.n_cells, facts.n_seq_max)


def _check_part(section: Section, part: CacheFacts | RecurrentFacts, where: str) -> None:
    """Compare layers and widths with the model's; only a cache without cells shows none."""
    if isinstance(section, AttentionSection) and isinstance(part, CacheFacts):
        for number, stream in section.filled():
            _check_widths(stream.offset, stream.keys, part.k, f"{where} stream {number} K")
            _check_widths(stream.offset, stream.values, part.v, f"{where} stream {number} V")
    elif isinstance(section, RecurrentSection) and isinstance(part, RecurrentFacts):  # pragma: no branch - kinds agree
        _check_widths(section.offset, [layer.r for layer in section.layers], (part.r,) * part.n_layers, f"{where} R")
        _check_widths(section.offset, [layer.s for layer in section.layers], (part.s,) * part.n_layers, f"{where} S")


def _check_widths(offset: int, layers: Sequence[Rows | Columns], wanted: tuple[int, ...], where: str) -> None:
    _expect(offset, f"{where} layers", len(layers), len(wanted))
    for index, (layer, width) in enumerate(zip(layers, wanted, strict=True)):
        _expect(layer.offset, f"{where} layer {index} values of a row", layer.n_values, width)
