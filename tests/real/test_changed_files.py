"""A real model's file is replaced under a session: by other weights, and by its equal."""

from __future__ import annotations

import shutil
from pathlib import Path

from llama_native import Library
from splitctl import Session, SplitMode, SwitchStatus
from splitctl.model.header import read_header
from tests.real.conftest import SEEDED, SMALL_PROMPT, base


def _other_weights(path: Path) -> Path:
    """Copy a model with one of its matrices turned around: the same header, other values."""
    header = read_header(path)
    tensor = next(one for one in header.tensors if one.name == "blk.0.attn_q.weight")
    other = bytearray(path.read_bytes())
    start = header.data_offset + tensor.offset
    end = start + (tensor.n_bytes or 0)
    other[start:end] = other[start:end][::-1]
    copy = path.with_name("other.gguf")
    copy.write_bytes(other)
    return copy


def test_a_session_goes_on_with_its_own_weights_alone(library: Library, small_model: Path, tmp_path: Path) -> None:
    """Other weights under the same header refuse a switch and cost no token; an equal file is loaded again."""
    path = Path(shutil.copyfile(small_model, tmp_path / "model.gguf"))
    kept = Path(shutil.copyfile(path, tmp_path / "kept.gguf"))
    answers = []
    for is_disturbed in (False, True):
        with Session.open(path, base(), library=library, prober=None) as session:
            session.prefill(SMALL_PROMPT)
            tokens = [token.id for token in session.generate(n=4, sampler=SEEDED)]
            target = session.placement.changed(mode=SplitMode.NONE, devices=base().devices[:1])
            if is_disturbed:
                _other_weights(path).replace(path)
                refused = session.switch(target)
                assert (refused.status, refused.reasons[0].code) == (SwitchStatus.REFUSED, "file-changed")
                kept.replace(path)
            assert session.switch(target).status is SwitchStatus.SWITCHED
            answers.append([*tokens, *(token.id for token in session.generate(n=6))])
    assert answers[0] == answers[1]
