"""The carry: sealed, verified, written, read back; every way to be wrong is CarryDamaged and nothing else."""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from splitctl.carry import file as carries
from splitctl.carry.file import Carry, SealedCarry
from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import SequenceCarry, no_logits, no_tokens
from splitctl.carry.tensorfile import view_of, write_tensors
from splitctl.carry.text import from_texts, to_texts
from splitctl.errors import CarryDamaged, CarryMismatch, CarryNotWritten
from splitctl.placement import Placement, SplitMode

N_VOCAB = 11
HEX = "0123456789abcdef" * 2


def a_sequence(seq_id: int = 0, n_tokens: int = 5, n_rows: int = 1, **changes: Any) -> SequenceCarry:
    rng = np.random.default_rng(seq_id)
    sequence = SequenceCarry(
        seq_id=seq_id,
        tokens=rng.integers(0, N_VOCAB, n_tokens, np.int32),
        n_past=n_tokens,
        logits=rng.normal(size=(n_rows, N_VOCAB)).astype(np.float32),
        output_ids=np.arange(n_rows, dtype=np.int32),
        sampler=SamplerSpec(temp=0.7, seed=42, stop=("\n\nUser:", "ende\u0301")),
        accepted=rng.integers(0, N_VOCAB, 3, np.int32),
        n_draws=3,
        encoder_tokens=no_tokens(),
    )
    return replace(sequence, **changes)


IDENTITY = Identity(
    header_xxh3_128=HEX,
    header_bytes=4096,
    file_bytes=1 << 33,
    architecture="llama",
    n_vocab=N_VOCAB,
    rope=(("freq_base", "100000.0"), ("freq_scale", "1.0")),
    adapters=((HEX, 0.5),),
)
REPRESENTATION = Representation(
    build="b1", type_k="f16", type_v="f16", v_trans=False, n_stream=1, n_seq_max=4, state_version=10
)
FINGERPRINT = Fingerprint(IDENTITY, REPRESENTATION)


def a_carry(*sequences: SequenceCarry, state: bytes | memoryview = bytes(range(256)) * 5, **changes: Any) -> Carry:
    made = Carry(
        state=memoryview(state),
        sequences=sequences or (a_sequence(0), a_sequence(2, n_tokens=7, n_rows=2)),
        adapters=(Adapter(Path("/models/lora.gguf"), HEX, 0.5),),
        placement=Placement(mode=SplitMode.LAYER, devices=("CPU", "CPU"), tensor_split=(3, 1), n_ctx=512),
        fingerprint=FINGERPRINT,
    )
    return replace(made, **changes)


