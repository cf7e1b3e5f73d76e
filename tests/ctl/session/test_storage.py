"""What a session writes about itself into a carry, and what a file costs that it is restored from."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl.carry.fingerprint import rope_settings
from splitctl.errors import SplitctlError
from tests.ctl import scenes
from tests.ctl.model_facts import model_facts
from tests.ctl.scenes import Scene
from tests.stublib import build, needs_compiler, run_child, write_model

_GIB = 1 << 30


def test_rope_settings_are_names_and_texts_in_order() -> None:
    """Scalars go in under their short names, sorted; arrays are left to the header's checksum."""
    facts = model_facts(
        rope=(
            ("llama.rope.scaling.type", "yarn"),
            ("llama.rope.freq_base", 100000.0),
            ("llama.rope.dimension_sections", (16, 24, 24, 0)),
            ("llama.rope.dimension_count", 64),
        )
    )
    assert rope_settings(facts) == (("dimension_count", "64"), ("freq_base", "100000.0"), ("scaling.type", "yarn"))


def test_a_model_without_rope_has_no_settings() -> None:
    """Nothing is invented for a header that says nothing."""
    assert rope_settings(model_facts()) == ()


def child_large(path: str, model: str, file: str) -> dict[str, Any]:
    """Restore a file; tell what came of it, and by how many bytes the process grew at its largest."""
    session = scenes.start(Library.open(path), model, Scene())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        restored = session.restore(file)
        told = restored.reason
    except SplitctlError as error:
        told = str(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    tokens = session.tokens()
    session.close()
    return {"told": told, "grown": grown, "tokens": tokens}


@pytest.mark.stub
@needs_compiler
@pytest.mark.parametrize(
    ("n_tokens", "told"), [(3, "the tokens were read again"), (1 << 27, f"holds {(1 << 27) - 1} tokens")]
)
def test_a_file_costs_the_memory_of_what_is_in_it(tmp_path: Path, n_tokens: int, told: str) -> None:
    """A slot file of a gibibyte with nothing in it but a header is judged by that header."""
    file = tmp_path / "slot"
    file.write_bytes(struct.pack("<4sII", b"qsgg", 4, n_tokens))
    os.truncate(file, _GIB)
    model = write_model(tmp_path / "tiny.gguf")
    seen = run_child(child_large, build(), model, file).value()
    assert told in seen["told"]
    assert seen["grown"] < _GIB // 16
