"""The files of a session change under it: it serves on what it has, and never on other bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl.errors import FileChanged, Parked
from splitctl.outcome import Stage
from splitctl.placement import SplitMode
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

_WEIGHTS = bytes(range(256)) * 8
_ADAPTER: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora"}
_FREES = {"llama_free", "llama_model_free", "llama_model_load_from_file"}


def _write_other(path: Path) -> None:
    """Put other weights under the same header, as one that downloads anew does."""
    extra = _ADAPTER if path.name == "adapter.gguf" else {}
    write_model(path.with_name("next"), weights=_WEIGHTS[::-1], extra=extra).replace(path)


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


_CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "another model": lambda path: write_model(path, weights=_WEIGHTS, extra={"general.name": "butS"}),
    "other weights": _write_other,
    "a directory": _make_directory,
    "a download under way": lambda path: os.truncate(path, path.stat().st_size + 100),
}


def _put_back(path: Path, kept: Path) -> None:
    if path.is_dir():
        path.rmdir()
    shutil.copyfile(kept, path)


def child_changes(path: str, folder: str) -> dict[str, Any]:
    """Change the model's file, and then the adapter's, in every way; ask for switches; put equal files back."""
    files = [write_model(Path(folder) / "model.gguf", weights=_WEIGHTS)]
    files.append(write_model(Path(folder) / "adapter.gguf", weights=_WEIGHTS, extra=_ADAPTER))
    kept = [Path(shutil.copyfile(file, file.with_suffix(".kept"))) for file in files]
    library = Library.open(path)
    stub = Stub(path)
    session = scenes.start(library, str(files[0]), Scene(adapters=(str(files[1]),)))
    target = session.placement.changed(tensor_split=(3.0, 1.0))
    told: dict[str, Any] = {}
    for file, copy in zip(files, kept, strict=True):
        for name, change in _CHANGES.items():
            change(file)
            stub.reset()
            outcomes = [session.switch(target, force=force) for force in (False, True)]
            scenes.generate(session, 1, 1)
            told[f"{file.stem}: {name}"] = [
                [one.status.value for one in outcomes],
                ["the file changed since the session opened" in one.reason for one in outcomes],
                [[reason.code for reason in one.reasons] for one in outcomes],
                [reason.code for reason in session.check(target).reasons],
                sorted(_FREES & set(stub.names())),
            ]
            _put_back(file, copy)
    outcome = session.switch(target)
    scenes.generate(session, 1, 1)
    told["equal"] = [outcome.status.value, session.last_switch is not None and session.last_switch.confirmed]
    session.close()
    return told


def test_a_switch_is_refused_over_a_file_that_changed(tmp_path: Path) -> None:
    """Each change of a model or adapter file refuses a switch before anything is freed; an equal file is accepted."""
    seen = run_child(child_changes, build(), tmp_path).value()
    assert seen.pop("equal") == ["switched", True]
    assert len(seen) == 2 * len(_CHANGES)
    code = ["file-changed"]
    for name, found in seen.items():
        assert found == [["refused", "refused"], [True, True], [code, code], code, []], name


def child_elsewhere(path: str, folder: str) -> list[str]:
    """Name the files from their folder, and go to another one."""
    os.chdir(folder)
    session = scenes.start(Library.open(path), "model.gguf", Scene(adapters=("adapter.gguf",)))
    os.chdir("/")
    statuses = [session.switch(session.placement.changed(tensor_split=(3.0, 1.0))).status.value]
    scenes.generate(session, 1, 1)
    session.close()
    return [*statuses, str(session.facts.path)]


def test_a_program_may_go_to_another_folder(tmp_path: Path) -> None:
    """Files that were named from the folder of then are found again by a switch."""
    model = write_model(tmp_path / "model.gguf", weights=_WEIGHTS)
    write_model(tmp_path / "adapter.gguf", weights=_WEIGHTS, extra=_ADAPTER)
    assert run_child(child_elsewhere, build(), tmp_path).value() == ["switched", str(model)]


def child_part(path: str, folder: str) -> list[Any]:
    """The second part of a split model changes."""
    split = {"split.count": 2, "split.tensors.count": 2}
    parts = [
        write_model(Path(folder) / f"m-0000{n + 1}-of-00002.gguf", weights=_WEIGHTS, extra={**split, "split.no": n})
        for n in range(2)
    ]
    session = scenes.start(Library.open(path), str(parts[0]), Scene())
    write_model(parts[1], weights=_WEIGHTS[::-1], extra={**split, "split.no": 1})
    outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
    session.close()
    return [outcome.status.value, str(parts[1]) in outcome.reason]


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    """Other weights in the second part refuse a switch, and the part is named."""
    assert run_child(child_part, build(), tmp_path).value() == ["refused", True]


def child_meanwhile(path: str, model: str, stage: str) -> dict[str, Any]:
    """Other weights are put in place when a switch that was checked reaches a stage."""
    stub = Stub(path)
    session = scenes.start(Library.open(path), model, Scene())
    tokens = session.tokens()
    stub.reset()

    def progress(now: Stage, _share: float) -> None:
        if now.value == stage:
            _write_other(Path(model))

    outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR), progress=progress)
    told: dict[str, Any] = {
        "status": outcome.status.value,
        "stage": outcome.stage.value if outcome.stage else None,
        "code": outcome.reasons[0].code,
        "freed": bool(_FREES & set(stub.names())),
        "loads": stub.count("llama_model_load_from_file"),
    }
    try:
        scenes.generate(session, 1, 1)
    except Parked:
        told["parked"] = session.parked_at is not None and session.parked_at.is_file()
        # The carry belongs to the model that it was made with: with its file back the session goes on from there.
        write_model(Path(model), weights=_WEIGHTS)
        with scenes.start(session._live.engine.library, model, Scene()) as fresh:
            fresh.remove_sequence(0)
            fresh.restore(str(session.parked_at))
            told["restored"] = fresh.tokens() == tokens
    session.close()
    return told | {"live": set(stub.live().values()) == {0}}


@pytest.mark.parametrize("stage", ["quiescing", "saving", "sealing"])
def test_a_file_that_changes_during_a_switch_costs_nothing(tmp_path: Path, stage: str) -> None:
    """Up to the moment before anything is freed a change leaves the session serving as it was."""
    model = write_model(tmp_path / "model.gguf", weights=_WEIGHTS)
    seen = run_child(child_meanwhile, build(), model, stage).value()
    wanted = {"quiescing": ("refused", "checking")}.get(stage, ("fell_back", "sealing"))
    assert (seen["status"], seen["stage"]) == wanted
    assert (seen["code"], seen["freed"], seen["live"]) == ("file-changed", False, True)


@pytest.mark.parametrize("stage", ["freeing", "placing"])
def test_a_session_is_parked_rather_than_served_with_other_weights(tmp_path: Path, stage: str) -> None:
    """Once the model is freed and its file holds other weights, neither placement loads them: the carry is written."""
    model = write_model(tmp_path / "model.gguf", weights=_WEIGHTS)
    seen = run_child(child_meanwhile, build(), model, stage, XDG_STATE_HOME=str(tmp_path)).value()
    assert (seen["status"], seen["stage"], seen["code"]) == ("parked", "placing", "file-changed")
    assert (seen["loads"], seen["parked"], seen["restored"], seen["live"]) == (0, True, True, True)


def child_while_loading(path: str, model: str) -> list[Any]:
    """Other weights are put in place while a session opens, and while one is opened again from its own files."""
    library = Library.open(path)
    told: list[Any] = []

    def opened(**more: Any) -> str:
        try:
            with Session.open(model, Scene().placement(), library=library, prober=None, **more) as session:
                return session.stage.value
        except FileChanged as error:
            return error.how

    told.append(opened(progress=lambda share: _write_other(Path(model)) if share == 1.0 else None))
    write_model(Path(model), weights=_WEIGHTS)
    with Session.open(model, Scene().placement(), library=library, prober=None) as session:
        files = session.files
    told.append(opened(files=files))
    _write_other(Path(model))
    return [*told, opened(files=files), Stub(path).live()]


def test_what_is_opened_is_what_was_asked_for(tmp_path: Path) -> None:
    """A file that changes while it is loaded opens no session, and a session opened again takes its own files alone."""
    model = write_model(tmp_path / "model.gguf", weights=_WEIGHTS)
    loading, again, other, live = run_child(child_while_loading, build(), model).value()
    assert (loading, again, other) == ("other weights are in its place", "serving", "other weights are in its place")
    assert set(live.values()) == {0}


def child_refused_restore(path: str, model: str, adapter: str) -> list[Any]:
    """The library takes no restored state, and the adapter's file is gone: the session is put back as it was."""
    stub = Stub(path)
    session = scenes.start(Library.open(path), model, Scene(adapters=(adapter,)))
    saved = Path(model).with_name("saved.safetensors")
    session.save(saved)
    tokens = session.tokens()
    Path(adapter).unlink()
    stub.faults("set_data:zero@1")
    told: list[Any] = [session.restore(saved).recomputed]
    stub.faults("clear")
    scenes.generate(session, 1, 1)
    told.append(session.tokens()[: len(tokens)] == tokens)
    session.close()
    return [*told, sorted(set(stub.live().values()))]


def test_a_context_is_made_again_without_reading_adapters_again(tmp_path: Path) -> None:
    """A context that a refused restore has spoilt is replaced on the same model, whose adapters are still loaded."""
    model = write_model(tmp_path / "model.gguf", weights=_WEIGHTS)
    adapter = write_model(tmp_path / "adapter.gguf", weights=_WEIGHTS, extra=_ADAPTER)
    assert run_child(child_refused_restore, build(), model, adapter).value() == [True, True, [0]]