def assert_same(left: Carry, right: Carry) -> None:
    """Everything is equal, arrays bit by bit, with their types and shapes."""
    assert bytes(left.state) == bytes(right.state)
    assert (left.adapters, left.placement, left.fingerprint) == (right.adapters, right.placement, right.fingerprint)
    assert len(left.sequences) == len(right.sequences)
    for one, other in zip(left.sequences, right.sequences, strict=True):
        assert (one.seq_id, one.n_past, one.n_draws, one.sampler) == (
            other.seq_id,
            other.n_past,
            other.n_draws,
            other.sampler,
        )
        for row in ("tokens", "logits", "output_ids", "accepted", "encoder_tokens"):
            mine, theirs = getattr(one, row), getattr(other, row)
            assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A carry of two sequences comes back equal to the bit, with the same checksums, and the file is private."""
    sealed = carries.seal(a_carry())
    path = tmp_path / "one.carry"
    carries.write(path, sealed)
    back = carries.read(path)
    assert_same(back.carry, sealed.carry)
    assert back.checksums == sealed.checksums
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["one.carry"]
    assert back.carry.state.readonly


def test_equal_carries_give_equal_files(tmp_path: Path) -> None:
    """Write, read, write: the same bytes behind the same header, whose keys alone may come in another order."""
    one, two = tmp_path / "one", tmp_path / "two"
    carries.write(one, carries.seal(a_carry()))
    carries.write(two, carries.read(one))
    (size, header, data), (other_size, other_header, other_data) = in_parts(one), in_parts(two)
    assert (size, data) == (other_size, other_data)
    assert json.loads(header) == json.loads(other_header)


def in_parts(path: Path) -> tuple[bytes, bytes, bytes]:
    whole = path.read_bytes()
    data_at = 8 + int.from_bytes(whole[:8], "little")
    return whole[:8], whole[8:data_at], whole[data_at:]


def test_a_carry_of_nothing_travels_too(tmp_path: Path) -> None:
    """No state (a model without a memory), no sequence, no adapter."""
    empty = a_carry(
        state=b"",
        sequences=(),
        adapters=(),
        fingerprint=replace(FINGERPRINT, identity=replace(IDENTITY, adapters=(), rope=())),
    )
    bare = replace(
        empty, sequences=(a_sequence(tokens=no_tokens(), n_past=0, logits=no_logits(), output_ids=no_tokens()),)
    )
    for at, made in enumerate((empty, bare)):
        path = tmp_path / str(at)
        carries.write(path, carries.seal(made))
        assert_same(carries.read(path).carry, made)


@given(
    state=st.binary(max_size=300),
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans(), st.integers(0, 5)), max_size=4),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    stop=st.lists(st.text(min_size=1), max_size=3),
    temp=st.floats(-10, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sound_carry_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    state: bytes,
    shapes: list[tuple[int, int, bool, int]],
    scale: float,
    stop: list[str],
    temp: float,
    seed: int,
) -> None:
    """Sizes of zero, surrogates in stop texts, any float: what can be sealed comes back equal."""
    sampler = SamplerSpec(temp=temp, seed=seed, stop=tuple(stop))
    sequences = tuple(
        a_sequence(
            seq_id,
            n_tokens,
            n_rows,
            n_past=n_tokens - (1 if behind and n_tokens else 0),
            sampler=sampler,
            encoder_tokens=np.arange(n_encoder, dtype=np.int32),
        )
        for seq_id, (n_tokens, n_rows, behind, n_encoder) in enumerate(shapes)
    )
    made = a_carry(
        state=state,
        sequences=sequences,
        adapters=(Adapter(Path("/x/\udce9.gguf"), HEX, scale),),
        fingerprint=replace(FINGERPRINT, identity=replace(IDENTITY, adapters=((HEX, scale),))),
    )
    path = tmp_path_factory.mktemp("carry") / "c"
    carries.write(path, carries.seal(made))
    assert_same(carries.read(path).carry, made)


def test_other_tools_can_open_the_file(tmp_path: Path) -> None:
    """The safetensors library itself reads every tensor and the metadata, aligned, and agrees on the bytes."""
    sealed = carries.seal(a_carry())
    path = tmp_path / "one.carry"
    carries.write(path, sealed)
    tensors = safetensors.numpy.load_file(path)
    assert tensors["state"].tobytes() == bytes(sealed.carry.state)
    for one in sealed.carry.sequences:
        for row in ("tokens", "logits", "output_ids", "accepted", "encoder_tokens"):
            array = tensors[f"seq.{one.seq_id}.{row}"]
            assert array.dtype == getattr(one, row).dtype
            np.testing.assert_array_equal(array, getattr(one, row))
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "splitctl-carry"
    assert json.loads(metadata["identity"])["architecture"] == "llama"
    assert json.loads(metadata["checksums"])["state"] == xxhash.xxh3_128_hexdigest(sealed.carry.state)


def test_a_file_of_another_layout_is_read(tmp_path: Path) -> None:
    """Tensors and keys in another order, and more white space, as other writers make them: the same carry."""
    sealed = carries.seal(a_carry())
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    carries.write(ours, sealed)
    _, header, data = in_parts(ours)
    document = json.loads(header)
    metadata, laid, at = document.pop("__metadata__"), {}, 0
    pieces = []
    for name, about in sorted(document.items(), key=lambda one: one[0][::-1]):
        begin, end = about["data_offsets"]
        pieces.append(data[begin:end])
        laid[name] = {**about, "data_offsets": [at, at := at + end - begin]}
    body = json.dumps({**laid, "__metadata__": metadata}, indent=1, sort_keys=True).encode()
    theirs.write_bytes(len(body).to_bytes(8, "little") + body + b"".join(pieces))
    assert_same(carries.read(theirs).carry, sealed.carry)


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    """Cut at every 64th of its length, at every byte of the first hundred and the last: never read, always said."""
    path = tmp_path / "one.carry"
    carries.write(path, carries.seal(a_carry()))
    whole = path.read_bytes()
    cuts = {len(whole) * at // 64 for at in range(64)} | set(range(100)) | {len(whole) - 1}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(CarryDamaged, match=r"one\.carry"):
            carries.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CarryDamaged, match="file not fully covered"):
        carries.read(path)


def test_a_flipped_bit_anywhere_is_damaged_or_says_the_same(tmp_path: Path) -> None:
    """Every byte of the file, one random bit each: CarryDamaged, or a carry equal to the sealed one."""
    sealed = carries.seal(a_carry(a_sequence(0, n_rows=2), state=bytes(64)))
    path = tmp_path / "one.carry"
    carries.write(path, sealed)
    whole = path.read_bytes()
    rng = random.Random(7)
    survived = 0
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            back = carries.read(path)
        except CarryDamaged:
            continue
        survived += 1
        assert_same(back.carry, sealed.carry)
    assert survived <= 8, "only the padding of the header may be another white space"


def test_hostile_bytes_raise_nothing_else(tmp_path: Path) -> None:
    """A thousand mutations of a sound file: a carry or CarryDamaged, nothing else, and no huge allocation."""
    path = tmp_path / "one.carry"
    carries.write(path, carries.seal(a_carry(a_sequence(0), state=bytes(64))))
    whole = path.read_bytes()
    rng = random.Random(11)
    digits = [at for at, byte in enumerate(whole) if 48 <= byte <= 57]
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.choice(digits)
            changed[at : at + rng.randrange(3)] = rng.choice([b"9" * 30, b"-1", b"1e9", b"[", b"null", b"", b'"'])
        path.write_bytes(changed)
        try:
            carries.read(path)
        except CarryDamaged as error:
            assert error.path == path  # noqa: PT017 (most mutations raise, some may not)


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, np.ndarray[Any, Any]]], None]) -> None:
    """Change a file's metadata and tensors as somebody would who knows the format."""
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as file:
        metadata = dict(file.metadata())
    change(metadata, tensors)
    write_tensors(path, tensors, metadata)


