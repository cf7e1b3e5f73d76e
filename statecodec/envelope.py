"""What stands before the memory: magics, version words, token arrays, the architecture's name, outputs of 2025."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from statecodec.cursor import Cursor
from statecodec.errors import (
    BadField,
    ForeignFile,
    Inconsistent,
    LimitExceeded,
    StateFormatError,
    Truncated,
    UnknownVersion,
)
from statecodec.image import Content, Media, Outputs, Section, StateImage, Tokens
from statecodec.layouts import LAYOUTS, Form, Layout
from statecodec.limits import Limits
from statecodec.sections import Failures
from statecodec.views import distinct

SESSION_FILE_MAGIC = 0x6767736E
SEQUENCE_FILE_MAGIC = 0x67677371
SEQUENCE_MAGIC = 0xAF143CD8
"""Source: llama.h (LLAMA_FILE_MAGIC_GGSN, LLAMA_FILE_MAGIC_GGSQ) and llama-context.cpp (io_magic)."""

LIST_OFFSET = 12
"""Where the token list of a file starts, in bytes: behind magic, version word and count."""

FOREIGN_MAGICS: dict[bytes, str] = {
    b"ggsn": "a session file in the other byte order",
    b"ggsq": "a sequence file in the other byte order",
    b"GGUF": "a model file",
    b"lmgg": "a model file of an old format",
    b"tjgg": "a model file of an old format",
    b"algg": "an adapter file of an old format",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b\x08\0": "a gzip archive",
    b"\x1f\x8b\x08\x08": "a gzip archive",
    b"\xfd7zX": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x89PNG": "a picture",
    b"\x7fELF": "a program or library",
}
"""First bytes of what is given by mistake; no state begins with them."""

_WANTED = "a state; files begin with the bytes 'nsgg' or 'qsgg'"
_SHOWN_BYTES, _CHARACTER_BYTES = 256, 4

_NAME_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_PACKED_VERSION = 1
_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Envelope:
    """One way to see the start of the bytes.

    Args:
        form: the outermost shape.
        cursor: behind what was read here.
        architecture: the name, in forms that have one.
        version_word: the version word, in files.
        tokens: the token array, in files.
        source_seq_id: the source's id, in prefixed sequence blobs.
        family: how likely this is from the outset; see `Failures.note`.
    """

    form: Form
    cursor: Cursor
    architecture: str | None = None
    version_word: int | None = None
    tokens: Tokens | None = None
    source_seq_id: int | None = None
    family: int = 0

    def around(
        self,
        sections: tuple[Section, ...],
        layouts: frozenset[Layout],
        outputs: Outputs | None,
        *,
        content: Content = Content.FULL,
    ) -> StateImage:
        """The state that begins so, with what was read behind it."""
        return StateImage(
            form=self.form,
            sections=sections,
            layouts=layouts,
            n_bytes=self.cursor.offset + self.cursor.remaining,
            architecture=self.architecture,
            version_word=self.version_word,
            tokens=self.tokens,
            outputs=outputs,
            source_seq_id=self.source_seq_id,
            content=content,
        )


def envelopes(cursor: Cursor, limits: Limits, failures: Failures) -> Iterator[Envelope]:
    """Every way to see the start of the bytes.

    Raises:
        StateFormatError: a magic is there and what follows it is unsound, or a magic is of something else.
    """
    if not cursor.remaining:
        raise Truncated(cursor.offset, "the state", "no bytes at all", _WANTED)
    head = cursor.fork()
    head.require(4, "magic or name length")
    start = bytes(head.fork().span(4, "magic"))
    if start in FOREIGN_MAGICS:
        raise ForeignFile(head.offset, "magic", f"{start!r}, {FOREIGN_MAGICS[start]}", _WANTED)
    magic = head.u32("magic")
    if magic == SESSION_FILE_MAGIC:
        words = {layout.session_version for layout in LAYOUTS}
        version, tokens = _file_header(head, words, limits)
        name = _architecture(head, limits)
        yield Envelope(Form.SESSION_FILE, head, architecture=name, version_word=version, tokens=tokens)
    elif magic == SEQUENCE_FILE_MAGIC:
        words = {layout.sequence_version for layout in LAYOUTS}
        version, tokens = _file_header(head, words, limits)
        yield Envelope(Form.SEQUENCE_FILE, head, version_word=version, tokens=tokens)
    elif magic == SEQUENCE_MAGIC:
        at = head.offset
        seq_id = head.i32("source sequence id")
        if not 0 <= seq_id < limits.n_seq:
            raise BadField(at, "source sequence id", seq_id, f"0 to {limits.n_seq - 1}")
        yield Envelope(Form.SEQUENCE, head, source_seq_id=seq_id)
    else:
        _refuse_text(cursor)
        yield from _bare(cursor, limits, failures)


def _refuse_text(cursor: Cursor) -> None:
    """Tell a text by its first bytes; a bare state begins with a small number, so with zeros among the first four.

    Raises:
        UnknownVersion: it is one.
    """
    head = cursor.fork()
    start = bytes(head.span(min(head.remaining, _SHOWN_BYTES), "start"))
    # A character may be cut where the look ends.
    text = start.decode("utf-8", "ignore")
    if len(start) - len(text.encode()) < _CHARACTER_BYTES and all(one.isprintable() or one.isspace() for one in text):
        raise ForeignFile(cursor.offset, "magic", "a text file", _WANTED)


def _bare(cursor: Cursor, limits: Limits, failures: Failures) -> Iterator[Envelope]:
    """A context blob, or a sequence blob of an older build: neither has a magic."""
    head = cursor.fork()
    try:
        name = _architecture(head, limits)
    except StateFormatError as error:
        failures.note(error, stage=0, progress=0, family=0, depth=error.offset)
    else:
        yield Envelope(Form.CONTEXT, head, architecture=name)
    yield Envelope(Form.SEQUENCE, cursor.fork(), family=8)


def _file_header(cursor: Cursor, words: set[int], limits: Limits) -> tuple[int, Tokens]:
    at = cursor.offset
    version = cursor.u32("version word")
    if version not in words:
        raise UnknownVersion(at, "version word", version, ", ".join(map(str, sorted(words))))
    count = cursor.count("token count", limits.n_tokens, item_bytes=4)
    start = cursor.fork()
    array = cursor.records(_I32, count, "tokens")
    if count and array[0] == -1:
        return version, _packed(start, cursor.offset, limits)
    return version, Tokens(array, array, (), None)


def listed_tokens(cursor: Cursor, limits: Limits) -> Tokens | None:
    """The token list that a file begins with, as far as it is there, whatever follows it.

    Args:
        cursor: at the start of the bytes; not moved.
        limits: upper bounds.

    Returns:
        The list, or the first tokens of a plain one that is cut; None where no token can be told.
    """
    head = cursor.fork()
    words = {
        SESSION_FILE_MAGIC: {layout.session_version for layout in LAYOUTS},
        SEQUENCE_FILE_MAGIC: {layout.sequence_version for layout in LAYOUTS},
    }
    try:
        known = words.get(head.u32("magic"), set())
        if head.u32("version word") not in known:
            return None
        count = head.count("token count", limits.n_tokens)
        array = head.peek_records(_I32, count)
        if len(array) and array[0] == -1:
            return _packed(head, head.offset + count * _I32.itemsize, limits)
    except StateFormatError:
        return None
    return Tokens(array, array, (), None) if len(array) else None


def _packed(cursor: Cursor, end: int, limits: Limits) -> Tokens:
    """The server's packed record: null token, version, tokens, media places, media records, zeros up to a whole word.

    Source: llama.cpp tools/server/server-common.cpp, server_tokens::serialize.
    """
    record = cursor.until(end)
    words = record.fork().records(_I32, (end - record.offset) // 4, "packed tokens")
    record.i32("packed tokens marker")
    at = record.offset
    version = record.u32("packed tokens version")
    if version != _PACKED_VERSION:
        raise UnknownVersion(at, "packed tokens version", version, _PACKED_VERSION)
    text = record.records(_I32, record.count("packed token count", limits.n_tokens, item_bytes=4), "packed token text")
    at = record.offset
    n_media = record.count("packed media count", limits.n_media, item_bytes=4)
    places = record.records(_I32, n_media, "packed media places").tolist()
    if any(later <= earlier for earlier, later in zip([-1, *places], places, strict=False)) or (
        places and places[-1] >= len(text)
    ):
        raise Inconsistent(at, "packed media places", places[:8], f"ascending indices below {len(text)}")
    media = []
    for place in places:
        n_bytes = record.count("packed media size", limits.row_bytes, item_bytes=1)
        media.append(Media(place, record.span(n_bytes, "packed media")))
    padding = bytes(record.span(record.remaining, "packed padding"))
    if len(padding) >= _I32.itemsize or any(padding):
        raise Inconsistent(end - len(padding), "packed padding", f"{len(padding)} bytes", "at most 3 bytes, all zero")
    return Tokens(words, text, tuple(media), version)


def _architecture(cursor: Cursor, limits: Limits) -> str:
    """The name that a context blob begins with."""
    start = cursor.offset
    length = cursor.u32("architecture name length")
    if length > limits.name_bytes:
        raise LimitExceeded(start, "architecture name length", length, f"at most {limits.name_bytes}")
    if not length:
        raise BadField(start, "architecture name length", length, "1 or more")
    start = cursor.offset
    # A cut inside the name is a cut; what is there of it must still be a name.
    name = bytes(cursor.span(min(length, cursor.remaining), "architecture name"))
    if not _NAME_CHARACTERS.issuperset(name):
        raise BadField(start, "architecture name", name, "letters, digits, '-', '_' and '.'")
    if len(name) < length:
        raise Truncated(start, "architecture name", f"{len(name)} bytes", f"{length} bytes")
    return name.decode("ascii")


def read_outputs(cursor: Cursor, limits: Limits) -> Outputs:
    """What contexts of 2025 wrote before the memory; moves behind it.

    Raises:
        StateFormatError: counts that contradict each other, or the bytes end.
    """
    start = cursor.offset
    n_outputs = cursor.count("output count", limits.n_outputs, item_bytes=4)
    at = cursor.offset
    ids = cursor.records(_I32, n_outputs, "output ids")
    if n_outputs and (int(ids.min()) < 0 or len(distinct(ids)) != n_outputs):
        raise BadField(at, "output ids", ids[:8].tolist(), "distinct places in the batch, from 0 on")
    at = cursor.offset
    logits = _floats(cursor, "logits")
    if len(logits) % n_outputs if n_outputs else len(logits):
        raise Inconsistent(at, "logits", f"{len(logits)} values", f"as many for each of {n_outputs} outputs")
    embeddings = _floats(cursor, "embeddings")
    return Outputs(start, ids, logits.reshape(n_outputs if len(logits) else 0, -1 if len(logits) else 0), embeddings)


def _floats(cursor: Cursor, what: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    count = cursor.u64(f"{what} count")
    cursor.require(count * _F32.itemsize, what)
    return cursor.records(_F32, count, what)
