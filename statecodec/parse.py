"""Reading: every known way to see the bytes is tried, and only one meaning may be left.

Laws:
1. A reading consumes every byte and keeps every law of `validate`, or it is none.
2. Readings that mean the same are one image with several possible versions.
3. If different meanings are left, the answer is `Ambiguous` and names the facts that would decide.
4. An old attention cache with one late cell for each sequence is a recurrent state, whose bytes are the same. A state
   without a cell is empty, though its words could also be the headers of rows that stayed on a device.
5. If none is left, the error is the failure of the attempt that understood most.
6. A file's version word never decides how it is read; a layout that does not go with the word is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from statecodec.cursor import Cursor, view
from statecodec.envelope import Envelope, envelopes, read_outputs
from statecodec.errors import Ambiguous, StateFormatError, Truncated, UnknownVersion, raises_bare
from statecodec.facts import NO_FACTS, ModelFacts
from statecodec.image import AttentionSection, Content, OpaqueSection, RecurrentSection, Section, StateImage
from statecodec.layouts import LAYOUTS, Form, Grammar, Layout, grammars, patterns
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.sections import Attempt, Failures, read_sections
from statecodec.validate import check_facts, check_laws, check_name

if TYPE_CHECKING:
    # collections.abc.Buffer exists from Python 3.12 on; the type checker knows it under this name everywhere.
    from typing_extensions import Buffer

Meaning = tuple[object, ...]


@raises_bare
def parse(buffer: Buffer, *, facts: ModelFacts | None = None, limits: Limits = DEFAULT_LIMITS) -> StateImage:
    """Read a state: a context blob, a sequence blob, a session file or a sequence file.

    Args:
        buffer: the bytes; anything C-contiguous with the buffer protocol. Nothing is copied from tensors. No bytes at
            all are a state where `facts` say that the model keeps no memory.
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
    if known.versions is not None and not any(layout.session_version in known.versions for layout in LAYOUTS):
        words = ", ".join(sorted({str(layout.session_version) for layout in LAYOUTS}))
        raise UnknownVersion(0, "session version in the facts", sorted(known.versions), words)
    data = view(buffer)
    if not data and known.sections == ():
        # What a session of a model without a memory keeps of it.
        return StateImage(Form.CONTEXT, (), frozenset(LAYOUTS), 0)
    failures = Failures()
    images: dict[Meaning, StateImage] = {}
    for envelope in envelopes(Cursor(data), limits, failures):
        if _is_of_another_model(envelope, known, failures):
            continue
        own = tuple(layout for layout in LAYOUTS if has_word(layout, envelope))
        found = _images(envelope, own, known, limits, failures)
        if not found and len(own) < len(LAYOUTS):
            others = _images(envelope, tuple(other for other in LAYOUTS if other not in own), known, limits, Failures())
            _refuse_other_layout(envelope, own, others)
        images.update(found)
    return _only(list(images.values()), failures)


def _is_of_another_model(envelope: Envelope, facts: ModelFacts, failures: Failures) -> bool:
    """Whether the name says so: a better answer than where another model's memory stops making sense."""
    name = envelope.architecture
    if name is None:
        return False
    try:
        check_name(name, envelope.cursor.offset - len(name), facts)
    except StateFormatError as error:
        failures.note(error, stage=1, progress=0, family=envelope.family, depth=error.offset)
        return True
    return False


def has_word(layout: Layout, envelope: Envelope) -> bool:
    """Whether a layout goes with the version word; without a word, every one does."""
    word = layout.sequence_version if envelope.form is Form.SEQUENCE_FILE else layout.session_version
    return envelope.version_word in {None, word}


def _refuse_other_layout(envelope: Envelope, own: tuple[Layout, ...], others: dict[Meaning, StateImage]) -> None:
    """A sound payload of another layout than the version word says: a fork's file, or a patched one.

    Raises:
        UnknownVersion: there is such a payload.
    """
    names = sorted({layout.name for image in others.values() for layout in image.layouts})
    if names:
        found = f"{envelope.version_word} before a payload of layout {' or '.join(names)} (a fork's file?)"
        raise UnknownVersion(4, "version word", found, " or ".join(layout.name for layout in own))


def _images(
    envelope: Envelope, layouts: tuple[Layout, ...], facts: ModelFacts, limits: Limits, failures: Failures
) -> dict[Meaning, StateImage]:
    """The distinct meanings that some layouts give."""
    images: dict[Meaning, StateImage] = {}
    ways = grammars(layouts, facts, envelope.form, prefixed=envelope.source_seq_id is not None)
    for grammar, members in ways.items():
        for image in _readings(grammar, members, envelope, facts, limits, failures):
            keep(images, image)
    return images