def in_json(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, str], dict[str, Any]], None]:
    def apply(metadata: dict[str, str], _: dict[str, Any]) -> None:
        document = json.loads(metadata[key])
        metadata[key] = json.dumps(change(document) or document)

    return apply


WRONG: dict[str, tuple[Callable[[dict[str, str], dict[str, Any]], Any], str]] = {
    "no format": (lambda meta, _: meta.pop("format"), "another kind .*not said"),
    "another format": (lambda meta, _: meta.update(format="pt"), "another kind .*'pt'"),
    "a later version": (lambda meta, _: meta.update(version="2"), "version '2', this splitctl reads '1'"),
    "no checksums": (lambda meta, _: meta.pop("checksums"), "no checksums"),
    "checksums of another kind": (lambda meta, _: meta.update(checksums='{"state":1}'), "no checksums"),
    "checksums nested": (lambda meta, _: meta.update(checksums="[" * 100000), "description is wrong"),
    "a checksum too few": (in_json("checksums", lambda doc: {**doc, "state": ""}), "checksum of: state"),
    "a checksum too many": (in_json("checksums", lambda doc: {**doc, "x": ""}), "checksum of: x"),
    "no sequences": (lambda meta, _: meta.pop("sequences"), "sequences is missing"),
    "sequences no JSON": (lambda meta, _: meta.update(sequences="{"), "description is wrong"),
    "sequences nested": (lambda meta, _: meta.update(sequences="[" * 100000), "description is wrong"),
    "sequences no list": (lambda meta, _: meta.update(sequences="{}"), "sequences is"),
    "a sequence no object": (in_json("sequences", lambda doc: [1, *doc]), "sequence is 1"),
    "a sequence twice": (in_json("sequences", lambda doc: doc * 2), "comes twice"),
    "a sequence gone": (in_json("sequences", lambda doc: doc[:1]), "not of its sequences"),
    "a sequence more": (in_json("sequences", lambda doc: [*doc, {**doc[0], "seq_id": 9}]), "not of its sequences"),
    "a draw less": (in_json("sequences", lambda doc: [{**doc[0], "n_draws": 2}, doc[1]]), "checksum of: about"),
    "positions beyond the tokens": (in_json("sequences", lambda doc: [{**doc[0], "n_past": 6}, doc[1]]), "n_past is 6"),
    "a sampler field more": (
        in_json("sequences", lambda doc: [{**doc[0], "sampler": {**doc[0]["sampler"], "xtc": 1.0}}]),
        "sampler has the fields .* xtc, wanted",
    ),
    "a sampler out of range": (
        in_json("sequences", lambda doc: [{**doc[0], "sampler": {**doc[0]["sampler"], "top_p": 7.0}}]),
        "top_p is 7.0",
    ),
    "a temperature that is none": (
        in_json("sequences", lambda doc: [{**doc[0], "sampler": {**doc[0]["sampler"], "temp": math.nan}}]),
        "finite",
    ),
    "another model": (in_json("identity", lambda doc: {**doc, "file_bytes": 1}), "checksum of: about"),
    "identity short": (in_json("identity", lambda _: {"n_vocab": 1}), "identity has the fields n_vocab, wanted"),
    "a bool for a number": (in_json("identity", lambda doc: {**doc, "n_vocab": True}), "n_vocab is True"),
    "rope no pairs": (in_json("identity", lambda doc: {**doc, "rope": [["a"]]}), "rope has an entry of 1"),
    "an adapter's scale": (in_json("adapters", lambda doc: [{**doc[0], "scale": 1.0}]), "adapters are not those"),
    "another placement": (in_json("placement", lambda doc: {**doc, "n_ctx": 1}), "checksum of: about"),
    "a placement of nowhere": (in_json("placement", lambda doc: {**doc, "mode": "diagonal"}), "mode is 'diagonal'"),
    "a vocabulary too small": (in_json("identity", lambda doc: {**doc, "n_vocab": 5}), "vocabulary of 5"),
    "fewer sequences allowed": (in_json("representation", lambda doc: {**doc, "n_seq_max": 2}), "in a context of 2"),
    "a tensor gone": (lambda _, tensors: tensors.pop("seq.0.logits"), "seq.0.logits"),
    "a tensor more": (lambda _, tensors: tensors.update(x=np.zeros(3, np.uint8)), "missing from it, or not .*: x"),
    "a token changed": (lambda _, t: t.update({"seq.0.tokens": t["seq.0.tokens"] * 0}), "checksum of: seq.0.tokens"),
    "tokens as floats": (
        lambda _, t: t.update({"seq.0.tokens": t["seq.0.tokens"].view(np.float32)}),
        "tokens is float32",
    ),
    "logits turned": (lambda _, t: t.update({"seq.0.logits": t["seq.0.logits"].T.copy()}), "output ids for 11 rows"),
    "logits flat": (lambda _, t: t.update({"seq.0.logits": t["seq.0.logits"].reshape(-1)}), "logits is float32"),
    "state as numbers": (lambda _, t: t.update(state=t["state"].view(np.int32)), "wanted a row of bytes"),
    "state of two axes": (lambda _, t: t.update(state=t["state"].reshape(2, -1)), "wanted a row of bytes"),
    "state changed": (lambda _, t: t.update(state=t["state"][::-1].copy()), "checksum of: state"),
    "state short": (lambda _, t: t.update(state=t["state"][1:].copy()), "checksum of: about, state"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sound_file_of_wrong_content_is_damaged(tmp_path: Path, name: str) -> None:
    """One case for each way in which a well-formed file is no carry; the message says which."""
    path = tmp_path / "one.carry"
    carries.write(path, carries.seal(a_carry()))
    change, said = WRONG[name]
    rewrite(path, change)
    with pytest.raises(CarryDamaged, match=said) as caught:
        carries.read(path)
    assert caught.value.path == path


PROBLEMS: dict[str, tuple[Carry, str]] = {
    "positions": (a_carry(a_sequence(n_past=3)), "5 tokens want 5 or 4 positions, n_past is 3"),
    "negative": (a_carry(a_sequence(tokens=no_tokens(), n_past=-1)), "n_past is negative"),
    "id": (a_carry(a_sequence(seq_id=-1 % 2**31)), "in a context of 4"),
    "negative id": (a_carry(replace(a_sequence(), seq_id=-1)), "seq_id is negative"),
    "draws": (a_carry(a_sequence(n_draws=-1)), "n_draws is negative"),
    "rows": (a_carry(a_sequence(output_ids=no_tokens())), "0 output ids for 1 rows"),
    "width": (a_carry(a_sequence(logits=np.zeros((1, 3), np.float32))), "rows of 3 logits, vocabulary of 11"),
    "type": (a_carry(a_sequence(tokens=np.zeros(5, np.int64))), "tokens is int64"),
    "token": (a_carry(a_sequence(tokens=np.full(5, 11, np.int32))), "not in the vocabulary"),
    "negative token": (a_carry(a_sequence(accepted=np.array([-1], np.int32))), "a token is negative"),
    "output id": (a_carry(a_sequence(output_ids=np.array([-1], np.int32))), "an output id is negative"),
    "encoder": (a_carry(a_sequence(encoder_tokens=np.array([99], np.int32))), "not in the vocabulary"),
    "twice": (a_carry(a_sequence(1), a_sequence(1)), "comes twice"),
    "adapters": (a_carry(adapters=()), "adapters are not those"),
    "scale": (
        a_carry(
            adapters=(Adapter(Path("/x"), HEX, math.inf),),
            fingerprint=replace(FINGERPRINT, identity=replace(IDENTITY, adapters=((HEX, math.inf),))),
        ),
        "scale of inf",
    ),
    "state": (a_carry(state=np.zeros(4, np.int32).data), "state is a view of"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_contradicts_itself_is_not_sealed(name: str) -> None:
    """Law 1: one case for each contradiction."""
    made, said = PROBLEMS[name]
    with pytest.raises(CarryDamaged, match=said) as caught:
        carries.seal(made)
    assert caught.value.path is None
    with pytest.raises(CarryDamaged, match=said):
        carries.verify(SealedCarry(made, {}))


@pytest.mark.parametrize("row", ["tokens", "logits", "output_ids", "accepted"])
def test_a_change_after_the_seal_is_found(tmp_path: Path, row: str) -> None:
    """Whoever writes into a sealed array breaks the seal, and nothing is written to disk."""
    sealed = carries.seal(a_carry())
    carries.verify(sealed)
    array = getattr(sealed.carry.sequences[1], row)
    array[0] += 1
    with pytest.raises(CarryDamaged, match=rf"checksum of: seq\.2\.{row}"):
        carries.verify(sealed)
    with pytest.raises(CarryDamaged):
        carries.write(tmp_path / "x", sealed)
    assert list(tmp_path.iterdir()) == []


def test_a_change_of_the_state_after_the_seal_is_found(tmp_path: Path) -> None:
    """One bit of memory that somebody writes into: found in the carry that was made and in the one that was read."""
    state = bytearray(range(256))
    sealed = carries.seal(a_carry(state=memoryview(state)))
    path = tmp_path / "one.carry"
    carries.write(path, sealed)
    state[100] ^= 1
    with pytest.raises(CarryDamaged, match="checksum of: state"):
        carries.verify(sealed)
    back = carries.read(path)
    np.asarray(back.carry.state.obj)[100] ^= 1
    with pytest.raises(CarryDamaged, match="checksum of: state"):
        carries.verify(back)


def test_the_state_is_neither_copied_nor_moved() -> None:
    """Law 2: the bytes that are hashed and written are the caller's own."""
    state = np.arange(1 << 16, dtype=np.uint8)
    tensors = carries._tensors(a_carry(state=state.data))
    view = np.frombuffer(view_of(tensors["state"]), np.uint8)
    assert view.__array_interface__["data"][0] == state.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"header_xxh3_128": "f" * 32}, "header_xxh3_128"),
        ({"header_bytes": 1}, "header_bytes"),
        ({"file_bytes": 1}, "file_bytes"),
        ({"architecture": "qwen3"}, "architecture"),
        ({"n_vocab": 12}, "n_vocab"),
        ({"rope": (("freq_base", "1.0"), ("freq_scale", "1.0"))}, "rope freq_base"),
        ({"rope": ()}, "rope freq_scale"),
        ({"adapters": ((HEX, 1.0),)}, "adapter 0"),
        ({"adapters": (("0" * 32, 0.5),)}, "adapter 0"),
        ({"adapters": ()}, "adapter 0"),
        ({"adapters": ((HEX, 0.5), (HEX, 0.25))}, "adapter 1"),
    ],
)
def test_another_model_or_adapter_refuses(change: dict[str, Any], field: str) -> None:
    """S27: every field of the identity, the scale of an adapter among them, refuses with both values."""
    session = replace(FINGERPRINT, identity=replace(IDENTITY, **change))
    with pytest.raises(CarryMismatch, match=field) as caught:
        carries.check_fits(a_carry(), session)
    assert field in [one.field for one in caught.value.differences]
    assert all(one.carried != one.wanted for one in caught.value.differences)


