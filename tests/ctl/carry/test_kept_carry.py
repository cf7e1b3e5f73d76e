"""A carry that an earlier splitctl wrote: read to the same values, today and with fields that came later."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash

from splitctl.carry import file as carries
from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.tensorfile import write_tensors
from splitctl.carry.text import dump
from splitctl.errors import CarryDamaged
from splitctl.outcome import to_plain

KEPT = Path(__file__).parents[2] / "golden" / "carry"
FILE = KEPT / "two-sequences.safetensors"


def test_an_old_carry_is_read_to_the_same_values() -> None:
    """Tokens, positions, samplers, draws, placement and fingerprint are what was read when it was written."""
    wanted = json.loads((KEPT / "two-sequences.json").read_text(encoding="utf-8"))
    sealed = carries.read(FILE)
    carry = sealed.carry
    assert len(carry.state) == wanted["state_bytes"]
    assert dict(sealed.checksums) == wanted["checksums"]
    assert carry.placement.to_json() == wanted["placement"]
    assert [[str(one.path), one.xxh3_128, one.scale] for one in carry.adapters] == wanted["adapters"]
    assert to_plain(asdict(carry.fingerprint.identity)) == wanted["identity"]
    assert to_plain(asdict(carry.fingerprint.representation)) == wanted["representation"]
    for one, about in zip(carry.sequences, wanted["sequences"], strict=True):
        assert (one.seq_id, one.n_past, one.n_draws) == (about["seq_id"], about["n_past"], about["n_draws"])
        assert to_plain(asdict(one.sampler)) == about["sampler"]
        assert list(one.logits.shape) == about["logits_shape"]
        assert np.isfinite(one.logits).all()
        for row in ("tokens", "output_ids", "accepted", "encoder_tokens"):
            assert getattr(one, row).tolist() == about[row]


def test_no_sampler_field_of_it_has_its_default() -> None:
    """A field that is lost shows."""
    plain = asdict(SamplerSpec())
    for one in json.loads((KEPT / "two-sequences.json").read_text(encoding="utf-8"))["sequences"]:
        assert not [name for name, value in one["sampler"].items() if value == to_plain(plain[name])]


@pytest.mark.parametrize("name", [one.name for one in fields(SamplerSpec)])
def test_a_carry_from_before_a_sampler_field_is_read(name: str, tmp_path: Path) -> None:
    """A file without the field, sealed like that, gives the field its default; it can be written again as it is now."""
    file = safetensors.numpy.load_file(FILE)
    with safetensors.safe_open(FILE, "np") as opened:
        metadata = dict(opened.metadata())
    sequences = json.loads(metadata["sequences"])
    for one in sequences:
        del one["sampler"][name]
    metadata["sequences"] = dump(sequences)
    texts = {key: metadata[key] for key in ("identity", "representation", "placement", "adapters", "sequences")}
    table = {key: [str(array.dtype), list(array.shape)] for key, array in file.items()}
    about = xxhash.xxh3_128_hexdigest(dump([texts, table]).encode())
    metadata["checksums"] = dump({**json.loads(metadata["checksums"]), "about": about})
    older, newer = tmp_path / "older", tmp_path / "newer"
    write_tensors(older, file, metadata)
    read = carries.read(older)
    for one, kept in zip(read.carry.sequences, carries.read(FILE).carry.sequences, strict=True):
        assert one.sampler == replace(kept.sampler, **{name: getattr(SamplerSpec(), name)})
    carries.write(newer, read)
    assert carries.read(newer).checksums == read.checksums
    metadata["sequences"] = metadata["sequences"].replace('"n_draws":5', '"n_draws":4')
    write_tensors(older, file, metadata)
    with pytest.raises(CarryDamaged, match="checksum of: about"):
        carries.read(older)
