"""The constructor arguments of llama_cpp.Llama: each is used, ignored with a warning, or refused."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from splitctl import compat
from splitctl.compat.llama_cpp import Llama
from splitctl.compat.llama_cpp.arguments import IGNORED, REFUSED, check, mode_of, placement_of
from splitctl.compat.llama_cpp.files import cached
from splitctl.errors import ConfigInvalid
from splitctl.placement import FlashAttn, SplitMode

PLAIN = {
    "n_gpu_layers": None, "split_mode": 1, "main_gpu": 0, "tensor_split": None, "devices": (), "n_ctx": 512,
    "n_batch": 512, "n_ubatch": 512, "n_threads": None, "n_threads_batch": None, "offload_kqv": True,
    "flash_attn": None, "type_k": None, "type_v": None,
}  # fmt: skip


def test_arguments_become_a_placement() -> None:
    """By llama.cpp's numbers and by words, with what its programs leave out."""
    found = placement_of(**{**PLAIN, "devices": "CPU,CPU", "n_ctx": 128, "type_k": 8, "tensor_split": [3, 1, 0, 0]})  # type: ignore[arg-type] # as programs give them
    assert (found.mode, found.devices, found.n_gpu_layers) == (SplitMode.LAYER, ("CPU", "CPU"), -1)
    assert (found.n_batch, found.n_ubatch, found.type_k, found.tensor_split) == (128, 128, "q8_0", (3.0, 1.0))
    plain = placement_of(**{**PLAIN, "split_mode": "tensor", "flash_attn": False})  # type: ignore[arg-type]
    assert (plain.mode, plain.n_gpu_layers, plain.flash_attn) == (SplitMode.TENSOR, 0, FlashAttn.OFF)
    assert [mode_of(number) for number in range(4)] == list(SplitMode)
    with pytest.raises(ValueError, match="none layer row tensor"):
        mode_of("tensors")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_model_is_refused(name: str) -> None:
    """But for the value that says nothing."""
    check({name: REFUSED[name][0][0]})
    with pytest.raises(ValueError, match=f"^{name} is 7"):
        check({name: 7})


def test_what_has_no_effect_is_said() -> None:
    """By name, and an unknown argument too, as llama_cpp takes any."""
    check({name: nothing for name, (nothing, _) in IGNORED.items()})
    check({"n_parts": -1, "f16_kv": True})
    for name in (*IGNORED, "no_such_argument"):
        with pytest.warns(UserWarning, match=name):
            check({name: "x"})


def test_a_missing_model_is_a_value_error() -> None:
    """As in llama_cpp."""
    with pytest.raises(ValueError, match="Model path does not exist"):
        Llama("/nowhere/model.gguf")


def test_a_model_is_found_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    """In the revision that is called main, by a pattern that fits one file or the first part of several."""
    repo = tmp_path / "models--one--two"
    for revision in ("old", "new"):
        folder = repo / "snapshots" / revision
        folder.mkdir(parents=True)
        for name in ("a-q4.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
            (folder / name).touch()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("old")
    assert cached("one/two", "*q4.gguf", cache_dir=tmp_path) == repo / "snapshots" / "old" / "a-q4.gguf"
    assert cached("one/two", "b-*", cache_dir=tmp_path).name == "b-00001-of-00002.gguf"
    assert cached("one/two", "a-q4.gguf", local_dir=repo / "snapshots" / "new").parent.name == "new"
    for repo_id, name, words in (
        ("one/two", "*.gguf", "fits one file"), ("one/two", "c*", "hf download one/two c"), ("one/x", None, "searched"),
        ("../two", None, "owner/name"),
    ):  # fmt: skip
        with pytest.raises(ConfigInvalid, match=words):
            cached(repo_id, name, cache_dir=tmp_path)


def test_it_is_put_in_the_place_of_llama_cpp_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For libraries that import it by name; the real one, once imported, stays."""
    names = ("llama", "llama_cache", "llama_chat_format", "llama_grammar", "llama_types")
    for name in ("llama_cpp", *(f"llama_cpp.{one}" for one in names)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compat.install()
    assert sys.modules["llama_cpp"].__dict__["Llama"] is Llama
    assert sys.modules["llama_cpp.llama"].__dict__["Llama"] is Llama
    compat.install()
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    with pytest.raises(ImportError, match="before that"):
        compat.install()


def test_the_page_names_every_argument_and_what_becomes_of_it() -> None:
    """Those of the constructor, and those that are ignored or refused."""
    page = (Path(__file__).parents[3] / "docs" / "compat.md").read_text(encoding="utf-8")
    rows = page.split("## Constructor arguments")[1].split("## Differences")[0].splitlines()
    own = set(inspect.signature(Llama.__init__).parameters) - {"self", "others"}
    for names, word in ((own, "used"), (IGNORED, "ignored"), (REFUSED, "refused")):
        told = " ".join(row for row in rows if word in row or "not there:" in row or "kept" in row)
        assert [name for name in names if f"`{name}`" not in told] == []
