"""The codec's sweep: what it counts, what it does not let pass, and real states of the real library."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from statecodec import parse
from tests.codec.cases import CASES
from tests.tool import run_tool
from tools import sweep_codec
from tools.sweep_codec import Tally, cells_of, lost, memory_of, reason_of
from tools.sweep_codec_cells import CACHES, all_cells, codec_placement, reading_of, settings, shape_of


def test_every_setting_and_form_is_a_cell() -> None:
    """Three layouts, three pairs of cache types, flash attention on and off, and two forms."""
    assert len(all_cells()) == len(set(all_cells())) == 36
    placements = [codec_placement(setting) for setting in settings()]
    assert {(one.type_k, one.type_v) for one in placements} == set(CACHES.values())
    assert {one.n_seq_max for one in placements} == {1, 4}
    assert {one.flash_attn.value for one in placements} == {"on", "off"}


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("plain", "attention"),
        ("window", "attention + attention"),
        ("encoder", "no memory"),
        ("opaque", "opaque DSV4"),
    ],
)
def test_memories_are_named_by_their_sections(name: str, memory: str) -> None:
    """What the sweep gathers by is the shape of the sections, and it gives facts that read the state again."""
    image = parse(CASES[name].data)
    assert memory_of(reading_of(image)) == memory
    assert shape_of(image)["sections"] == tuple(section.kind.value for section in image.sections)


def test_the_tally_counts_each_cell_once() -> None:
    """Passed, refused and failed add up; refusals and memories are gathered."""
    tally = Tally()
    reading = [["attention", 4, False, 12]]
    tally.add("a", {"cell": "x", "status": "passed", "reading": reading, "ambiguous": ["nothing"], "n_states": 4})
    for cell in ("y", "z"):
        tally.add("a", {"cell": cell, "status": "refused", "code": "no-context", "text": "text"})
    tally.add("b", {"cell": "x", "status": "failed", "why": "died"})
    assert (tally.n_cells, tally.passed, tally.n_refused, len(tally.failed), tally.states) == (4, 1, 2, 1, 4)
    assert tally.refused == {"no-context": {"cells": 2, "models": ["a"], "example": "text"}}
    assert tally.ambiguous == {"nothing": 1}
    assert tally.memories == {"attention ext 12 K": {"a"}}


@pytest.mark.parametrize(
    ("stage", "gone", "status", "code"),
    [
        ("loading", ["1:a:on:context", "1:a:on:sequence", "1:a:off:context"], "refused", "no-model"),
        ("taking", ["1:a:on:context", "1:a:on:sequence"], "refused", "died-before-the-state"),
        ("restoring", ["1:a:on:context"], "refused", "died-restoring"),
        ("reading", ["1:a:on:context"], "failed", None),
        (None, ["1:a:on:context"], "failed", None),
    ],
)
def test_a_death_is_judged_by_where_it_was(stage: str | None, gone: list[str], status: str, code: str | None) -> None:
    """Before a state is out, and while the library takes one, a death is the library's; elsewhere it is a failure."""
    waiting = ["1:a:on:context", "1:a:on:sequence", "1:a:off:context"]
    at = {} if stage is None else {"stage": stage, "cell": waiting[0]}
    told = list(lost(waiting, at, "signal 6: text"))
    assert [one["cell"] for one in told] == gone
    assert {(one["status"], one.get("code")) for one in told} == {(status, code)}
    assert not set(waiting) & set(gone)


def test_refusals_are_counted_by_what_the_library_says() -> None:
    """A known sentence of the library names the reason; an unknown one leaves the stage."""
    assert reason_of("no-context", "quantized V cache requires flash_attn to be enabled").startswith("quantized-v")
    assert reason_of("no-context", "something new") == "no-context"


@pytest.mark.build
@pytest.mark.parametrize(
    ("name", "layout", "memory"),
    [
        ("lfm2", "4-streams", "attention + attention + recurrent"),
        ("dots3note", "4-streams", "attention K + attention K + attention K"),
        ("deepseek4", "4-streams", "opaque DSV4"),
        ("t5encoder", "4-unified", "attention"),
    ],
)
def test_real_states_pass(name: str, layout: str, memory: str, library: Path, model_of: Callable[[str], Path]) -> None:
    """Memories of several parts, with a magic of their own, and of an encoder that never uses it are read and taken."""
    cells = [f"{layout}:f16:on:{form}" for form in ("context", "sequence")]
    told = list(cells_of(model_of(name), library, cells))
    assert [(one["cell"], one["status"]) for one in told] == [(cell, "passed") for cell in cells]
    assert [one["n_states"] for one in told] == [1, 4]
    assert {memory_of(one["reading"]) for one in told} == {memory}


@pytest.mark.build
def test_a_death_is_contained(library: Path, model_of: Callable[[str], Path]) -> None:
    """A context that kills the process is refused with what it said, in both forms, and the next cell goes on."""
    cells = ["4-streams:f16:on:context", "4-streams:f16:on:sequence", "1:f16:on:context"]
    told = list(cells_of(model_of("t5"), library, cells))
    assert [(one["cell"], one["status"]) for one in told] == [
        (cells[0], "refused"),
        (cells[1], "refused"),
        (cells[2], "passed"),
    ]
    assert "GGML_ASSERT" in told[0]["text"]


@pytest.mark.build
@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("emit", "lambda image: [bytes(image.n_bytes)]", "not what was read"),
        ("parse", "lambda state, facts=None: real(state, facts=facts) if facts else 1 / 0", "ZeroDivisionError"),
        ("parse", "lambda state, facts=None: os.abort()", "signal 6"),
    ],
)
def test_a_codec_with_a_fault_does_not_pass(
    name: str,
    fault: str,
    why: str,
    library: Path,
    model_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong bytes, an unexpected exception and a death while the codec reads are failures."""
    program = tmp_path / "faulty.py"
    program.write_text(
        f"import os, sys\nfrom tools import sweep_codec_cells as cells\nreal = cells.statecodec.{name}\n"
        f"cells.statecodec.{name} = {fault}\nsys.exit(cells.main(sys.argv[1:]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sweep_codec, "CELLS", "faulty")
    (told,) = cells_of(model_of("llama"), library, ["1:f16:on:context"])
    assert told["status"] == "failed"
    assert why in told["why"]


@pytest.mark.build
def test_the_program_ends_with_one_json_object(library: Path) -> None:
    """One model's 36 cells: quantized V without flash attention refused, everything else passed."""
    env = dict(os.environ, LLAMA_NATIVE_LIB=str(library))
    done = run_tool("sweep_codec", "--json", "--lib", library, "-k", "gemma2", env=env)
    assert done.returncode == 0, done.stderr
    assert "[1/1] gemma2" in done.stderr
    result = json.loads(done.stdout)
    counts = [result[name] for name in ("models", "cells", "passed", "states", "refused", "failed")]
    assert counts == [1, 36, 30, 60, 6, 0]
    assert result["refused_by"]["quantized-v-without-flash-attention"]["cells"] == 6
    assert result["memories"] == {"attention + attention": ["gemma2"]}
