"""A real model on a real build: its facts, its vocabulary, its load and every way that a load ends early."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from llama_native import (
    CallFailed,
    Context,
    ContextParams,
    ForkedProcess,
    HandleClosed,
    Library,
    LoadCancelled,
    LoadMode,
    Model,
    ModelParams,
    Reentered,
    SplitMode,
    UnknownDevice,
)
from tests.native.real import NEWEST, OLDER, library_of
from tests.stublib import run_child

pytestmark = [pytest.mark.build, pytest.mark.model]

TEXTS = [
    "Hello, world",
    " leading and trailing ",
    "tabs\tand\nlines\r\n",
    "Grüße, 世界 und 🦙🦙",
    "0123456789 3.14159",
    "def f(x):\n    return x ** 2\n",
    "\u202eright to left\u202c",
    "e\u0301 combined",
    "a" * 3000,
]


def child_facts(path: str, model_path: str) -> dict[str, Any]:
    library = Library.open(path)
    shares: list[float] = []
    with Model.load(library, model_path, ModelParams(), progress=lambda share: shares.append(share) or True) as model:
        eot = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
        return {
            "numbers": [model.n_vocab, model.n_layer, model.n_embd, model.n_head, model.n_head_kv, model.n_ctx_train],
            "kinds": [model.has_encoder, model.has_decoder, model.is_recurrent, model.is_hybrid, model.is_diffusion],
            "n_swa": model.n_swa,
            "size": model.size_bytes,
            "description": model.description,
            "template": model.chat_template(),
            "shares": shares,
            "eot": eot,
            "plain_eot": len(model.tokenize("<|im_end|>", add_special=False)),
            "eot_pieces": [model.piece(eot[0]).decode(), model.piece(eot[0], special=True).decode()],
            "is_eog": [model.is_eog(eot[0]), model.is_eog(model.tokenize("a", add_special=False)[0])],
            "eos": model.token_eos,
            "empty": model.tokenize("", add_special=False),
            "bytes": model.tokenize(TEXTS[3].encode()) == model.tokenize(TEXTS[3]),
            "pieces": [
                b"".join(map(model.piece, model.tokenize(text, add_special=False))).decode("utf-8") for text in TEXTS
            ],
        }


@pytest.mark.parametrize("folder", [NEWEST, OLDER])
def test_a_model_says_what_it_is(smollm2: Path, folder: str) -> None:
    """Sizes, kinds, template, special tokens; every text comes back from its tokens byte for byte."""
    found = run_child(child_facts, library_of(folder), smollm2).value()
    assert found["numbers"] == [49152, 30, 576, 9, 3, 8192]
    assert found["kinds"] == [False, True, False, False, False]
    assert found["n_swa"] == 0
    assert 0.8 * smollm2.stat().st_size < found["size"] <= smollm2.stat().st_size
    assert "llama" in found["description"]
    assert "<|im_start|>" in found["template"]
    assert found["shares"] == sorted(found["shares"])
    assert found["shares"][-1] == 1.0
    assert len(found["eot"]) == 1
    assert found["plain_eot"] > 1
    assert found["eot_pieces"] == ["", "<|im_end|>"]
    assert found["is_eog"] == [True, False]
    assert found["eos"] == found["eot"][0]
    assert found["empty"] == []
    assert found["bytes"]
    assert found["pieces"] == TEXTS


def child_early_ends(path: str, model_path: str, folder: str) -> dict[str, str]:
    library = Library.open(path)
    found: dict[str, str] = {}

    def attempt(name: str, file: str = model_path, progress: Any = None, **params: Any) -> None:
        try:
            Model.load(library, file, ModelParams(**params), progress=progress).close()
        except Exception as error:  # noqa: BLE001 - whatever it is goes into the report
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "loaded"

    def reenter(_: float) -> bool:
        library.devices()
        return True

    def fail(_: float) -> bool:
        raise KeyError("mine")

    attempt("cancelled", progress=lambda share: share < 0.5)
    attempt("at once", progress=lambda _: False)
    attempt("reentered", progress=reenter)
    attempt("raised", progress=fail)
    attempt("missing", f"{folder}/none.gguf")
    attempt("empty", f"{folder}/empty.gguf")
    attempt("cut", f"{folder}/cut.gguf")
    attempt("device", devices=("CPU", "CUDA7"))
    attempt("split", tensor_split=(1.0,) * (library.max_devices + 1))
    for mode in (LoadMode.READ, LoadMode.MMAP):
        attempt(mode.name, load_mode=mode)
    attempt("two devices", devices=("cpu", "CPU"), split_mode=SplitMode.LAYER, tensor_split=(1.0, 3.0))
    return found


def test_a_load_that_ends_early_says_why_and_the_next_one_works(smollm2: Path, tmp_path: Path) -> None:
    """A progress that says no, calls back or raises; files that are none; a device and a split that cannot be."""
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "cut.gguf").write_bytes(smollm2.read_bytes()[:4_000_000])
    found = run_child(child_early_ends, library_of(NEWEST), smollm2, tmp_path).value()
    assert found["cancelled"].startswith(LoadCancelled.__name__)
    assert found["at once"].startswith(LoadCancelled.__name__)
    assert found["reentered"].startswith(Reentered.__name__)
    assert found["raised"] == "KeyError: 'mine'"
    for name in ("missing", "empty", "cut"):
        assert found[name].startswith(CallFailed.__name__), name
        assert "last words" in found[name], name
    assert found["device"].startswith(UnknownDevice.__name__)
    assert "'CUDA7'" in found["device"]
    assert "CPU" in found["device"]
    assert found["split"].startswith("ValueError")
    assert [found["READ"], found["MMAP"], found["two devices"]] == ["loaded"] * 3


def child_handles(path: str, model_path: str) -> dict[str, Any]:
    library = Library.open(path)
    found: dict[str, Any] = {}
    model = Model.load(library, model_path, ModelParams())
    context = Context(model, ContextParams(n_ctx=64, n_threads=1))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            model.tokenize("x")
        except ForkedProcess:
            model.close()  # frees nothing here: the memory is the parent's
            code = 0 if model.closed and context.closed else 2
        os._exit(code)
    found["fork"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for token in (-1, model.n_vocab, 10**12):
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary"):
            model.piece(token)
    found["alive"] = len(model.tokenize("still here"))
    model.close()
    model.close()
    found["closed"] = [model.closed, context.closed]
    for name, use in (("model", lambda: model.tokenize("x")), ("context", lambda: context.pos_max(0))):
        with pytest.raises(HandleClosed, match=name):
            use()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forgotten = Model.load(library, model_path, ModelParams())
        del forgotten
        gc.collect()
    found["warnings"] = [[one.category.__name__, str(one.message)] for one in caught]
    return found


def test_a_closed_model_is_closed_with_all_that_stands_on_it(smollm2: Path) -> None:
    """Twice is once; what is used afterwards says so; a forgotten close is a warning; a fork frees nothing."""
    found = run_child(child_handles, library_of(NEWEST), smollm2).value()
    assert found["fork"] == 0
    assert found["alive"] > 0
    assert found["closed"] == [True, True]
    ((category, text),) = found["warnings"]
    assert category == "ResourceWarning"
    assert str(smollm2) in text
