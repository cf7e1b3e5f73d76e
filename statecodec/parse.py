"""Reading: every known way to see the bytes is tried, and only one meaning may be left.

Laws:
1. A reading consumes every byte and keeps every law of `validate`, or it is none.
2. Readings that mean the same are one image with several possible versions.
3. If different meanings are left, the answer is `Ambiguous` and names the facts that would decide.
4. If none is left, the error is the failure that got furthest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from statecodec.cursor import Cursor, view
from statecodec.errors import Ambiguous, BadField, StateFormatError, TrailingBytes, UnknownVersion
from statecodec.facts import NO_FACTS, ModelFacts
from statecodec.image import AttentionSection, Form, OpaqueSection, RecurrentSection, Section, StateImage
from statecodec.layouts import LAYOUTS, Grammar, grammars, patterns
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.sections import Failures, Trial, read_sections, shape_of
from statecodec.validate import check_facts, check_laws

if TYPE_CHECKING:
    # collections.abc.Buffer exists from Python 3.12 on; the type checker knows it under this name everywhere.
    from typing_extensions import Buffer

_NAME_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_CONTEXT_RECURRENT_SEQ_MIN = 1


def parse(buffer: Buffer, *, facts: ModelFacts | None = None, limits: Limits = DEFAULT_LIMITS) -> StateImage:
    """Read a context blob (what `llama_state_get_data` wrote).

    Args:
        buffer: the bytes; anything C-contiguous with the buffer protocol. Nothing is copied from tensors.
        facts: what is known of the model and context; narrows the readings and is checked.
        limits: upper bounds.

    Returns:
        The one meaning of the bytes, as views on them.

    Raises:
        StateFormatError: the bytes have no sound meaning, or (`Ambiguous`) several.

    Lifetime:
        The image borrows `buffer`; see `image`.
    """
    known = NO_FACTS if facts is None else facts
    data = view(buffer)
    ways = tuple(grammars(LAYOUTS, known))
    if not ways:
        versions = sorted(known.versions or ())
        words = ", ".join(str(layout.session_version) for layout in LAYOUTS)
        raise UnknownVersion(0, "session version", versions, words)
    cursor = Cursor(data)
    architecture = _architecture(cursor, limits)
    failures = Failures()
    images: dict[tuple[object, ...], StateImage] = {}
    for grammar in ways:
        for image in _readings(grammar, cursor, architecture, known, limits, failures):
            key = meaning(image)
            same = images.get(key)
            images[key] = image if same is None else _merged(same, image)
    return _only(list(images.values()), failures, cursor.offset)


def _architecture(cursor: Cursor, limits: Limits) -> str:
    """The name that a context blob begins with."""
    start = cursor.offset
    length = cursor.count("architecture name length", limits.name_bytes, item_bytes=1)
    if not length:
        raise BadField(start, "architecture name length", length, "1 or more")
    start = cursor.offset
    name = bytes(cursor.span(length, "architecture name"))
    if not _NAME_CHARACTERS.issuperset(name):
        raise BadField(start, "architecture name", name, "letters, digits, '-', '_' and '.'")
    return name.decode("ascii")


def _readings(
    grammar: Grammar, cursor: Cursor, architecture: str, facts: ModelFacts, limits: Limits, failures: Failures
) -> Iterator[StateImage]:
    """Every sound image that one grammar gives."""
    recurrent_seq = (_CONTEXT_RECURRENT_SEQ_MIN, limits.n_seq)
    trial = Trial(grammar, limits, patterns(facts), failures, recurrent_seq)
    n_bytes = cursor.offset + cursor.remaining
    for sections in read_sections(trial, cursor.fork()):
        image = StateImage(Form.CONTEXT, architecture, sections, grammar.layouts, n_bytes)
        try:
            check_laws(image)
            check_facts(image, facts)
        except StateFormatError as error:
            failures.note(error, stage=1)
            continue
        yield image


def meaning(image: StateImage) -> tuple[object, ...]:
    """What an image says about its own buffer, comparable: equal for readings that differ in nothing but versions."""
    return (image.form, image.architecture, tuple(_section_meaning(section) for section in image.sections))


def _section_meaning(section: Section) -> tuple[object, ...]:
    match section:
        case AttentionSection():
            streams = tuple((i, s.offset, len(s.cells), shape_of(s)) for i, s in section.filled())
            return (section.kind, section.offset, section.ext_bytes, len(section.streams), streams)
        case RecurrentSection():
            layers = tuple(
                (layer.r.offset, None if layer.history is None else layer.history.offset, layer.s.offset)
                for layer in section.layers
            )
            return (section.kind, section.offset, len(section.cells), section.n_layer, layers)
        case OpaqueSection():
            return (section.kind, section.offset, section.name)


def _merged(one: StateImage, other: StateImage) -> StateImage:
    """One image for two equal readings."""
    layouts = one.layouts | other.layouts
    return StateImage(one.form, one.architecture, one.sections, layouts, one.n_bytes)


def _only(images: list[StateImage], failures: Failures, offset: int) -> StateImage:
    """The single image, or the error that says why there is none or more than one."""
    if len(images) == 1:
        return images[0]
    if images:
        readings = "; ".join(describe(image) for image in images)
        raise Ambiguous(offset, "memory sections", readings, "one reading; sections, has_ext, has_v or versions decide")
    if failures.best is None:  # pragma: no cover - every way to end without an image notes a failure
        raise TrailingBytes(offset, "memory sections", "no reading", "a state")
    raise failures.best


def describe(image: StateImage) -> str:
    """One line that tells readings of the same bytes apart."""
    parts = []
    for section in image.sections:
        text = section.kind.value
        if isinstance(section, AttentionSection):
            has_v = any(stream.values for _, stream in section.filled())
            text += f"(ext {section.ext_bytes}, {section.n_layers or 0} layers{'' if has_v else ', no V'})"
        elif isinstance(section, RecurrentSection):
            text += f"({section.n_layers} layers)"
        parts.append(text)
    versions = "/".join(str(version) for version in sorted(image.versions))
    return f"version {versions}: {' + '.join(parts) or 'no memory'}"
