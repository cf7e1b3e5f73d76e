"""What a caller may know about the model and context that a state belongs to; every part is optional."""

from __future__ import annotations

from dataclasses import dataclass

from statecodec.tensor_types import TensorType


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that decide between readings and are checked against the state.

    Args:
        architecture: the name at the start of a context blob.
        sections: the memory's parts in order, as "attention" and "recurrent"; () for no memory at all.
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
        n_embd_k: values in a K row per layer that has one, of the first attention section; shape [n_layer].
        n_embd_v: values in a V row per layer that has one, of the first attention section; shape [n_layer].
        n_recurrent: layers of the model that have a recurrent state.
        n_vocab: tokens in the vocabulary.
    """

    architecture: str | None = None
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
    n_embd_k: tuple[int, ...] | None = None
    n_embd_v: tuple[int, ...] | None = None
    n_recurrent: int | None = None
    n_vocab: int | None = None


NO_FACTS = ModelFacts()
