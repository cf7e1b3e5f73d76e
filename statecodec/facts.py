"""What a caller may know about the model and context that a state belongs to; every part is optional."""

from __future__ import annotations

from dataclasses import dataclass

from statecodec.tensor_types import TensorType


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """An attention section as the model has it.

    Args:
        k: values of a K row, for each layer that has one.
        v: values of a V row, for each of these layers; empty where K alone is kept (MLA, most indexers).
    """

    k: tuple[int, ...]
    v: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrentFacts:
    """A recurrent section as the model has it.

    Args:
        n_layers: layers that have a recurrent state.
        r: values of an R row.
        s: values of an S row.
    """

    n_layers: int
    r: int
    s: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that decide between readings and are checked against the state.

    Args:
        architecture: the name at the start of a context blob.
        parts: the memory's parts in order, each layer and width of them; () for no memory at all. `sections` and
            `has_v` follow from them.
        sections: their kinds alone, as "attention", "recurrent" or "opaque"; () for no memory at all.
        n_layer: layers of the model; no section may have more.
        has_ext: whether cells carry an extra record (more than one position per token, or n-gram heads).
        has_v: whether each attention section holds V, in order (False for MLA and for indexers of K alone); sections
            beyond the tuple's end are not checked.
        n_seq_max: sequences of the context; every id is below it.
        n_ctx: cells of the context over all streams; no stream may hold more.
        n_stream: streams of the context (1 when unified).
        versions: session versions that the writing build can have had; sequence versions follow from them.
        v_trans: whether V is stored transposed (flash attention off).
        type_k: type of the K rows of attention sections.
        type_v: type of the V rows of attention sections.
        n_vocab: tokens in the vocabulary.
    """

    architecture: str | None = None
    parts: tuple[CacheFacts | RecurrentFacts, ...] | None = None
    sections: tuple[str, ...] | None = None
    n_layer: int | None = None
    has_ext: bool | None = None
    has_v: tuple[bool, ...] = ()
    n_seq_max: int | None = None
    n_ctx: int | None = None
    n_stream: int | None = None
    versions: frozenset[int] | None = None
    v_trans: bool | None = None
    type_k: TensorType | None = None
    type_v: TensorType | None = None
    n_vocab: int | None = None

    def __post_init__(self) -> None:
        """Let what follows from the parts follow."""
        if self.parts is not None:
            kinds = tuple("attention" if isinstance(part, CacheFacts) else "recurrent" for part in self.parts)
            caches = tuple(part for part in self.parts if isinstance(part, CacheFacts))
            object.__setattr__(self, "sections", kinds)
            object.__setattr__(self, "has_v", tuple(bool(cache.v or not cache.k) for cache in caches))


NO_FACTS = ModelFacts()
