"""What tests of changed images share."""

from __future__ import annotations

import numpy as np

from statecodec import (
    AttentionSection,
    Columns,
    KvStream,
    ModelFacts,
    Rows,
    StateImage,
    emit,
    parse,
    validate,
)
from statecodec.quants import to_floats


def written(image: StateImage) -> bytes:
    """Its bytes."""
    return b"".join(emit(image))


def reread(image: StateImage, facts: ModelFacts | None = None) -> StateImage:
    """A changed image is sound, and its bytes read as what it says it is."""
    validate(image)
    again = parse(written(image), facts=facts)
    assert again.sequences() == image.sequences()
    assert [section.kind for section in again.sections] == [section.kind for section in image.sections]
    return again


def stream_of(image: StateImage, number: int = 0) -> KvStream:
    """The first stream of an attention section that is written out."""
    section = image.sections[number]
    assert isinstance(section, AttentionSection)
    return next(section.filled())[1]


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean squared error by the mean square of what was wanted."""
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def numbers(layer: Rows | Columns) -> np.ndarray:
    """The rows of a layer as numbers."""
    assert isinstance(layer, Rows)
    return to_floats(layer.kind, layer.raw())
