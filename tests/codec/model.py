"""What the model's file would say of a state, taken from the state itself."""

from __future__ import annotations

from statecodec import AttentionSection, CacheFacts, ModelFacts, RecurrentFacts, RecurrentSection, StateImage


def parts_of(image: StateImage) -> tuple[CacheFacts | RecurrentFacts, ...]:
    """The parts of the memory that a sound state is of; a cache without cells shows no layers."""
    return tuple(_part(section) for section in image.sections)


def facts_of(image: StateImage) -> ModelFacts:
    """The parts, as facts; of a memory that is not understood its kind."""
    return ModelFacts(sections=("opaque",)) if image.is_opaque else ModelFacts(parts=parts_of(image))


def _part(section: object) -> CacheFacts | RecurrentFacts:
    if isinstance(section, AttentionSection):
        stream = next((stream for _, stream in section.filled()), None)
        if stream is None:
            return CacheFacts(())
        return CacheFacts(*(tuple(layer.n_values for layer in layers) for layers in (stream.keys, stream.values)))
    assert isinstance(section, RecurrentSection)
    first = section.layers[0]
    return RecurrentFacts(len(section.layers), first.r.n_values, first.s.n_values)
