"""The law of the codec over hostile bytes, and inputs that may break it: damaged real states and made ones.

Law: bytes are an error of the one kind, or an image whose bytes they are; in little time and memory, whatever they say.
"""

from __future__ import annotations

import os
import re
import resource
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

from hypothesis import strategies as st

from statecodec import StateFormatError, emit, parse, validate
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden

CORPUS = Path(__file__).parent / "corpus"

#: Address space that one case may add, beside what numpy keeps for itself [bytes].
MEMORY_BYTES = 64 << 20
#: Processor time of one case [s]; held in ci/fuzz only.
TIME_S = 0.05

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_SEED_BYTES = 7000
_HEAD_BYTES = 2
_EDIT_BYTES = 8
#: Counts, ids and sizes at the edges of their ranges.
_WORDS = (
    *(0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 20, 30, 31, 32, 34, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513),
    *(1 << 16, (1 << 26) - 1, 1 << 26, (1 << 26) + 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1),
    *(0x6767736E, 0x67677371, 0xAF143CD8, 0x34565344, 0x46554747),
)


class Finding(AssertionError):
    """The law is broken."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Args:
        name: the error and its field without numbers, or the layouts and sections that were read.
        seconds: processor time.
    """

    name: str
    seconds: float


def check(data: bytes) -> Outcome:
    """Hold the law over one case.

    Returns:
        What became of it.

    Raises:
        Finding: another error came out, or other bytes.
    """
    started = thread_time()
    try:
        image = parse(data)
    except StateFormatError as error:
        took = thread_time() - started
        str(error)
        if not 0 <= error.offset <= len(data):
            raise Finding(f"an error at byte {error.offset} of {len(data)}") from error
        field = re.sub(r"\d+", "N", error.field)
        return Outcome(f"{type(error).__name__} {field}", took)
    written = b"".join(emit(image))
    took = thread_time() - started
    if written != data:
        raise Finding(f"{len(data)} bytes were read, {len(written)} others written")
    validate(image)
    image.sequences()
    layouts = " ".join(sorted(layout.name for layout in image.layouts))
    kinds = " ".join(section.kind.value for section in image.sections)
    return Outcome(f"{image.form.value} {layouts} {image.content.value} {kinds or 'nothing'}", took)


def checked_in_bounds(data: bytes) -> Outcome:
    """Hold the law over one case in bounded memory and time.

    A case that seems slow is timed again, so that what else the machine does is no finding.

    Raises:
        Finding: the law is broken, or it took too much.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    try:
        outcome = check(data)
        for _ in range(3):
            if outcome.seconds <= TIME_S / 5:
                break
            outcome = min(outcome, check(data), key=lambda one: one.seconds)
    except MemoryError as error:
        raise Finding(f"a case of {len(data)} bytes wanted more than {MEMORY_BYTES} bytes") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    if outcome.seconds > TIME_S:
        raise Finding(f"a case of {len(data)} bytes took {outcome.seconds * 1e3:.0f} ms ({outcome.name})")
    return outcome


def seeds() -> list[bytes]:
    """Sound states to start from, and what the corpus keeps; the small ones, of every kind and build."""
    goldens = [golden(name) for name, about in MANIFEST.items() if about["n_bytes"] <= _MAX_SEED_BYTES]
    kept = [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]
    return [*(case.data for case in CASES.values()), *goldens, *kept]


def damaged(sound: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Sound states with a few edits: words at the edges, flipped bits, pieces cut, repeated and taken from others.

    A draw is one short program of bytes, two for the state and eight for each edit: cheap, and it shrinks.
    """
    return st.binary(min_size=_HEAD_BYTES, max_size=_HEAD_BYTES + 4 * _EDIT_BYTES).map(lambda p: played(p, sound))


def played(program: bytes, sound: Sequence[bytes]) -> bytes:
    """The case that a program of bytes makes of the sound states."""
    data = bytearray(sound[int.from_bytes(program[:_HEAD_BYTES], "little") % len(sound)])
    for start in range(_HEAD_BYTES, len(program), _EDIT_BYTES):
        _edit(data, program[start : start + _EDIT_BYTES].ljust(_EDIT_BYTES, b"\0"), sound)
    return bytes(data)


def _edit(data: bytearray, step: bytes, sound: Sequence[bytes]) -> None:
    kind, place, count, times = step[0] % 7, int.from_bytes(step[2:5], "little"), step[5], step[6]
    # Most of what decides stands near the start; the whole of a state is tried as well.
    at = place % 120 if step[1] % 2 else place
    start = at % (len(data) + 1)
    if kind == 0 and len(data) >= 4:
        struct.pack_into("<I", data, at % (len(data) - 3), _WORDS[count % len(_WORDS)])
    elif kind == 1 and data:
        data[at % len(data)] ^= count or 1
    elif kind == 2:
        del data[start : start + count % 65]
    elif kind == 3:
        data[start:start] = data[start : start + count % 65] * (times % 40)
    elif kind == 4:
        piece = sound[(count | times << 8) % len(sound)]
        first = (place >> 8) % (len(piece) + 1)
        data[start:start] = piece[first : first + 2 * step[7]]
    elif kind == 5 and len(data) >= 4:
        # A word one more or one less than it was.
        where = at % (len(data) - 3)
        (word,) = struct.unpack_from("<I", data, where)
        struct.pack_into("<I", data, where, (word + (1, -1, 4, -4)[count % 4]) & 0xFFFFFFFF)
    elif kind == 6:
        del data[start:]


def slug(name: str) -> str:
    """An outcome as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
