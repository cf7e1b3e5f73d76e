"""`splitctl run` where the mode asked for cannot have the cache type asked for; on real builds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.houses import ROOT, run_here
from tests.ctl.one_kv_head import made

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]


def _run(build: str, model: Path, cache_dir: Path, *more: str) -> tuple[int, Any, str]:
    library = cache_dir / "builds" / build / "xllamacpp" / "xllamacpp.abi3.so"
    if not library.is_file():
        pytest.skip(f"{build} is not there: run ci/builds")
    words = (
        f"run -m {model} --device CPU,CPU -c 256 -t 1 --temp 0 -ctk q8_0 -ctv q8_0 -psm layer -sm tensor -n 4 --json"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMA_NATIVE_LIB": str(library)}
    done = run_here([*words.split(), "-p", "Once upon a time there was", *more], env)
    return done.returncode, json.loads(done.stdout), done.stderr.decode()


@pytest.fixture(scope="module")
def one_kv_head(smollm2: Path) -> Path:
    """A model whose tensor mode takes an f16 cache and dies of a quantized one."""
    return made(smollm2)


def test_the_cache_type_gives_way_to_the_mode(one_kv_head: Path, cache_dir: Path) -> None:
    """The build's tensor mode dies of this model's q8_0 cache: the run goes on there with f16 and lists it."""
    code, body, err = _run("xllamacpp-2026.10.11549", one_kv_head, cache_dir)
    assert code == 0, err
    switch = body["switch"]
    assert (switch["status"], switch["effective"], switch["confirmed"]) == ("switched", "tensor", True)
    (conversion,) = switch["conversions"]
    assert "K to f16 and V to f16" in conversion
    assert "changes by" in conversion
    assert [switch["effective_placement"][side] for side in ("type_k", "type_v")] == ["f16", "f16"]
    assert len(body["tokens"]) == 4
    told = next(line for line in err.splitlines() if "another cache type" in line)
    assert "q8_0" in told
    assert "going on with f16" in told


def test_no_convert_keeps_the_cache_type(one_kv_head: Path, cache_dir: Path) -> None:
    """With --no-convert the switch is refused instead, and the answer comes from the old mode."""
    code, body, err = _run("xllamacpp-2026.10.11549", one_kv_head, cache_dir, "--no-convert")
    switch = body["switch"]
    assert (switch["status"], switch["effective"], switch["conversions"]) == ("refused", "layer", [])
    assert "q8_0" in switch["reason"]
    assert switch["effective_placement"]["type_k"] == "q8_0"
    assert (code, len(body["tokens"])) == (4, 4), err
    assert "another cache type" not in err


def test_where_no_cache_type_helps_both_are_told(one_kv_head: Path, cache_dir: Path) -> None:
    """A build whose tensor mode dies of the model with f16 too: refused for what was asked, with both reasons."""
    code, body, err = _run("xllamacpp-2026.8.10566", one_kv_head, cache_dir)
    switch = body["switch"]
    assert (switch["status"], switch["effective"], switch["conversions"]) == ("refused", "layer", [])
    assert switch["requested_placement"]["type_k"] == switch["effective_placement"]["type_k"] == "q8_0"
    assert "and with a cache of f16:" in switch["reason"]
    assert {"quantized-cache-with-one-kv-head", "probe-dies"} <= {reason["code"] for reason in switch["reasons"]}
    assert (code, len(body["tokens"])) == (4, 4), err
