from __future__ import annotations

import hashlib

import pytest

from statecodec import AttentionSection, Content, Form, ModelFacts, StateFormatError, emit, parse
from tests.codec.goldens import FOLDER, MANIFEST, golden, image_of

_NAMES = pytest.mark.parametrize("name", MANIFEST)
_LAYOUT = {
    "x010": "v9-outputs-2025-03",
    "x0120": "v9-outputs-2025-06",
    "x020": "v9-outputs",
    "x0214": "v9",
    "x8929": "v9",
    "x10566": "v9",
    "l0336": "v10",
    "x11549": "v11",
}
_FORMS = {
    "context": Form.CONTEXT,
    "sequence": Form.SEQUENCE,
    "session_file": Form.SESSION_FILE,
    "sequence_file": Form.SEQUENCE_FILE,
}
_SECTIONS = {
    "dense": "attention",
    "smollm2": "attention",
    "mrope": "attention",
    "mla": "attention",
    "window": "attention attention",
    "mla-indexer": "attention attention",
    "three-sections": "attention attention attention",
    "recurrent": "recurrent",
    "hybrid": "attention recurrent",
    "hybrid-window": "attention attention recurrent",
    "history": "attention recurrent attention",
    "encoder": "",
}


def sections_of(name: str) -> str:
    """The sections that a golden's name promises."""
    rest = name.split("-", 1)[1]
    if name.endswith("partial"):
        return "attention"
    if rest.startswith("hybrid") and name.split("-", maxsplit=1)[0] in {"x0214", "x8929", "x10566"}:
        rest = "hybrid-window"
    while rest not in _SECTIONS:
        rest = rest.rsplit("-", 1)[0]
    return _SECTIONS[rest]


def test_the_manifest_names_every_file() -> None:
    """Nothing is kept that the manifest does not explain, and nothing is missing."""
    assert {path.stem for path in FOLDER.glob("*.xz")} == set(MANIFEST)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.xz")) < 1_500_000


@_NAMES
def test_a_golden_is_the_one_that_was_kept(name: str) -> None:
    """Length and hash are those of the manifest."""
    data = golden(name)
    assert len(data) == MANIFEST[name]["n_bytes"]
    assert hashlib.sha256(data).hexdigest() == MANIFEST[name]["sha256"]


@_NAMES
def test_a_real_state_is_read_and_written_back(name: str) -> None:
    """Form, layout and sections are those of the build; the bytes come back."""
    data, told = golden(name), MANIFEST[name]
    image = image_of(name)
    assert image.form is _FORMS[told["form"]]
    assert _LAYOUT[name.split("-", maxsplit=1)[0]] in {layout.name for layout in image.layouts}
    assert " ".join(section.kind.value for section in image.sections) == sections_of(name)
    assert b"".join(emit(image)) == data


@_NAMES
def test_a_real_state_holds_what_was_decoded(name: str) -> None:
    """Each sequence has the positions that the build was given."""
    told = MANIFEST[name]
    image = image_of(name)
    if not image.sections:
        return
    spans = image.sequences()
    if image.form.is_sequence:
        assert list(spans) in ([told["seq_id"]], [0])
        assert [span.pos_max for span in spans.values()] == [told["n_tokens"][told["seq_id"]] - 1]
    else:
        assert {seq: span.pos_max for seq, span in spans.items()} == {
            seq: count - 1 for seq, count in enumerate(told["n_tokens"])
        }
    assert image.content is (Content.ON_DEVICE if told["flags"] == 2 else Content.FULL)


@_NAMES
def test_a_real_state_of_a_file_has_its_tokens_and_word(name: str) -> None:
    """Files carry the tokens that were decoded and their epoch's version word."""
    told = MANIFEST[name]
    image = image_of(name)
    if not told["form"].endswith("file"):
        assert image.tokens is None
        return
    assert image.tokens is not None
    assert len(image.tokens.text) == told["n_tokens"][0]
    words = image.sequence_versions if image.form is Form.SEQUENCE_FILE else image.versions
    assert words == {image.version_word}


@_NAMES
def test_the_outputs_of_2025_are_those_of_the_last_decode(name: str) -> None:
    """One output with logits for the whole vocabulary, in builds that wrote them."""
    image = image_of(name)
    if image.outputs is None:
        return
    assert image.outputs.logits.shape == (1, 128)
    assert abs(float(image.outputs.logits.max())) < 1e3


@_NAMES
def test_a_partial_state_is_recognised_by_its_model(name: str) -> None:
    """Flag 1 leaves the base of a window cache out; facts tell."""
    told = MANIFEST[name]
    if told["flags"] != 1:
        return
    image = parse(golden(name), facts=ModelFacts(sections=("attention", "attention")))
    assert image.content is Content.PARTIAL


def test_quantized_caches_of_the_newest_layout_say_how_they_are_rotated() -> None:
    """Blocks of 64 for the quantized side, 0 for the plain one."""
    told = {}
    for name in ("x11549-dense", "x11549-dense-q8", "x11549-dense-q8-f16", "x11549-smollm2-q8"):
        section = image_of(name).sections[0]
        assert isinstance(section, AttentionSection)
        told[name] = next(section.filled())[1].rotation
    assert told == {
        "x11549-dense": (0, 0),
        "x11549-dense-q8": (64, 64),
        "x11549-dense-q8-f16": (64, 0),
        "x11549-smollm2-q8": (64, 64),
    }


@_NAMES
def test_a_cut_or_damaged_real_state_is_refused_or_kept(name: str) -> None:
    """Cuts and flipped bytes give an error, or an image whose bytes are the very ones that were read."""
    data = golden(name)
    whole = memoryview(data)
    for end in [*range(0, 60, 5), *range(60, len(data), max(1, len(data) // 11))]:
        check(whole[:end])
    check(data + b"\0")
    # Every 8th byte in one way here; all goldens together flip each of the first 80 bytes in each way.
    number = list(MANIFEST).index(name)
    for at in range(number % 8, min(len(data), 80), 8):
        check(flipped(data, at, (0x01, 0x80, 0xFF)[number // 8 % 3]))


@pytest.mark.deep
@_NAMES
def test_every_cut_and_every_header_byte_of_a_real_state(name: str) -> None:
    """The same at every length (sampled above 64 KiB) and for every byte before the first rows."""
    data = golden(name)
    whole = memoryview(data)
    for end in range(0, len(data), 1 + len(data) // 65536 * 50):
        check(whole[:end])
    for at in range(min(len(data), 200)):
        for flip in (0x01, 0x02, 0x80, 0xFF):
            check(flipped(data, at, flip))


def flipped(data: bytes, at: int, flip: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]


def check(data: bytes | memoryview) -> None:
    try:
        image = parse(data)
    except StateFormatError:
        return
    assert b"".join(emit(image)) == data
