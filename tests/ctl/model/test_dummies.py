"""Dummy models: recipes that a real library turns into models, the same ones every time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from splitctl.model.facts import read_facts
from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools.gguf_out import write_gguf
from tools.make_dummies import main, make_big, model_path, random_weights, recipes, to_metadata


def test_recipes_cover_nearly_every_architecture() -> None:
    """There are 198 recipes, each names its architecture first."""
    assert len(recipes()) == 198
    assert all(items[0][0] == "general.architecture" for items in recipes().values())


def test_a_file_is_named_after_its_recipe(tmp_path: Path) -> None:
    """Another value in the recipe is another file."""
    recipe = recipes()["llama"]
    changed = [(key, kind, 8 if key == "llama.block_count" else value) for key, kind, value in recipe]
    assert model_path(tmp_path, "llama", recipe) == model_path(tmp_path, "llama", recipe)
    assert model_path(tmp_path, "llama", recipe) != model_path(tmp_path, "llama", changed)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("blk.0.attn_q.weight", -1.0, 1.0), ("blk.0.attn_norm.weight", 0.0, 2.0), ("blk.0.ssm_a", -1.0, 0.0)],
)
def test_weights_depend_on_the_name_alone(name: str, least: float, most: float) -> None:
    """The same tensor has the same weights everywhere; norms lie around one, ssm_a is negative."""
    slot = TensorSlot(name, (64, 32), 0, 64 * 32 * 4)
    first = np.frombuffer(random_weights(slot), dtype=np.float32)
    assert np.array_equal(first, np.frombuffer(random_weights(slot), dtype=np.float32))
    assert least < float(first.min()) < float(first.max()) < most
    other = random_weights(TensorSlot(name + "x", (64, 32), 0, 64 * 32 * 4))
    assert not np.array_equal(first, np.frombuffer(other, dtype=np.float32))


def test_tables_of_experts_name_experts_that_exist() -> None:
    """An i32 tensor holds distinct experts in each row, all in range."""
    rows = np.frombuffer(random_weights(TensorSlot("t", (2, 50), 26, 400), n_expert=4), dtype=np.int32).reshape(50, 2)
    assert 0 <= int(rows.min()) <= int(rows.max()) < 4
    assert all(len(set(row)) == 2 for row in rows.tolist())


def test_a_type_that_no_recipe_has_is_refused() -> None:
    """Weights of a quantized type are not invented."""
    with pytest.raises(ValueError, match="type 8"):
        random_weights(TensorSlot("t", (32,), 8, 34))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A tensor of the wrong size leaves neither a file nor a temporary one."""
    slot = TensorSlot("t", (4,), 0, 16)
    with pytest.raises(ValueError, match="16 bytes"):
        write_gguf(tmp_path / "m.gguf", [MetaValue("k", MetaKind.U32, 1)], (slot,), (b"short",))
    assert list(tmp_path.iterdir()) == []


def test_metadata_keeps_kinds(tmp_path: Path) -> None:
    """Numbers, arrays and texts of a recipe are typed as it says."""
    assert not list(tmp_path.iterdir())
    typed = to_metadata([("a", "u32", 1), ("b", "f32", [1.0, 2.0]), ("c", "str", "x"), ("d", "bool", True)])
    assert [item.kind for item in typed] == [MetaKind.U32, MetaKind.F32, MetaKind.STR, MetaKind.BOOL]
    assert typed[1].value == (1.0, 2.0)


def test_a_big_model_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    """A model of 60 MB has 60 MB within one layer, and is made once."""
    path = make_big(tmp_path, 60)
    facts = read_facts(path)
    assert abs(facts.file_bytes - 60_000_000) < facts.weight_bytes / facts.n_layer
    before = path.stat().st_mtime_ns
    assert make_big(tmp_path, 60).stat().st_mtime_ns == before


def test_an_unknown_recipe_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no recipe ends with exit code 2 and says how to list them."""
    with pytest.raises(SystemExit) as caught:
        main(["no-such-model"])
    assert caught.value.code == 2
    assert "--list" in capsys.readouterr().err


@pytest.mark.build
def test_a_real_library_makes_them(tmp_path: Path) -> None:
    """The library's own list of tensors becomes a model that reads back with every fact of its recipe."""
    env = dict(os.environ, LLAMA_NATIVE_LIB=str(library_of(NEWEST)))
    done = run_tool("make_dummies", "--out", tmp_path, "--json", "llama", "qwen3", "mamba", env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == {}
    facts = {name: read_facts(Path(path)) for name, path in told["made"].items()}
    assert facts["qwen3"].has_k_norm
    assert facts["mamba"].is_recurrent
    assert facts["llama"].n_vocab == 128
