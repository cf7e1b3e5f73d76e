"""What a model's file says about the states of its contexts, in the codec's terms; a state is read and judged by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import statecodec
from splitctl.model.facts import ModelFacts
from splitctl.model.layers import layers_of
from splitctl.model.remembered import remembered
from splitctl.placement import FlashAttn, Placement
from splitctl.planning.cells import cache_tensors
from splitctl.switching.tables import OPAQUE_STATES, SEEN_MEMORIES
from statecodec import CacheFacts, RecurrentFacts, StateFormatError, StateImage

_Parts = tuple[CacheFacts | RecurrentFacts, ...]

#: Its n-gram heads give every cell an extra record, though a position is one number.
_WITH_RECORD = "qwen4exp"
#: It has no memory to speak of, but the library gives it a cache, whose cells a state then lists.
_WITH_IDLE_CACHE = "t5encoder"
#: Some builds keep rows of its index that are half as wide.
_WITH_TWO_INDEXES = "qwen4exp"


@remembered
def state_facts(facts: ModelFacts) -> tuple[statecodec.ModelFacts, ...]:
    """Say what a model's header promises of every state.

    Returns:
        One or more, the newest builds' first; a state agrees with one of them. Parts and sections are None for an
        architecture that no state has been seen of. Whether M-RoPE cells carry a record is left open: builds differ.
    """
    has_sections_of_rope = any(key.endswith(".rope.dimension_sections") for key, _ in facts.rope)
    known = statecodec.ModelFacts(
        architecture=facts.architecture,
        # The file of an encoder-decoder counts the layers of its encoder.
        n_layer=None if facts.is_encoder_decoder else len(layers_of(facts).each),
        has_ext=None if has_sections_of_rope or facts.architecture == _WITH_RECORD else False,
        n_vocab=facts.n_vocab or None,
    )
    if facts.architecture in OPAQUE_STATES:
        return (replace(known, sections=("opaque",)),)
    ways = list(_memories(facts))
    return tuple(replace(known, parts=parts) for parts in ways) or (known,)


def read_state(buffer: memoryview, facts: ModelFacts | None) -> StateImage:
    """Read a state, as one of a model where that is given.

    Raises:
        statecodec.StateFormatError: the bytes have no sound meaning, or are no state of the model.

    Lifetime: the image borrows the buffer.
    """
    if facts is None:
        return statecodec.parse(buffer)
    first, *others = state_facts(facts)
    try:
        return statecodec.parse(buffer, facts=first)
    except StateFormatError:
        for known in others:
            try:
                return statecodec.parse(buffer, facts=known)
            except StateFormatError:
                continue
        raise


def _memories(facts: ModelFacts) -> Iterator[_Parts]:
    """The parts of the memory, as builds make it; nothing where they are not known."""
    if not facts.has_memory and facts.architecture != _WITH_IDLE_CACHE:
        yield ()
        return
    if facts.architecture not in SEEN_MEMORIES | {_WITH_TWO_INDEXES}:
        return
    rows = _rows(facts)
    n_window = layers_of(facts).n_window
    yield _parts(facts, rows, has_window=n_window > 0)
    if n_window:
        # Builds of early 2025 kept the rows of a window's layers among all others.
        yield _parts(facts, {**rows, "attention": rows["all"]}, has_window=False)
    if facts.architecture == _WITH_TWO_INDEXES:
        index = {"k": [width // 2 for width in rows["index"]["k"]]}
        yield _parts(facts, {**rows, "index": index}, has_window=False)
    if facts.architecture == _WITH_IDLE_CACHE:
        # Some builds give it none.
        yield ()


_Rows = Mapping[str, Mapping[str, Sequence[int]]]


def _rows(facts: ModelFacts) -> _Rows:
    """Widths of the rows that a context keeps: section -> kind of row -> values of each layer's; "all": of K and V."""
    rows: dict[str, dict[str, list[int]]] = {}
    # Only transposed V has other widths in the cache than in the state.
    for tensor in cache_tensors(facts, Placement(flash_attn=FlashAttn.ON)):
        kind = tensor.name.removeprefix("cache_").removeprefix("idx_").rpartition("_l")[0]
        for section in (tensor.section, "all") if tensor.section in {"attention", "window"} else (tensor.section,):
            rows.setdefault(section, {}).setdefault(kind, []).append(tensor.width)
    return rows


def _parts(facts: ModelFacts, rows: _Rows, *, has_window: bool) -> _Parts:
    """Put sections in the order in which the library writes them."""
    recurrent = rows.get("recurrent", {})
    r, s = recurrent.get("r", ()), recurrent.get("s", ())
    state = [RecurrentFacts(len(r), r[0], s[0])] if r else []
    if facts.is_recurrent:
        return tuple(state)
    index = [_cache(rows, "index")] if "index" in rows else []
    window = [_cache(rows, "window")] if has_window else []
    before, behind = ([], index) if facts.is_hybrid else (index, [])
    return (_cache(rows, "attention"), *before, *window, *state, *behind)


def _cache(rows: _Rows, section: str) -> CacheFacts:
    """A section; one without layers lists its cells all the same."""
    of_section = rows.get(section, {})
    return CacheFacts(tuple(of_section.get("k", ())), tuple(of_section.get("v", ())))
