"""A carry that an earlier splitctl wrote: read to the same values, today and with fields that came later."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from splitctl.carry import file as carries
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


def _fields(sealed: carries.SealedCarry) -> list[dict[str, Any]]:
    return [asdict(one.sampler) for one in sealed.carry.sequences]


def test_no_sampler_field_of_it_has_its_default() -> None:
    """A field that is lost shows."""
    plain = {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0, "repeat_last_n": 64}
    for fields in _fields(carries.read(FILE)):
        assert not [name for name, value in plain.items() if fields[name] == value]
        assert fields["stop"]