def test_another_layout_is_told_and_left_to_the_caller() -> None:
    """A difference of representation is not a refusal: it is what a conversion has to do."""
    session = replace(FINGERPRINT, representation=replace(REPRESENTATION, type_k="q8_0", v_trans=True, build="b2"))
    found = carries.check_fits(a_carry(), session)
    assert [(one.field, one.carried, one.wanted) for one in found] == [
        ("build", "b1", "b2"),
        ("type_k", "f16", "q8_0"),
        ("v_trans", "False", "True"),
    ]
    assert carries.check_fits(a_carry(), FINGERPRINT) == ()


def test_an_old_file_stays_whole_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    """Writing over a folder, a link, or into nothing: refused by name, and what was there is still there."""
    old, new = carries.seal(a_carry()), carries.seal(a_carry(state=b"new"))
    path = tmp_path / "one.carry"
    carries.write(path, old)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(CarryNotWritten, match="symbolic link"):
        carries.write(link, new)
    with pytest.raises(CarryNotWritten, match="folder"):
        carries.write(tmp_path, new)
    with pytest.raises(CarryNotWritten, match="No such file"):
        carries.write(tmp_path / "nowhere" / "x", new)
    assert_same(carries.read(path).carry, old.carry)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "one.carry"]
    carries.write(path, new)
    assert_same(carries.read(link).carry, new.carry)