def _readings(
    grammar: Grammar,
    layouts: frozenset[Layout],
    envelope: Envelope,
    facts: ModelFacts,
    limits: Limits,
    failures: Failures,
) -> Iterator[StateImage]:
    """Every sound image that one grammar gives."""
    accepted = patterns(facts, envelope.form)
    # Layouts of 2025 are rare today, and their loose beginnings let other bytes pass for a while.
    is_old = grammar.has_outputs or not grammar.has_streams
    family = envelope.family + 4 * is_old + (grammar.ext_bytes > 0)
    # In sequence forms the first section may be the second one of the model, if the state is partial.
    has_v = () if envelope.form.is_sequence else facts.has_v
    attempt = Attempt(grammar, limits, accepted, failures, family, has_v)
    cursor = envelope.cursor.fork()
    try:
        outputs = read_outputs(cursor, limits) if grammar.has_outputs else None
    except StateFormatError as error:
        attempt.note(error, cursor)
        return
    for sections in read_sections(attempt, cursor):
        image = envelope.around(sections, layouts, outputs, content=_content(grammar, sections, facts))
        try:
            _refuse_tokens_alone(image, facts)
            check_laws(image)
            check_facts(image, facts)
        except StateFormatError as error:
            failures.note(error, stage=1, progress=0, family=attempt.family, depth=error.offset)
            continue
        yield image


def _refuse_tokens_alone(image: StateImage, facts: ModelFacts) -> None:
    """A file that ends behind its tokens was cut there, unless the model is known to keep no memory.

    Raises:
        Truncated: it ends there.
    """
    if image.tokens is not None and image.tokens.words.size and not image.sections and facts.sections is None:
        raise Truncated(image.n_bytes, "section 0", "the end of the bytes", "the memory of the tokens before it")


def _content(grammar: Grammar, sections: tuple[Section, ...], facts: ModelFacts) -> Content:
    """How much of the memory the sections are."""
    # Without a single row there is nothing that could have stayed on the device.
    if not grammar.has_tensors and any(_has_rows(section) for section in sections):
        return Content.ON_DEVICE
    kinds = tuple(section.kind.value for section in sections)
    return Content.FULL if facts.sections in {None, kinds} else Content.PARTIAL


def _has_rows(section: Section) -> bool:
    return not isinstance(section, OpaqueSection) and bool(section.n_cells) and bool(section.n_layers)


def keep(images: dict[Meaning, StateImage], image: StateImage) -> None:
    """Keep an image by its meaning; one that is there already gets the layouts of both."""
    key = _meaning(image)
    same = images.get(key)
    images[key] = image if same is None else replace(same, layouts=same.layouts | image.layouts)


def _meaning(image: StateImage) -> Meaning:
    """What an image says about its own buffer, comparable: equal for readings that differ in nothing but versions."""
    sections = tuple(_section_meaning(section) for section in image.sections)
    return (image.form, image.architecture, image.outputs is None, image.content, sections)


def _section_meaning(section: Section) -> Meaning:
    match section:
        case AttentionSection():
            streams = tuple((i, s.offset, len(s.cells), s.shape) for i, s in section.filled())
            return (section.kind, section.offset, section.ext_bytes, len(section.streams), streams)
        case RecurrentSection():
            layers = tuple(
                (layer.r.offset, None if layer.history is None else layer.history.offset, layer.s.offset)
                for layer in section.layers
            )
            return (section.kind, section.offset, len(section.cells), section.n_layer, layers)
        case _:
            return (section.kind, section.offset, section.name)


def _only(images: list[StateImage], failures: Failures) -> StateImage:
    """The single image, or the error that says why there is none or more than one."""
    likely = [image for image in images if not _is_late_cell(image)] or images
    if any(image.content is Content.FULL and image.is_empty for image in likely):
        likely = [image for image in likely if image.content is not Content.ON_DEVICE]
    if len(likely) == 1:
        return likely[0]
    if likely:
        readings = "; ".join(describe(image) for image in likely)
        raise Ambiguous(0, "the state", readings, "one reading; the facts sections, has_ext, has_v or versions decide")
    raise failures.worst()


def _is_late_cell(image: StateImage) -> bool:
    """Whether an attention cache without streams holds nothing but one late position of each sequence.

    A recurrent state has the very same bytes, so where both readings are left it is the recurrent one.
    """
    unstreamed = [s for s in image.sections if isinstance(s, AttentionSection) and not s.is_streamed]
    return any(
        section.n_cells > 0
        and int(section.positions().min()) > 0
        and all(len(stream.cells) == max(1, len(stream.cells.sequences())) for _, stream in section.filled())
        for section in unstreamed
    )


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
    names = "/".join(sorted(layout.name for layout in image.layouts))
    extra = "" if image.content is Content.FULL else f", {image.content.value}"
    return f"{image.form.value} {names}{extra}: {' + '.join(parts) or 'no memory'}"