def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A child whose files may have 64 KiB, in the library's own write: told by name, the old carry is whole."""
    path = tmp_path / "one.carry"
    old = carries.seal(a_carry())
    carries.write(path, old)
    program = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from splitctl.carry.file import read, seal, write; from splitctl.errors import CarryNotWritten\n"
        "from dataclasses import replace\n"
        "carry = replace(read(Path(sys.argv[1])).carry, state=np.zeros(1 << 20, np.uint8).data)\n"
        "try:\n    write(Path(sys.argv[1]), seal(carry))\n"
        "except CarryNotWritten as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
    )
    assert "could not be saved" in done.stdout
    assert "File too large" in done.stdout
    assert [one.name for one in tmp_path.iterdir()] == ["one.carry"]
    assert_same(carries.read(path).carry, old.carry)


def test_a_description_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    """Five megabytes of stop texts are more than a header may hold: found before anything is written."""
    sealed = carries.seal(a_carry(a_sequence(sampler=SamplerSpec(stop=("x" * (5 << 20),)))))
    with pytest.raises(CarryNotWritten, match="header takes"):
        carries.write(tmp_path / "x", sealed)
    assert list(tmp_path.iterdir()) == []


def test_words_survive_their_texts() -> None:
    """The first law of texts: the same words, and the same texts again."""
    words = carries._words(a_carry())
    texts = to_texts(words)
    assert to_texts(from_texts(texts)) == texts
    assert from_texts(texts) == words


def test_a_carry_says_how_many_tokens_it_holds() -> None:
    """Over all sequences."""
    assert a_carry().n_tokens == 12
